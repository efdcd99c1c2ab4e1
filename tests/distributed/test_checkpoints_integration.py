"""Checkpoints of the Trainer and Accelerate under other plans and worlds, and plain Accelerate's; in float64."""

from __future__ import annotations

import os
import signal
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from torch.distributed.fsdp import fully_shard

from hf_osdp.checkpoint.resume import last_checkpoint
from hf_osdp.checkpoint.states import load_model, load_optimizer, save_model, save_optimizer
from hf_osdp.distributed.launcher import launched_rank, launched_world_size
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.distributed.stop import EXIT_CODE
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.plugin import OSDPPlugin
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.presets import preset
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.state import full_optimizer_state_dict, full_state_dict
from tests.distributed import test_integration_accelerator as loop
from tests.distributed import test_integration_trainer as stock
from tests.helpers.checkpointed import groups_of, worst
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import mixed_plan, plan_of
from tests.helpers.models import tiny_batch, tiny_loss
from tests.helpers.models import tiny_model as core_model

SHARDED, WHOLE = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


def trained(
    folder: str, resume: str | None, layout: str, strategy: str | None, *, stop_at: int | None = None, **options
):
    """A Trainer of any world: losses of its steps, and whole weights."""
    world, model = launched_world_size(), stock.tiny_model(seed=launched_rank() + 7 * (resume is not None))
    if strategy is None and world > 1:
        plan = mixed_plan(
            model, world, sequence_length=stock.LENGTH, micro_batch_size=2, accumulation_steps=4 // world, reduce=True
        )
        osdp = OSDPConfig(plan=plan, **options)
    else:
        hardware = preset("cpu", devices_per_node=world)
        osdp = OSDPConfig(hardware=hardware, strategy=strategy or "osdp", compare=False, **options)
    args = stock.arguments(
        folder, per_device_train_batch_size=stock.GLOBAL_BATCH // world, save_strategy="steps", save_steps=1,
        save_total_limit=4,
        fsdp_config={"state_dict_type": layout},
    )  # fmt: skip
    trainer = stock.PlannedTrainer(model=model, args=args, train_dataset=stock.tokens(), osdp=osdp)
    if stop_at is not None:
        trainer.add_callback(_Killed(stop_at))
    try:
        trainer.train(resume_from_checkpoint=resume)
    except SystemExit as ended:
        assert ended.code == EXIT_CODE
    return stock.history(trainer)["loss"], trainer.accelerator.get_state_dict(trainer.model), trainer.state.global_step


class _Killed(stock.transformers.TrainerCallback):
    """SIGTERM on rank 1, in a step."""

    def __init__(self, step: int):
        self._step = step

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self._step and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def in_turn(folder: str, cases: list[tuple]) -> list[tuple]:
    return [
        trained(f"{folder}/{name}", resume, layout, strategy, **options)
        for name, resume, layout, strategy, options in cases
    ]


@pytest.mark.slow
def test_trainer_resumes_under_other_plans_and_numbers_of_ranks(tmp_path):
    want, weights = stock.train_one_process(str(tmp_path / "stock"))
    first = run_ranks(in_turn, 2, str(tmp_path), [("first", None, SHARDED, None, {"async_save": True})], shared=True)[
        0
    ][0]
    assert max(abs(a - b) for a, b in zip(first[0], want["loss"], strict=True)) < 1e-12
    assert sorted(path.name for path in (tmp_path / "first").glob("checkpoint-*")) == [
        f"checkpoint-{step}" for step in (2, 3, 4, 5)
    ]
    alone = trained(str(tmp_path / "alone"), str(tmp_path / "first" / "checkpoint-2"), WHOLE, None)
    cases = [
        ("again", str(tmp_path / "alone" / "checkpoint-3"), WHOLE, "fsdp", {}),
        ("stopped", str(tmp_path / "first" / "checkpoint-2"), SHARDED, None, {"stop_at": 2}),
        ("after", str(tmp_path / "stopped" / "checkpoint-4"), WHOLE, None, {}),
    ]
    again, stopped, after = run_ranks(in_turn, 2, str(tmp_path), cases, shared=True)[0]
    for losses, got, steps in ([alone[0], alone[1], 3], [again[0], again[1], 2], [after[0], after[1], 1]):
        assert max(abs(a - b) for a, b in zip(losses, want["loss"][-steps:], strict=True)) < 1e-12
        assert worst(got, weights) < 1e-12
    assert stopped[2] == 4 and last_checkpoint(tmp_path / "stopped").name == "checkpoint-4"


