"""`hf-osdp config` writes what accelerate reads, and `profile` measures."""

from __future__ import annotations

import os

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from transformers import GPT2Config
from typer.testing import CliRunner

from hf_osdp.cli.app import app
from hf_osdp.planner.profile import Profile
from tests.helpers.distributed import run_ranks


def call(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def written(folder, *arguments: object):
    """What accelerate reads from the file, and what was shown."""
    done = call("config", "--output", folder / "osdp.yaml", *arguments)
    assert done.exit_code == 0, done.output
    return load_config_from_file(str(folder / "osdp.yaml")), done.stdout


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_config_takes_the_devices_that_are_there(gpus, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    config, shown = written(tmp_path)
    found = (config.num_processes, config.use_cpu, config.mixed_precision)
    assert found == ((gpus, False, "bf16") if gpus else (2, True, "no"))
    assert config.fsdp_config["fsdp_sharding_strategy"] == {"osdp": True} | ({} if gpus else {"use_cpu": True})
    assert f"accelerate launch --config_file {tmp_path / 'osdp.yaml'} -m hf_osdp.run train.py" in shown


def test_config_of_several_machines_names_the_first_and_takes_flags(tmp_path):
    flags = "--num-nodes 2 --devices-per-node 8 --device cuda --precision fp16 --memory-limit 16GiB"
    config, shown = written(tmp_path, *flags.split(), "--main-address", "10.0.0.1:1234")
    assert (config.num_machines, config.num_processes) == (2, 16)
    assert (config.main_process_ip, config.main_process_port) == ("10.0.0.1", 1234)
    assert config.mixed_precision == "fp16" and config.fsdp_config["fsdp_sharding_strategy"]["memory_limit"] == "16GiB"
    assert "--machine_rank 0 -m hf_osdp.run" in shown and "on each of 2 machines with its own --machine_rank" in shown


PROFILE = ("profile", "--device", "cpu", "--seconds", "0.1")


def test_profile_times_a_model_and_writes_a_readable_file(tmp_path):
    model, out = tmp_path / "tiny", tmp_path / "p.json"
    GPT2Config(n_layer=4, n_embd=20, n_head=4, vocab_size=61, n_positions=16).save_pretrained(model)
    sizes = "--sequence-length 12 --micro-batch-sizes 1,2 --precision bf16"
    done = call(*PROFILE, model, *sizes.split(), "--output", out)
    assert done.exit_code == 0, done.output
    profile = Profile.load(out)
    assert profile.micro_batch_sizes == (1, 2)
    assert {s.compute_dtype.value for s in profile.segments} == {"bfloat16"}
    assert "GPT2Block" in done.output and str(out.name) in done.output
    assert max(map(len, done.output.splitlines())) <= 100


def profile_here(output: str) -> str:
    return call(*PROFILE, "--output", output).output


@pytest.mark.slow
def test_profile_under_a_launcher_comes_from_rank_zero(tmp_path):
    out = tmp_path / "p.json"
    first, second = run_ranks(profile_here, 2, str(out), init=False)
    assert "all-gather" in first and "FSDP2's own work" in first
    assert second == ""
    assert Profile.load(out).hardware.world_size == 2
