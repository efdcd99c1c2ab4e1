"""From any layout to any other, and what `hf-osdp convert` says."""

from __future__ import annotations

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


def assert_equal(model, optimizer, other, its) -> None:
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    pairs = zip(optimizer.state_dict()["state"].values(), its.state_dict()["state"].values(), strict=True)
    assert all(torch.equal(one[key], two[key]) for one, two in pairs for key in one)


def test_round_through_all_layouts_changes_nothing(tmp_path):
    model, optimizer = trained()
    folder = saved(tmp_path / "start", model=model, optimizer=optimizer)
    for number, to in enumerate((Target.WHOLE, Target.SHARDED, Target.WHOLE, Target.SINGLE)):
        source, folder = folder, tmp_path / str(number)
        convert(source, folder, to=to)
        check_checkpoint(folder)
        assert (folder / "random_states_0.pkl").is_file() and (folder / "custom_checkpoint_0.pkl").is_file()
    again, its = trained(seed=9)
    load_model(folder, again)
    load_optimizer(folder, again, its)
    assert_equal(model, optimizer, again, its)


def test_single_layout_is_read_by_torch_and_not_converted_back(tmp_path):
    model, optimizer = trained()
    convert(saved(tmp_path / "start", model=model, optimizer=optimizer), tmp_path / "single", to=Target.SINGLE)
    again, its = trained(seed=9, steps=0)
    missing = again.load_state_dict(load_safetensors(tmp_path / "single" / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight", "transformer.wte.weight"}
    its.load_state_dict(torch.load(tmp_path / "single" / "optimizer.bin", weights_only=True))
    assert_equal(model, optimizer, again, its)
    with pytest.raises(CheckpointError, match="are stored by the parameters' positions"):
        convert(tmp_path / "single", tmp_path / "whole", to=Target.WHOLE)
    assert not (tmp_path / "whole").exists()


def test_command_writes_what_from_pretrained_reads(tmp_path):
    model, optimizer = trained()
    folder = saved(tmp_path / "start", model=model, optimizer=optimizer)
    model.config.save_pretrained(folder)
    (folder / "osdp_checkpoint.json").unlink()  # the configuration was not there when it was summed
    run = lambda *words: CliRunner().invoke(app, ["convert", *map(str, words)])  # noqa: E731
    result = run(folder, tmp_path / "weights", "--to", "weights")
    assert result.exit_code == 0 and "weights: weights, " in result.output, result.output
    written = {path.name for path in (tmp_path / "weights").iterdir()}
    assert written == {"model.safetensors", "config.json", "osdp_checkpoint.json"}
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float64)
    assert all(torch.equal(value, read.state_dict()[name]) for name, value in model.state_dict().items())
    result = run(folder, tmp_path / "weights", "--to", "whole")
    assert result.exit_code == 2 and "already exists; give a folder that does not" in " ".join(result.output.split())
