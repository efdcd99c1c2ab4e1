"""From any layout to any other, and what `hf-osdp convert` says."""

from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import load_file as load_safetensors
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_osdp.checkpoint.convert import Target, convert
from hf_osdp.checkpoint.resume import check_checkpoint
from hf_osdp.checkpoint.states import load_model, load_optimizer
from hf_osdp.cli.app import app
from hf_osdp.errors import CheckpointError

from .checkpoints import saved, trained

STATES = (Target.SHARDED, Target.WHOLE, Target.SINGLE)


def test_a_round_through_all_layouts_changes_nothing(tmp_path):
    model, optimizer = trained()
    folder = saved(tmp_path / "start", model=model, optimizer=optimizer)
    around = (Target.WHOLE, Target.SINGLE, Target.SHARDED, Target.SINGLE, Target.WHOLE, Target.SHARDED)
    for number, to in enumerate(around):
        source, folder = folder, tmp_path / str(number)
        convert(source, folder, to=to, model=model)
        check_checkpoint(folder)
        assert (folder / "random_states_0.pkl").is_file() and (folder / "custom_checkpoint_0.pkl").is_file()
    again, its = trained(seed=9)
    load_model(folder, again)
    load_optimizer(folder, again, its)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    pairs = itertools.zip_longest(optimizer.state_dict()["state"].values(), its.state_dict()["state"].values())
    assert all(torch.equal(one[key], other[key]) for one, other in pairs for key in one)


def test_what_one_process_wrote_is_read_by_torch_alone(tmp_path):
    model, optimizer = trained()
    convert(saved(tmp_path / "start", model=model, optimizer=optimizer), tmp_path / "single", to=Target.SINGLE)
    again, its = trained(seed=9, steps=0)
    missing = again.load_state_dict(load_safetensors(tmp_path / "single" / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight", "transformer.wte.weight"}
    its.load_state_dict(torch.load(tmp_path / "single" / "optimizer.bin", weights_only=True))
    assert all(
        torch.equal(one[key], other[key])
        for one, other in zip(optimizer.state_dict()["state"].values(), its.state_dict()["state"].values(), strict=True)
        for key in one
    )


def test_positions_need_a_model_with_these_groups(tmp_path):
    model, optimizer = trained()
    convert(saved(tmp_path / "start", model=model, optimizer=optimizer), tmp_path / "single", to=Target.SINGLE)
    with pytest.raises(CheckpointError, match="goes by the parameters' positions; give the model"):
        convert(tmp_path / "single", tmp_path / "a", to=Target.WHOLE)
    other = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"parameter groups of \[6, 10\] are neither all of the model's 2 parameters"):
        convert(tmp_path / "single", tmp_path / "b", to=Target.WHOLE, model=other)
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_the_command_writes_what_from_pretrained_reads(tmp_path):
    model, optimizer = trained()
    folder = saved(tmp_path / "start", model=model, optimizer=optimizer)
    model.config.save_pretrained(folder)
    (folder / "osdp_checkpoint.json").unlink()  # the configuration was not there when it was summed
    run = lambda *words: CliRunner().invoke(app, ["convert", *map(str, words)])  # noqa: E731
    result = run(folder, tmp_path / "weights", "--to", "weights")
    assert result.exit_code == 0 and "weights: weights, " in result.output, result.output
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {"model.safetensors", "config.json", "osdp_checkpoint.json"}
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float64)
    assert all(torch.equal(value, read.state_dict()[name]) for name, value in model.state_dict().items())
    result = run(folder, tmp_path / "weights", "--to", "whole")
    assert result.exit_code == 2 and "exists already; give a folder that does not" in " ".join(result.output.split())
    result = run(tmp_path / "nowhere", tmp_path / "x", "--to", "whole")
    assert result.exit_code == 2 and "There is no checkpoint" in result.output