@pytest.mark.slow
def test_trainer_goes_from_four_ranks_to_two_one_four(tmp_path):
    want, weights = stock.train_one_process(str(tmp_path / "stock"))
    four = run_ranks(in_turn, 4, str(tmp_path), [("four", None, SHARDED, "ddp", {})], init=False)[0][0]
    two = run_ranks(
        in_turn, 2, str(tmp_path), [("two", str(tmp_path / "four" / "checkpoint-2"), SHARDED, "fsdp", {})], init=False
    )[0][0]
    one = trained(str(tmp_path / "one"), str(tmp_path / "two" / "checkpoint-3"), WHOLE, None)
    again = run_ranks(
        in_turn, 4, str(tmp_path), [("again", str(tmp_path / "one" / "checkpoint-4"), WHOLE, None, {})], init=False
    )[0][0]
    for (losses, got, _), steps in ((four, 5), (two, 3), (one, 2), (again, 1)):
        assert losses == pytest.approx(want["loss"][-steps:], abs=1e-12) and worst(got, weights) < 1e-12


def looped(folder: str, legs: list[tuple]) -> list[list[float]]:
    """Legs one after the other: what is loaded, what is saved, in which layout, and how many steps before."""
    return [_looped(folder, *leg) for leg in legs]


def _looped(folder: str, load: str | None, save: str, layout: str, start: int, steps: int, make=None) -> list[float]:
    world = launched_world_size()
    micro = min(4, loop.GLOBAL_BATCH // world)
    accumulation = loop.GLOBAL_BATCH // micro // world
    model = loop.tiny_model(seed=3 if load else 0)
    if make is None:
        plan = mixed_plan(
            model,
            world,
            sequence_length=loop.LENGTH,
            micro_batch_size=micro,
            accumulation_steps=accumulation,
            reduce=True,
        )
        plugin = OSDPPlugin(osdp=OSDPConfig(plan=plan), state_dict_type=layout)
        accelerator = OSDPAccelerator(fsdp_plugin=plugin, gradient_accumulation_steps=accumulation)
    else:
        accelerator = make(gradient_accumulation_steps=accumulation, cpu=True)
    optimizer = loop.new_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    if make is None:
        accelerator.plan(model, sequence_length=loop.LENGTH, global_batch_size=loop.GLOBAL_BATCH)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(scheduler)
    if load is not None:
        accelerator.load_state(f"{folder}/{load}")
    losses = []
    for batch in islice(loop.tokens().split(loop.GLOBAL_BATCH), start, start + steps):
        losses += loop.train_loop(accelerator, model, optimizer, batch.split(micro)[launched_rank() :: world])[0]
        scheduler.step()
    accelerator.save_state(f"{folder}/{save}")
    return losses


@pytest.mark.slow
def test_accelerate_loop_resumes_on_other_ranks_and_from_plain_accelerate(tmp_path):
    folder = str(tmp_path)
    (want,) = looped(folder, [(None, "plain", WHOLE, 0, 5, Accelerator)])
    first = run_ranks(looped, 2, folder, [(None, "a", SHARDED, 0, 2)], shared=True)[0][0]
    alone = looped(folder, [("a", "b", WHOLE, 2, 1), (None, "c", WHOLE, 0, 3, Accelerator)])
    again = run_ranks(looped, 2, folder, [("b", "d", WHOLE, 3, 2), ("c", "e", WHOLE, 3, 2)], shared=True)[0]
    assert first + alone[0] + again[0] == pytest.approx(want, abs=1e-12)
    assert again[1] == pytest.approx(want[3:], abs=1e-12)
    first = run_ranks(looped, 4, folder, [(None, "g", WHOLE, 0, 1)], shared=True)[0]
    two = run_ranks(looped, 2, folder, [("g", "h", SHARDED, 1, 1)], shared=True)[0]
    alone = looped(folder, [("h", "i", WHOLE, 2, 1)])
    four = run_ranks(looped, 4, folder, [("i", "j", SHARDED, 3, 2)], shared=True)[0]
    assert first[0] + two[0] + alone[0] + four[0] == pytest.approx(want, abs=1e-12)
    (tmp_path / "d" / "custom_checkpoint_0.pkl").unlink()
    with pytest.raises(Exception, match=r"d is damaged: custom_checkpoint_0.pkl is missing"):
        looped(folder, [("d", "f", WHOLE, 4, 1)])


def exchanged(folder: str) -> dict[str, float]:
    """The worst differences where Accelerate's functions for FSDP2 read our checkpoints, and ours theirs."""
    errors, rank = {}, dist.get_rank()
    PartialState(cpu=True)  # Accelerate's logger asks for it
    for layout in (SHARDED, WHOLE):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=layout)
        accelerator = SimpleNamespace(
            process_index=rank, num_processes=2, is_fsdp2=True, is_main_process=rank == 0,
            wait_for_everyone=dist.barrier
        )  # fmt: skip
        ours, theirs = Path(folder) / f"ours-{layout}", Path(folder) / f"theirs-{layout}"
        if rank == 0:
            ours.mkdir(), theirs.mkdir()
        dist.barrier()
        model, optimizer = by_plan(0)
        save_model(ours, model, sharded=layout == SHARDED)
        save_optimizer(ours, model, optimizer, sharded=layout == SHARDED)
        other, its = by_stock(1)
        load_fsdp_model(plugin, accelerator, other, str(ours))
        load_fsdp_optimizer(plugin, accelerator, its, other, str(ours))
        errors[f"{layout} to Accelerate"] = difference(model, optimizer, other, its)
        other, its = by_stock(2)
        save_fsdp_model(plugin, accelerator, other, str(theirs))
        save_fsdp_optimizer(plugin, accelerator, its, other, str(theirs))
        model, optimizer = by_plan(3)
        load_model(theirs, model)
        load_optimizer(theirs, model, optimizer)
        errors[f"{layout} from Accelerate"] = difference(model, optimizer, other, its)
    return errors


