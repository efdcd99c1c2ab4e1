"""The optimizer's step within backward: the same training as in one process, gradients gone, and what does not go with it refused."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import product

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from hf_osdp.checkpoint.states import load_loop, save_loop
from hf_osdp.checkpoint.writer import CheckpointWriter
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import OSDPError, PlanError
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.plain_loop import OptimalShardedDataParallel
from hf_osdp.integrations.trainer import Trainer
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.job import OptimizerSpec, Precision
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planning.config import OSDPConfig
from hf_osdp.planning.facts import RunFacts, training_job
from hf_osdp.planning.problem import find_plan
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.gradients import local
from hf_osdp.sharding.optimizer_steps import step_by_device
from hf_osdp.sharding.state import full_state_dict
from hf_osdp.sharding.steps import micro_step
from hf_osdp.sharding.unit_steps import bind_optimizer
from tests.helpers.checkpointed import worst
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss

from .test_integration_trainer import LENGTH, PlannedTrainer, StockTrainer, arguments, assert_close, history, tokens

STEPS = 3
WAYS = ("step_in_backward", "states_on_host")


def gpt2() -> torch.nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=61, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return GPT2LMHeadModel(config).double().train()


def planned(model: torch.nn.Module, layout: str, way: str = "step_in_backward") -> Plan:
    """The layout's plan, in which all but one unit step in backward, or have their states on the host."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    plan = plan_of(find_units(model), world, layout)
    units = tuple(replace(unit, on_host=False, **{way: number != 1}) for number, unit in enumerate(plan.units))
    return replace(plan, units=units, accumulation_steps=1, micro_batch_size=1)


