"""Local steps in loops, under Accelerate and plain: DiLoCo with the synchronisations that evaluations and saves add, and exact resumes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import nn

from hf_osdp import OptimalShardedDataParallel, OSDPAccelerator
from hf_osdp.distributed.launcher import launched_rank
from hf_osdp.errors import OSDPError
from hf_osdp.integrations.local_steps import Synchroniser
from hf_osdp.integrations.plugin import OSDPPlugin
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.presets import preset
from hf_osdp.planning.config import OSDPConfig
from hf_osdp.sharding.optimizer_steps import step_by_device
from hf_osdp.sharding.state import full_state_dict
from tests.helpers.local_steps import (
    LOCAL,
    MACHINES,
    MAX_NORM,
    WORLD,
    H,
    Recorded,
    adamw,
    are_equal_between_machines,
    assert_close,
    diloco,
    local_plan,
    sgd,
    tiny_model,
)
from tests.helpers.models import tiny_batch, tiny_loss

from . import test_integration_trainer as trainers

IN_A_LOOP, SAVED = (3, 4, 5, 8, 11, 12), 5
"""When the loops below synchronise: three steps after they last did, before an evaluation, a save, and at the end."""
SAID = ["An evaluation after 1", "A save after 1", "A save after 1"]


@contextmanager
def recorded() -> Iterator[Callable[[], list[str]]]:
    """What is said of synchronisations, and of states that do not go on."""
    log = Recorded()
    logging.getLogger("hf_osdp").addHandler(log)
    yield lambda: [line for line in log.lines if "synchronise first" in line or "first machine" in line]
    logging.getLogger("hf_osdp").removeHandler(log)


def evaluate(model: nn.Module, rank: int) -> None:
    model.eval()
    with torch.inference_mode():
        tiny_loss(model, tiny_batch(0, part=rank, parts=dist.get_world_size()))
    model.train()


def accelerated(folder: Path, steps: range, *, load: bool = False) -> dict[str, torch.Tensor]:
    """An Accelerate loop, saved after step `SAVED` or gone on with from there; whole weights on rank 0."""
    model = tiny_model("gpt2", seed=launched_rank())
    plan = replace(local_plan(find_units(model)), sequence_length=8)
    osdp = OSDPConfig(plan=plan, local_steps=H, sequence_length=8, global_batch_size=WORLD)
    accelerator = OSDPAccelerator(osdp=osdp, cpu=True)
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    if load:
        accelerator.load_state(str(folder))
        accelerator.save_state(str(folder.with_name("again")))  # before a step: what was loaded goes on
        accelerator.load_state(str(folder.with_name("again")))
    for step in steps:
        with accelerator.accumulate(model):
            accelerator.backward(tiny_loss(model, tiny_batch(step, part=launched_rank(), parts=WORLD)))
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        if step == 4:
            evaluate(model, launched_rank())
        if step == SAVED:
            accelerator.save_state(str(folder))
        assert are_equal_between_machines(model) == (step in IN_A_LOOP[:-1])
    if not load:
        return accelerator.get_state_dict(model)
    weights: dict[str, torch.Tensor] = {}
    accelerator.trackers = [SimpleNamespace(finish=lambda: weights.update(full_state_dict(model)))]  # then the process group is gone
    accelerator.end_training()
    return weights


@pytest.mark.on_ranks(WORLD, init=False, nodes=MACHINES)
def test_an_accelerate_loop_takes_local_steps_and_resumes_exactly(tmp_path):
    with recorded() as said:
        found = accelerated(tmp_path / "saved", range(1, 13))
        assert said() == ([] if dist.get_rank() else [f"{what} of 3 local steps: the machines synchronise first." for what in SAID])
        assert_close(found, diloco("gpt2", steps=12, max_norm=MAX_NORM, synchronised=IN_A_LOOP)[0])
        again = accelerated(tmp_path / "saved", range(SAVED + 1, 13), load=True)
        assert [line.partition(" after")[0] for line in said()[len(SAID) :]] == ([] if launched_rank() else ["The end of training"])
    assert launched_rank() or all(torch.equal(again[name], found[name]) for name in found)


def plain(folder: Path, steps: range, *, load: bool = False) -> dict[str, torch.Tensor]:
    """A plain loop on machines of one rank, planned."""
    hardware = preset("cpu", nodes=MACHINES, devices_per_node=1)
    config = OSDPConfig(hardware=hardware, local_steps=H, sequence_length=8, global_batch_size=4)
    model = OptimalShardedDataParallel(tiny_model("gpt2", seed=launched_rank()), config)
    optimizer, rank = adamw(model.parameters()), dist.get_rank()
    if load:
        assert model.load_checkpoint(folder, optimizer) == {"step": SAVED}
        model.save_checkpoint(folder.with_name("again"), optimizer, sharded=False)
        model.load_checkpoint(folder.with_name("again"), optimizer)
    for step in steps:
        model.backward(tiny_loss(model, tiny_batch(step, part=rank, parts=MACHINES)))
        model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if step == 4:
            block = model.eval().module.transformer.h[0]
            with torch.no_grad():
                block(torch.zeros(1, 8, model.config.n_embd, dtype=torch.float64))  # a part that is called alone
            model.train()
        if step == SAVED:
            with pytest.raises(ValueError, match="local_steps=3: sharded=True would mix the machines' optimizer states"):
                model.save_checkpoint(folder, optimizer)
            model.save_checkpoint(folder, optimizer, progress={"step": step}, sharded=False)
        assert are_equal_between_machines(model) == (step in IN_A_LOOP[:-1])
    with pytest.raises(OSDPError, match="count the steps of one optimizer"):
        sgd(model.parameters()).step()
    return model.full_state_dict()


@pytest.mark.on_ranks(MACHINES, init=False, nodes=MACHINES)
def test_a_plain_loop_takes_local_steps_and_resumes_exactly(tmp_path):
    with recorded() as said:
        found = plain(tmp_path / "saved", range(1, 13))
        assert len(said()) == (0 if dist.get_rank() else len(SAID))
        again = plain(tmp_path / "saved", range(SAVED + 1, 13), load=True)
    assert_close(found, diloco("gpt2", steps=12, max_norm=MAX_NORM, synchronised=IN_A_LOOP)[0])
    assert dist.get_rank() or all(torch.equal(again[name], found[name]) for name in found)


@pytest.mark.on_ranks(MACHINES, init=False, nodes=MACHINES)
def test_loaded_weights_begin_anew_frozen_ones_are_refused_and_a_save_of_no_states_is_no_step(tmp_path):
    hardware = preset("cpu", nodes=MACHINES, devices_per_node=1)
    config = OSDPConfig(hardware=hardware, local_steps=1, sequence_length=8, global_batch_size=4)
    model = OptimalShardedDataParallel(tiny_model("gpt2", seed=5), config)
    optimizer = sgd(model.parameters())
    for load in (None, tiny_model("gpt2").state_dict()):
        model.save_checkpoint(tmp_path / str(load is None), optimizer, sharded=False)
        if load is not None:
            model.load_state_dict(load)
        model.backward(tiny_loss(model, tiny_batch(1, part=dist.get_rank(), parts=MACHINES)))
        optimizer.step()
        optimizer.zero_grad()
    model.save_checkpoint(tmp_path / "last", optimizer, sharded=False)  # SGD has no states, and torch steps to make them
    assert_close(model.full_state_dict(), diloco("gpt2", local=replace(LOCAL, steps=1), steps=1, make=sgd)[0])
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(OSDPError, match="frozen or unfrozen after local steps began"):
        optimizer.step()


@pytest.mark.on_ranks(2, init=False, nodes=2)
def test_loops_refuse_what_local_steps_cannot_run_beside():
    osdp = OSDPConfig(hardware=preset("cpu", nodes=2, devices_per_node=1), local_steps=5, sequence_length=12, global_batch_size=4)
    with pytest.raises(ValueError, match="local_steps=5: with mixed_precision='fp16' a loss scaler may skip a step"):
        OptimalShardedDataParallel(trainers.tiny_model(), osdp, mixed_precision="fp16")
    with pytest.raises(ValueError, match="local_steps=5 cannot run with step_in_backward=True"):
        replace(osdp, step_in_backward=True)
    plugin = OSDPPlugin(osdp=osdp, state_dict_type="SHARDED_STATE_DICT")
    with pytest.raises(ValueError, match="local_steps=5: state_dict_type='SHARDED_STATE_DICT' would mix"):
        OSDPAccelerator(osdp_plugin=plugin, cpu=True).plan(trainers.tiny_model())
    AcceleratorState._reset_state(True)
    accelerator, model = OSDPAccelerator(osdp=osdp, cpu=True), trainers.tiny_model()
    half = len(parameters := list(model.parameters())) // 2
    with pytest.raises(OSDPError, match="count the steps of one optimizer, but a second one was made"):
        accelerator.prepare(model, sgd(parameters[:half]), sgd(parameters[half:]))


def test_the_outer_state_is_taken_before_an_optimizer_splits_its_groups(monkeypatch):
    model, groups = tiny_model("gpt2"), []
    optimizer = adamw(model.parameters())
    step_by_device(optimizer, host=list(model.parameters())[1:2])
    monkeypatch.setattr(Synchroniser, "begin", lambda self, model, optimizer: groups.append(len(optimizer.param_groups)))
    Synchroniser(local_plan(find_units(model))).bind(model, optimizer)
    tiny_loss(model, tiny_batch(1)).backward()
    optimizer.step()
    assert groups == [1]