def by_plan(seed: int):
    model = core_model("gpt2", seed=seed, layers=2)
    units = find_units(model)
    apply_plan(model, plan_of(units, 2, "mixed"), units, meshes=Meshes("cpu"))
    return model, stepped(model)


def by_stock(seed: int):
    model = core_model("gpt2", seed=seed, layers=2)
    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model), stepped(model)


def stepped(model) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    tiny_loss(model, tiny_batch(0, part=dist.get_rank(), parts=2)).backward()
    optimizer.step()
    return optimizer


def difference(model, optimizer, other, its) -> float:
    """Of weights, and of the optimizers' states."""
    weights, others = full_state_dict(model), full_state_dict(other)
    state, states = full_optimizer_state_dict(model, optimizer), full_optimizer_state_dict(other, its)
    if dist.get_rank():
        return 0.0
    assert [group["params"] for group in state["param_groups"]] == [
        group["params"] for group in states["param_groups"]
    ]
    flat = [{f"{n}.{k}": v for n, own in each["state"].items() for k, v in own.items()} for each in (state, states)]
    return max(worst(weights, others), worst(*flat))


def test_states_go_from_and_to_plain_accelerate(tmp_path):
    errors = run_ranks(exchanged, 2, str(tmp_path), shared=True)[0]
    assert len(errors) == 4 and set(errors.values()) == {0.0}, errors
