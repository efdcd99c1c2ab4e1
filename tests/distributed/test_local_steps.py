"""Local steps between two machines of two ranks: the algorithm is DiLoCo's, and machines are equal to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_osdp.distributed.collectives import listening
from hf_osdp.distributed.mesh import apart, sharing_ranks
from hf_osdp.errors import OSDPError, PlanError
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.cost.local_steps import outer_tensors
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.local_steps import LocalSteps
from hf_osdp.planner.wire import WireFormat
from hf_osdp.sharding.apply import apply_plan, verify_applied
from hf_osdp.sharding.gradients import clip_grad_norm_, local
from hf_osdp.sharding.local_steps import OuterOptimizer
from hf_osdp.sharding.state import full_state_dict
from tests.helpers.layouts import plan_of
from tests.helpers.local_steps import (
    LOCAL,
    MACHINES,
    MAX_NORM,
    STEPS,
    WORLD,
    H,
    Optimizer,
    adamw,
    are_equal_between_machines,
    assert_close,
    diloco,
    local_plan,
    sgd,
    tiny_model,
)
from tests.helpers.models import tiny_batch, tiny_loss
from tests.helpers.training import assert_trained_alike, train_sharded, train_whole


def sharded(name: str, layout: str = "mixed", local: LocalSteps = LOCAL) -> nn.Module:
    model = tiny_model(name)
    units = find_units(model)
    plan = local_plan(units, layout, local)
    apply_plan(model, plan, units)
    verify_applied(model, plan, units)
    return model


def train(
    model: nn.Module, *, local: LocalSteps = LOCAL, steps: int = STEPS, make: Optimizer = adamw, max_norm: float | None = None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Whole weights on rank 0, and the norms that were clipped."""
    outer, optimizer, norms, rank = OuterOptimizer(model, local), make(model.parameters()), [], dist.get_rank()
    for step in range(1, steps + 1):
        tiny_loss(model, tiny_batch(step, part=rank, parts=WORLD)).backward()
        if max_norm is not None:
            norms.append(clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        if step % local.steps == 0:
            outer.step()
            assert are_equal_between_machines(model)
    return full_state_dict(model), norms


@pytest.mark.on_ranks(WORLD, nodes=MACHINES)
def test_three_outer_rounds_are_those_of_diloco():
    """Eleven steps: three synchronisations, and two steps apart after them."""
    for name, layout in (("gpt2", "mixed"), ("bert", "mixed"), ("llama", "replicate"), ("llama", "zero3")):
        found, _ = train(sharded(name, layout))
        assert_close(found, diloco(name)[0])


@pytest.mark.on_ranks(WORLD, nodes=MACHINES)
def test_each_machine_clips_by_the_norm_of_its_own_gradients():
    found, norms = train(sharded("gpt2"), max_norm=MAX_NORM)
    expected, of_machines = diloco("gpt2", max_norm=MAX_NORM)
    assert norms == pytest.approx(of_machines[dist.get_rank() // 2], abs=1e-12) and min(norms) > MAX_NORM
    assert of_machines[0] != pytest.approx(of_machines[1], abs=1e-6)
    assert_close(found, expected)


@pytest.mark.on_ranks(WORLD, nodes=MACHINES)
def test_one_local_step_of_plain_sgd_is_data_parallel_training():
    local = LocalSteps(steps=1, machines=MACHINES, outer_learning_rate=1.0, outer_momentum=0.0)
    found, _ = train(sharded("gpt2", local=local), local=local, make=sgd)
    alone = tiny_model("gpt2")
    optimizer = sgd(alone.parameters())
    for step in range(1, STEPS + 1):
        tiny_loss(alone, tiny_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(found, alone.state_dict())


@pytest.mark.on_ranks(WORLD, nodes=MACHINES)
def test_machines_are_equal_to_the_bit_at_each_synchronisation_over_20_steps():
    """`train` compares at each; in float32, where sums round."""
    exact = diloco("gpt2", local=replace(LOCAL, steps=2), steps=20)[0] if dist.get_rank() == 0 else {}
    for wire, most in {None: 0.001, WireFormat.BF16: 0.02, WireFormat.INT8: 0.05, WireFormat.INT4: 0.6}.items():
        local = replace(LOCAL, wire=wire, steps=2)
        model = tiny_model("gpt2", dtype=torch.float32)
        units = find_units(model)
        apply_plan(model, local_plan(units, local=local), units)
        start = full_state_dict(model)
        found, _ = train(model, local=local, steps=20)
        moved = sum((found[name] - start[name]).norm() for name in found)
        error = sum((found[name] - exact[name]).norm() for name in found)
        assert dist.get_rank() or error < most * moved, wire


@pytest.mark.on_ranks(2, nodes=2)
def test_machines_of_one_rank_take_local_steps():
    model = tiny_model("gpt2")
    units = find_units(model)
    plan = replace(plan_of(units, 1, "replicate"), local_steps=LOCAL)
    apply_plan(model, plan, units)
    verify_applied(model, plan, units)
    outer, optimizer = OuterOptimizer(model, LOCAL), adamw(model.parameters())
    for step in range(1, STEPS + 1):
        tiny_loss(model, tiny_batch(step, part=dist.get_rank(), parts=2)).backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if step % H == 0:
            outer.step()
    assert_close(full_state_dict(model), diloco("gpt2", max_norm=MAX_NORM)[0])


@pytest.mark.on_ranks(WORLD, nodes=MACHINES)
def test_outer_state_is_as_estimated_and_each_element_crosses_the_link_once():
    for layout in ("mixed", "replicate", "zero3"):
        model, job = tiny_model("gpt2"), TrainingJob(global_batch_size=WORLD, local_steps=LOCAL)
        units = find_units(model)
        plan = local_plan(units, layout)
        apply_plan(model, plan, units)
        outer, groups, sent = OuterOptimizer(model, LOCAL), apart(), []

        @contextmanager
        def counted(kind, group, nbytes: int, groups=groups, sent=sent) -> Iterator[None]:
            sent.append(nbytes if group is groups.between else 0)
            yield

        with listening(counted):
            outer.step()
        sizes = {unit.fqn: plan.decision(unit.fqn).shard_size for unit in units}
        estimated = sum(sum(outer_tensors(p, sizes[unit.fqn], 2, job)) for unit in units for p in unit.trainable)
        fullest = torch.tensor(sum(message.before.nbytes + message.momentum.nbytes for message in outer._messages))
        dist.all_reduce(fullest, op=dist.ReduceOp.MAX)
        assert 0.97 * estimated <= fullest <= 1.01 * estimated, layout
        crossed, numel = torch.tensor(sum(sent)), sum(unit.numel for unit in units)
        dist.all_reduce(crossed, group=groups.machine)
        assert 8 * numel <= crossed <= 1.01 * 8 * numel, layout


class WithScalar(nn.Module):
    """A model with a parameter without dimensions, which FSDP2 does not take."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (self.linear(rows) * self.scale).square().mean()


@pytest.mark.on_ranks(WORLD, nodes=MACHINES)
def test_parameters_without_dimensions_are_averaged_in_a_machine_and_synchronised():
    def rows(step: int) -> torch.Tensor:
        return torch.randn(WORLD, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))

    model, replicas = WithScalar(), [WithScalar() for _ in range(MACHINES)]
    units = find_units(model, block_classes=("Linear",))
    apply_plan(model, local_plan(units, "zero3"), units)
    outer, optimizer, rank = OuterOptimizer(model, LOCAL), sgd(model.parameters()), dist.get_rank()
    start = replicas[0].scale.detach().clone()
    optimizers = [sgd(one.parameters()) for one in replicas]
    for step in range(H):
        model(rows(step)[rank : rank + 1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        for machine, (one, own) in enumerate(zip(replicas, optimizers, strict=True)):
            one(rows(step)[2 * machine : 2 * machine + 2]).backward()
            own.step()
            own.zero_grad()
    assert model.scale.item() == pytest.approx(replicas[rank // 2].scale.item(), abs=1e-12)
    outer.step()
    difference = start - sum(one.scale.detach() for one in replicas) / MACHINES
    expected = start - LOCAL.outer_learning_rate * (1 + LOCAL.outer_momentum) * difference
    assert model.scale.item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.on_ranks(WORLD, nodes=MACHINES)
def test_a_plan_after_one_of_local_steps_trains_all_ranks_together():
    train(sharded("gpt2"), steps=1)
    assert sharing_ranks() == 2
    model = tiny_model("gpt2")
    units = find_units(model)
    plan = plan_of(units, WORLD, "mixed")
    apply_plan(model, plan, units)
    assert sharing_ranks() == WORLD
    with pytest.raises(OSDPError, match="Local steps need a model"):
        OuterOptimizer(model, LOCAL)
    assert_trained_alike(train_sharded(model, plan), lambda: train_whole(tiny_model("gpt2")))


@pytest.mark.on_ranks(2)
def test_a_plan_of_other_machines_is_refused():
    model = tiny_model("gpt2")
    units = find_units(model)
    with pytest.raises(PlanError, match=r"2 machines of 2 processes that take local steps, but 2 processes are running. Start 4"):
        apply_plan(model, local_plan(units), units)


@pytest.mark.on_ranks(WORLD, nodes=MACHINES)
def test_the_outer_state_goes_on():
    """Momentum and each machine's own states, over a second optimizer."""
    model = sharded("gpt2")
    outer, optimizer, rank = OuterOptimizer(model, LOCAL), adamw(model.parameters()), dist.get_rank()
    for step in range(1, 3 * H + 1):
        if step == H + 1:
            state = {name: [*map(torch.clone, value)] if name == "momentum" else value for name, value in outer.state(optimizer).items()}
            state["states"] = [{name: value.clone() for name, value in one.items()} for one in state["states"]]
            groups = optimizer.state_dict()
            optimizer = adamw(model.parameters())
            optimizer.load_state_dict(groups)
            for one in optimizer.state.values():  # as if they were the first machine's
                local(one["exp_avg"]).fill_(7)
            outer = OuterOptimizer(model, LOCAL)
            outer.load({**state, "optimizer": "Lion"}, optimizer)
            assert all((local(one["exp_avg"]) == 7).all() for one in optimizer.state.values()), "states of another optimizer"
            outer.load(state, optimizer)
        tiny_loss(model, tiny_batch(step, part=rank, parts=WORLD)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % H == 0:
            outer.step()
    assert_close(full_state_dict(model), diloco("gpt2", steps=3 * H)[0])