def train(
    layout: str | None, kind: str = "AdamW", way: str = "step_in_backward", frozen: str = "", package: str = "torch.optim"
) -> dict[str, torch.Tensor]:
    """Train with a learning rate that changes, under the layout, or in one process as it comes for None."""
    model = gpt2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name if frozen else True)
    plan, units, rank, parts = None, find_units(model), 0, 1
    if layout is not None:
        plan = planned(model, layout, way)
        apply_plan(model, plan, units, meshes=Meshes("cpu") if dist.is_initialized() else None)
        rank, parts = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [{"params": [p for p in trained if p.dim() > 1]}, {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = getattr(import_module(package), kind)(decayed, lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    if plan is not None:
        step_by_device(optimizer)
        bind_optimizer(model, plan, units, [optimizer])
    for step in range(STEPS):
        with micro_step(model, is_last=True, plan=plan):
            tiny_loss(model, tiny_batch(step, part=rank, parts=parts)).backward()
        if plan is not None:
            waiting = {id(p) for unit in units if not plan.decision(unit.fqn).step_in_backward for p in named(model, unit)}
            assert {id(p) for p in model.parameters() if p.grad is not None} == waiting
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    if way == "states_on_host" and kind == "AdamW" and plan is not None:
        waiting = {id(p) for unit in units if plan.decision(unit.fqn).states_on_host for p in named(model, unit)}
        owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_post_hooks.values())
        owners = (owner for owner in owners if type(owner).__name__ == "_HostStates")
        buffers = {id(value) for owner in owners for value in owner._host.values()}
        held = {id(local(state)): id(p) for p, states in optimizer.state.items() for state in states.values()}
        assert {held[buffer] for buffer in buffers} == waiting, "their states are the buffers that go to the host"
    return full_state_dict(model)


def named(model: torch.nn.Module, unit) -> list[torch.nn.Parameter]:
    parameters = dict(model.named_parameters())
    return [parameters[p.name] for p in unit.trainable]


LAYOUTS, KINDS = ("zero3", "mixed", "replicate"), ("AdamW", "SGD", "NAdam")


def train_each(cases: list[tuple[str, ...]]) -> dict[tuple[str, ...], dict[str, torch.Tensor]]:
    return {case: train(*case) for case in cases}


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_units_that_step_by_themselves_train_as_one_process_does(slow):
    cases = [case for case in product(LAYOUTS, KINDS, WAYS) if (case[0] == "replicate" or case[1] == "NAdam") == slow]
    (found, _) = run_ranks(train_each, 2, cases, timeout_s=300)
    alone = {kind: train(None, kind) for kind in {kind for _, kind, _ in cases}}
    assert not {case: error for case, weights in found.items() if not (error := worst(weights, alone[case[1]])) < 1e-12}


@pytest.mark.parametrize(("kind", "way"), [("AdamW8bit", "step_in_backward"), ("AdEMAMix", "states_on_host")])
def test_those_of_bitsandbytes_do_too(kind, way):
    package = "bitsandbytes.optim"
    pytest.importorskip(package, reason="bitsandbytes is not installed; pip install 'hf_osdp[bnb]'")
    (weights, _) = run_ranks(train, 2, "mixed", kind, way, "", package)
    assert worst(weights, train(None, kind, package=package)) < 1e-9


@pytest.mark.parametrize("way", WAYS)
def test_plain_parameters_and_frozen_ones_of_one_process(way):
    assert worst(train("replicate", way=way), train(None)) < 1e-12
    assert worst(train("replicate", way=way, frozen="mlp"), train(None, frozen="mlp")) < 1e-12


def chain(folder: str, layout: str, way: str, start: int) -> dict[str, torch.Tensor]:
    """Two steps from a checkpoint."""
    model, parts = gpt2(), dist.get_world_size()
    plan, units = planned(model, layout, way), find_units(model)
    apply_plan(model, plan, units, meshes=Meshes("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step_by_device(optimizer)
    bind_optimizer(model, plan, units, [optimizer])
    if start:
        load_loop(f"{folder}/{start}", model, optimizer, others={})
    for step in range(start, start + 2):
        with micro_step(model, is_last=True, plan=plan):
            tiny_loss(model, tiny_batch(step, part=dist.get_rank(), parts=parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    save_loop(CheckpointWriter(), f"{folder}/{start + 2}", model, optimizer, others={}, progress={}, sharded=parts > 1)
    return full_state_dict(model)


def test_checkpoints_go_over_worlds_and_ways(tmp_path):
    run_ranks(chain, 2, str(tmp_path), "mixed", "states_on_host", 0, timeout_s=300)
    run_ranks(chain, 1, str(tmp_path), "replicate", "step_in_backward", 2, timeout_s=300)
    (weights, _) = run_ranks(chain, 2, str(tmp_path), "zero3", "states_on_host", 4, timeout_s=300)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        tiny_loss(model, tiny_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert worst(weights, full_state_dict(model)) < 1e-12


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> dict[str, list[float]]:
    args = arguments(str(tmp_path_factory.mktemp("one")), per_device_train_batch_size=8, max_grad_norm=0.0)
    trainer = StockTrainer(model=gpt2(), args=args, train_dataset=tokens())
    trainer.train()
    return history(trainer)


def trainer_arguments(folder: object, **options: object) -> TrainingArguments:
    return arguments(str(folder), per_device_train_batch_size=4, **({"max_grad_norm": 0.0} | options))


class Reads(TrainerCallback):
    def on_pre_optimizer_step(self, *args: object, **kwargs: object) -> None: ...


@pytest.mark.on_ranks(2, init=False)
def test_trainer_steps_in_backward_where_nothing_reads_gradients_and_equals_the_stock_one(tmp_path, stock):
    config = OSDPConfig(strategy="fsdp", global_batch_size=8, micro_batch_size=4, hardware=preset("cpu", devices_per_node=2))
    asked = replace(config, step_in_backward=True)
    trainer = PlannedTrainer(model=gpt2(), args=trainer_arguments(tmp_path), train_dataset=tokens(), osdp=asked)
    trainer.train()
    assert_close(history(trainer), stock, 1e-9)
    cases = [(Trainer, {}, {}, True), (Trainer, {}, {"max_grad_norm": 1.0}, False), (Trainer, {"callbacks": [Reads()]}, {}, False)]
    for cls, more, options, steps in (*cases, (PlannedTrainer, {}, {}, False)):  # the last has a training_step of its own
        args = trainer_arguments(tmp_path / "other", **options)
        found = cls(model=gpt2(), args=args, train_dataset=tokens(), osdp=config, **more)._run.plan
        assert any(unit.step_in_backward for unit in found.units) is steps


def stepping_accelerator() -> OSDPAccelerator:
    config = {"sequence_length": LENGTH, "global_batch_size": 2, "micro_batch_size": 1, "hardware": preset("cpu", devices_per_node=2)}
    return OSDPAccelerator(cpu=True, osdp=OSDPConfig(step_in_backward=True, strategy="fsdp", **config))


@pytest.mark.on_ranks(2, init=False)
def test_a_new_optimizer_takes_the_steps_of_the_one_before():
    accelerator = stepping_accelerator()
    model = gpt2()
    model, first = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model, second = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    before = {name: local(p).clone() for name, p in model.named_parameters()}
    batch = {"input_ids": torch.ones(1, LENGTH, dtype=torch.long), "labels": torch.ones(1, LENGTH, dtype=torch.long)}
    accelerator.backward(model(**batch).loss)
    assert all(torch.equal(before[name], local(p)) and p.grad is None for name, p in model.named_parameters()), "at a rate of 0"
    second.step()
    assert first.optimizer is not second.optimizer


@pytest.mark.on_ranks(2, init=False)
def test_accelerator_steps_in_backward_where_asked_to_and_refuses_what_needs_gradients():
    accelerator = stepping_accelerator()
    model = gpt2()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    batch = {"input_ids": torch.ones(1, LENGTH, dtype=torch.long), "labels": torch.ones(1, LENGTH, dtype=torch.long)}
    accelerator.backward(model(**batch).loss)
    with pytest.raises(OSDPError, match=r"no gradients are left to clip; set step_in_backward=False, or do not clip"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(OSDPError, match=r"A second backward came before optimizer\.step\(\)"):
        accelerator.backward(model(**batch).loss)


def facts(**more: object) -> RunFacts:
    known = dict(world_size=2, device_type="cpu", precision=Precision())
    return RunFacts(**(known | more), optimizer=OptimizerSpec())


@pytest.mark.parametrize(
    ("asked", "more", "found"),
    [
        (None, {}, False),
        (True, {}, True),
        (None, {"against_backward_step": None}, True),
        (False, {"against_backward_step": None}, False),
        (None, {"against_backward_step": None, "clips_gradients": True}, False),
    ],
)
def test_job_steps_in_backward_where_it_is_asked_for_or_nothing_speaks_against_it(asked, more, found):
    assert training_job(OSDPConfig(global_batch_size=2, step_in_backward=asked), facts(**more)).step_in_backward is found


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"clips_gradients": True}, r"step_in_backward=True, but gradients are clipped .*max_grad_norm=0"),
        ({"precision": Precision.named("fp16")}, r"step_in_backward=True, but fp16 scales the loss"),
    ],
)
def test_asking_for_it_where_gradients_are_needed_is_refused(more, message):
    with pytest.raises(ValueError, match=message):
        training_job(OSDPConfig(global_batch_size=2, step_in_backward=True), facts(**more))


def test_plain_loop_and_accumulation_and_shared_counters_are_refused():
    with pytest.raises(ValueError, match=r"use the Trainer or an OSDPAccelerator"):
        OptimalShardedDataParallel(gpt2(), OSDPConfig(step_in_backward=True, sequence_length=8, global_batch_size=2))
    model = gpt2()
    units = find_units(model)
    plan = planned(model, "replicate")
    with pytest.raises(PlanError, match=r"which 2 accumulation steps do not allow"):
        replace(plan, accumulation_steps=2)
    with pytest.raises(PlanError, match=r"The plan steps in backward, but this loop may read gradients"):
        OptimalShardedDataParallel(model, OSDPConfig(plan=plan))

    class Counts(torch.optim.SGD):
        pass

    with pytest.raises(OSDPError, match=r"Counts may keep state that all its parameters share; set step_in_backward=False"):
        bind_optimizer(model, plan, units, [Counts(model.parameters())])
    with pytest.raises(OSDPError, match=r"there are several optimizers"):
        bind_optimizer(model, plan, units, [torch.optim.SGD([p]) for p in model.parameters()])


def test_a_request_that_accumulation_leaves_without_effect_is_said(caplog):
    sizes = {"sequence_length": 8, "global_batch_size": 2, "micro_batch_size": 1}
    config = OSDPConfig(step_in_backward=True, hardware="cpu", memory_limit="1GiB", **sizes)
    plan = find_plan(gpt2(), config, facts(world_size=1)).plan
    assert plan.accumulation_steps == 2 and not any(unit.step_in_backward for unit in plan.units)
    assert "step_in_backward=True has no effect: the plan accumulates 2 micro-steps; use a smaller global batch" in caplog.text
