"""What users start, on the device against the same on the CPU: scripts under `hf_osdp.run`, checkpoints in the
background, reads of weights, commands, and memory that runs out.
"""

from __future__ import annotations

import json

import pytest
import torch
from transformers import GPT2Config
from typer.testing import CliRunner

from benchmarks.gpu_suite import catalogue  # noqa: F401  (the catalogue has the order of steps)
from benchmarks.gpu_suite.faults import problem_of, runs_out
from hf_osdp.cli.app import app
from hf_osdp.planner.hardware import Backend
from hf_osdp.planner.profile import Profile
from tests.distributed.cases.reads import CASES
from tests.distributed.test_run import HELPER, LOOP, MODEL, TRAINER, run_main
from tests.helpers.checkpointed import worst
from tests.helpers.distributed import run_ranks
from tests.helpers.output import ends_of
from tests.helpers.training import alone

from .training import LATE_MS, Variant, on_devices, train

FEW_VALUES = {"FAKE_CUDA_COMPUTE_MAX": "4096"}
"""What measures times needs no values, but those that ranks exchange."""


WATCHED = {"late": "side", "sanitizes": True}
"""Streams beside the default one are late, and torch's sanitizer watches."""


@pytest.mark.parametrize(("name", "late"), [("train.py", "side"), ("train.py", "main"), ("loop.py", "side")])
def test_script_under_hf_osdp_run_trains_as_over_gloo(tmp_path, name, late):
    for file, text in {"train.py": MODEL + TRAINER, "loop.py": MODEL + LOOP, "helper.py": HELPER}.items():
        (tmp_path / file).write_text(text)
    losses = {}
    for device, run in (("cpu", run_ranks), ("cuda", on_devices)):
        folder = tmp_path / device
        folder.mkdir()
        how = {"init": False} if device == "cpu" else {"joins": False, "late": late, "sanitizes": True}
        run(run_main, 2, str(tmp_path / name), str(folder), **how)
        losses[device] = json.loads((folder / "losses.json").read_text())
        assert json.loads((folder / "osdp_report.json").read_text())["plan"]["world_size"] == 2
    torch.testing.assert_close(losses["cuda"], losses["cpu"], rtol=1e-5, atol=1e-5)


def saved_and_resumed(folder):
    """Two steps, saved in the background while training goes on, and two from there."""
    how = {"folder": folder, "in_background": True}
    return [train(Variant(steps=2), "cuda", start=start, **how) for start in (0, 2)]


def test_background_checkpoints_go_on_as_in_one_process(tmp_path):
    first, second = on_devices(saved_and_resumed, 2, str(tmp_path), **WATCHED)[0]
    wanted = alone(Variant(steps=4).alone)
    assert [*first.losses, *second.losses] == pytest.approx(wanted.losses, rel=0, abs=1e-12)
    assert worst(second.parameters, wanted.parameters) < 1e-12


READ_FIRST = CASES["read, gpt2, read first, checkpointing"]


def train_read_first():
    return train(READ_FIRST, "cuda")


def test_weights_that_are_read_train_as_in_one_process():
    errors = on_devices(train_read_first, 2, **WATCHED)[0].worst_error(alone(READ_FIRST.alone))
    assert max(errors.values()) < 1e-12, errors


def command(*arguments):
    done = CliRunner().invoke(app, list(map(str, arguments)))
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def model(tmp_path):
    config = GPT2Config(n_layer=4, n_embd=32, n_head=4, vocab_size=500, n_positions=64, bos_token_id=0, eos_token_id=0)
    config.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize("processes", [1, 2])
def test_profile_measures_the_device_and_blocks_of_a_model(model, tmp_path, processes):
    out = tmp_path / "profile.json"
    words = ("profile", model, "--sequence-length", 32, "--micro-batch-sizes", "1,2", "--precision", "bf16")
    (code, output, _), *others = on_devices(
        command, processes, *words, "--seconds", 0.2, "--output", out, env=FEW_VALUES, joins=False
    )
    assert code == 0 and "GPT2Block" in output and all(other[:2] == (0, "") for other in others), output
    found = Profile.load(out)
    assert (found.hardware.backend, found.hardware.world_size) == (Backend.NCCL, processes)
    assert found.hardware.device.capability == (8, 0) and found.hardware.host is not None
    assert found.micro_batch_sizes == (1, 2)


def test_out_of_memory_is_explained_and_a_safer_plan_trains(monkeypatch):
    """The allocator refuses memory in the first start, and the launcher starts the program again.

    Without torch's sanitizer: its hook loses the exception with which torch's checkpoint ends a recomputation early.
    """
    late = {"FAKE_CUDA_LATENCY_MS": str(LATE_MS), "FAKE_CUDA_LATE": WATCHED["late"]}
    for name, value in (FEW_VALUES | late).items():
        monkeypatch.setenv(name, value)
    done = runs_out(1, "replan", "cuda", timeout_s=220)
    assert not problem_of(done, 1, "replan"), ends_of(done.stderr)
