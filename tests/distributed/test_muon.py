"""torch's Muon on shards: training, checkpoints, what a step holds and sends, and plans that shard for it."""

from __future__ import annotations

import copy
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import GPT2Config

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import InfeasibleError, OSDPError, PlanError
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.cost.collectives import collective_seconds, shard_ring
from hf_osdp.planner.cost.evaluate import PlanEstimate
from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.cost.timing import estimate_time
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.description import DType, ParameterSpec
from hf_osdp.planner.hardware import Collective
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import search
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep, TrainingJob
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.plan_run import check_whole
from hf_osdp.quantities import format_seconds
from hf_osdp.report.tables import plan_caption
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.gradients import local
from hf_osdp.sharding.optimizer import spec_of_optimizer, spec_of_optimizers
from hf_osdp.sharding.optimizer_steps import bind_optimizer, step_by_device, step_on_shards
from hf_osdp.sharding.optimizers.trial import after_step
from hf_osdp.sharding.state import full_state_dict
from hf_osdp.tracing.describe import describe
from hf_osdp.tracing.memory_tracker import MemoryTracker
from tests.helpers.checkpointed import trained_by_plan, worst
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.problems import problem, run_job
from tests.helpers.training import trained

from .test_whole_parameters import small_devices

MATRICES = ("mlp", "attn", "wpe")
"""Of the embeddings the one of positions, whose rows are fewer than ranks in some cases."""


def model_of(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Matrices alone are trained, as one optimizer has them all."""
    model = tiny_model("gpt2", seed=seed, dtype=dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.dim() == 2 and any(part in name for part in MATRICES))
    return model


in_float64 = patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor.to(torch.float64, copy=True))
"""Decorator: Muon's products, which are in bf16."""


def muon_of(model: nn.Module, **options) -> torch.optim.Muon:
    return torch.optim.Muon([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


def planned(model: nn.Module, layout: str, way: str) -> Plan:
    """Every second trained unit as the way says."""
    units = find_units(model)
    plan, turned = plan_of(units, dist.get_world_size(), layout), {unit.fqn for unit in units if unit.trainable_numel}
    decisions = [replace(d, **{way: bool(i % 2) and d.fqn in turned}) if way else d for i, d in enumerate(plan.units)]
    return replace(plan, units=tuple(decisions))


@in_float64
def on_shards(
    layout: str, way: str = "", folder: str = "", start: int = 0, steps: int = 2, **options
) -> dict[str, torch.Tensor]:
    model = model_of(seed=start)
    plan = planned(model, layout, way)
    optimizer = trained_by_plan(model, plan, lambda: muon_of(model, **options), range(start, start + steps), folder)
    assert not any(isinstance(value, DTensor) for states in optimizer.state.values() for value in states.values())
    return full_state_dict(model)


@in_float64
def alone(steps: int, **options) -> dict[str, torch.Tensor]:
    model = model_of()
    trained(model, muon_of(model, **options), None, range(steps))
    return full_state_dict(model)


CASES = [
    ("zero3", "", {}), ("zero2", "", {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
    ("mixed", "", {"ns_steps": 3}),
    ("zero3", "states_on_host", {}),
]  # fmt: skip


def check(cases: list[tuple[str, str, dict]]) -> None:
    """Compare on rank 0, which has whole weights."""
    for layout, way, options in cases:
        weights = on_shards(layout, way, **options)
        if dist.get_rank() == 0:
            assert worst(weights, alone(2, **options)) < 1e-12, (layout, way)


@pytest.mark.on_ranks(2, shared=True)
def test_training_on_shards_equals_one_process():
    check(CASES)


@pytest.mark.slow
@pytest.mark.on_ranks(4)
def test_training_in_groups_and_two_stages_equals_one_process():
    check([("hsdp", "", {}), ("two_stage", "", {}), ("mixed", "states_on_host", {})])


@in_float64
def stepped(layout: str | None, *, closure: bool = False) -> dict[str, torch.Tensor]:
    """Two steps, before which a hook that came after the plan replaces the gradients."""
    model = model_of()
    optimizer = muon_of(model)
    if layout:
        units, plan = find_units(model), planned(model, layout, "")
        apply_plan(model, plan, units, meshes=Meshes("cpu"))
        optimizer = muon_of(model)
        step_on_shards(optimizer, model)
        bind_optimizer(model, plan, units, [optimizer])

    def replace_gradients(*_):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = parameter.grad.sign()

    for step in range(2):
        optimizer.zero_grad()
        tiny_loss(model, tiny_batch(step)).backward()
        hook = None if closure else optimizer.register_step_pre_hook(replace_gradients)
        optimizer.step(*[lambda: 0.0] * closure)
        if hook:
            hook.remove()
    return full_state_dict(model)


@pytest.mark.on_ranks(2, shared=True)
def test_later_hooks_hold_for_shards_and_closures_are_refused():
    for layout in ("zero3", "replicate", "mixed"):
        weights = stepped(layout)
        assert dist.get_rank() or worst(weights, stepped(None)) < 1e-12, layout
    for layout in ("zero3", "replicate"):
        with pytest.raises(OSDPError, match=r"^Muon\.step\(closure\) would step shards by gradients"):
            stepped(layout, closure=True)


def test_checkpoints_go_on_in_one_process_and_in_another_plan(tmp_path):
    run_ranks(on_shards, 2, "zero3", "", str(tmp_path), 0, shared=True)
    run_ranks(on_shards, 1, "replicate", "", str(tmp_path), 2, shared=True)
    (weights, *_) = run_ranks(on_shards, 2, "mixed", "", str(tmp_path), 4, shared=True)
    assert worst(weights, run_ranks(alone, 1, 6, shared=True)[0]) < 1e-12


@pytest.mark.on_ranks(2, shared=True)
@in_float64
def test_uneven_and_missing_rows_are_stepped_by_one_gather():
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(5, 7, bias=False), nn.Linear(7, 1, bias=False), nn.Linear(1, 6, bias=False)
    ).double()
    model = copy.deepcopy(plain)
    fully_shard(model, mesh=Meshes("cpu").mesh(2))
    optimizers = [muon_of(each, weight_decay=0.5) for each in (model, plain)]
    step_by_device(optimizers[0])
    for _ in range(3):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each(torch.ones(2, 5, dtype=torch.float64)).square().sum().backward()
            with CommDebugMode() as sent:
                optimizer.step()
            assert sent.get_total_counts() == (3 if each is model else 0)
            optimizer.zero_grad()
    gathered = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    assert worst(gathered, dict(plain.named_parameters())) < 1e-12


def beside_adamw(model: nn.Module) -> tuple[torch.optim.Muon, torch.optim.AdamW]:
    """Matrices of blocks by Muon, all else by AdamW."""
    given = [
        [p for name, p in model.named_parameters() if (".h." in name and p.dim() == 2) is by_muon]
        for by_muon in (True, False)
    ]
    return torch.optim.Muon(given[0], lr=1e-2), torch.optim.AdamW(given[1], lr=1e-2)


@pytest.mark.on_ranks(2, shared=True)
@in_float64
def test_accelerate_shards_muon_beside_adamw_and_equals_one_process():
    accelerator = OSDPAccelerator(cpu=True, osdp=small_devices(global_batch_size=8, strategy="fsdp"))
    model = tiny_model("gpt2")
    model, *optimizers = accelerator.prepare(model, *beside_adamw(model))
    plan = accelerator.planned_run.plan
    assert {unit.shard_size for unit in plan.units} == {2}
    plain = tiny_model("gpt2")
    for each, by, steps in ((model, optimizers, plan), (plain, beside_adamw(plain), None)):
        for step in range(2):
            part = dict(part=dist.get_rank(), parts=2) if steps else {}
            tiny_loss(each, tiny_batch(step, **part)).backward()
            for optimizer in by:
                optimizer.step()
                optimizer.zero_grad()
    weights = full_state_dict(model)
    assert dist.get_rank() or worst(weights, full_state_dict(plain)) < 1e-12


@pytest.mark.on_ranks(2, shared=True)
@pytest.mark.parametrize(
    "sizes", [pytest.param((2,), marks=pytest.mark.slow), pytest.param((1,), marks=pytest.mark.slow), (2, 1)]
)
def test_step_holds_what_is_estimated(sizes):
    """Beside the module's buffers and the batch, which the step does not bear on."""
    model, batch = model_of(dtype=torch.float32), Batch(micro_batch_size=1, accumulation_steps=1)
    description = describe(model, sequence_length=8, recomputation=False)
    layouts = [
        UnitLayout(shard_size=sizes[i % len(sizes)], reshard_after_forward=False)
        for i in range(len(description.units))
    ]
    plan = Plan.of(description, layouts, batch, world_size=2)
    apply_plan(model, plan, description.units, meshes=Meshes("cpu"))
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    job = TrainingJob(global_batch_size=2, optimizer=spec_of_optimizer(optimizer, device_type="cpu"))
    step_on_shards(optimizer, model)
    trained(model, optimizer, plan, range(1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    with MemoryTracker(block_bytes=1) as memory:
        optimizer.step()
    states = [value for own in optimizer.state.values() for value in own.values()]
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    held = sum(local(tensor).nbytes for tensor in (*model.parameters(), *states, *gradients))
    last = estimate_memory(description, layouts, 2, job, batch).moments[-1]
    assert last.phase == "optimizer step"
    assert held + memory.peak_bytes == pytest.approx(last.total_bytes - last.breakdown.model_buffers, rel=0.01)


@pytest.mark.parametrize("shape", [(96, 64), (32, 128)])
def test_temporaries_of_a_replica_are_those_of_torch(shape):
    optimizer = torch.optim.Muon([nn.Parameter(torch.ones(shape))])
    parameter = ParameterSpec(name="weight", shape=shape, dtype=DType.FLOAT32)
    counted = spec_of_optimizer(optimizer, device_type="cpu").matrix_scratch(parameter, 1)
    assert after_step(optimizer, *shape)[1] * 4 * parameter.numel == pytest.approx(counted, rel=0.01)


def test_optimizers_beside_muon_are_counted_and_matrices_by_shape():
    muon = torch.optim.Muon(
        [nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(4, 8))]
    )
    beside = torch.optim.AdamW([nn.Parameter(torch.ones(8, 8))], foreach=True)
    both = spec_of_optimizers([muon, beside], device_type="cpu")
    assert (both.states, both.step, both.matrices) == (
        2,
        OptimizerStep.FOREACH,
        ((4, 8), (8, 4)),
    )
    assert not both.needs_whole
    wide, other = (ParameterSpec(name="weight", shape=shape, dtype=DType.FLOAT32) for shape in ((4, 8), (8, 8)))
    assert both.gathered_bytes(wide, 3) == 2 * 6 * 8
    assert both.gathered_bytes(wide, 1) == both.gathered_bytes(other, 2) == 0
    whole = spec_of_optimizers([muon, torch.optim.Adafactor([nn.Parameter(torch.ones(8, 8))])], device_type="cpu")
    assert whole.needs_whole and whole.matrices == both.matrices
    sgd = spec_of_optimizers([muon, torch.optim.SGD([nn.Parameter(torch.ones(8))], lr=0.1)], device_type="cpu")
    assert (sgd.states, sgd.loop_scratch) == (1, 2.0)


def problem_of(limit: int | str, **options) -> PlanningProblem:
    """GPT-2's shape on two devices, with all matrices of blocks trained by Muon."""
    config = GPT2Config(n_layer=4, n_embd=256, n_head=4, n_positions=64, vocab_size=500)
    description = describe(config, sequence_length=16, recomputation=False)
    shapes = tuple(
        sorted(
            {p.shape for unit in description.units for p in unit.trainable if len(p.shape) == 2 and ".h." in p.name}
        )
    )
    optimizer = OptimizerSpec(name="muon", states=1, step=OptimizerStep.FOR_LOOP, loop_scratch=0.0, matrices=shapes)
    job = TrainingJob(global_batch_size=2, optimizer=replace(optimizer, **options))
    return problem(description, preset("titan-rtx", devices_per_node=2), job, limit)


def test_planner_shards_for_muon_where_replicas_do_not_fit():
    replicas = problem_of(2**34, matrices=(), needs_whole=True)
    with pytest.raises(InfeasibleError) as caught:
        search(replace(replicas, memory_limit_bytes=2**20))
    limit = caught.value.least_peak_bytes - 2**20
    with pytest.raises(InfeasibleError):
        search(replace(replicas, memory_limit_bytes=limit))
    found = search(problem_of(limit))
    assert any(unit.shard_size == 2 for unit in found.plan.units)
    search(replace(problem_of(2**34), strategy="fsdp"))


def test_gathers_of_the_step_are_in_its_seconds():
    exact = problem_of(2**34)
    layouts = [UnitLayout(shard_size=2, reshard_after_forward=False)] * len(exact.description.units)
    batch = Batch(micro_batch_size=1, accumulation_steps=1)
    plain = replace(exact.job, optimizer=replace(exact.job.optimizer, matrices=()))
    seconds = [
        estimate_time(exact.description, layouts, exact.hardware, job, batch).total("optimizer_s")
        for job in (exact.job, plain)
    ]
    sizes = [
        2 * p.numel
        for unit in exact.description.units
        for p in unit.trainable
        if p.shape in exact.job.optimizer.matrices
    ]
    sent = sum(
        collective_seconds(exact.hardware, Collective.ALL_GATHER, shard_ring(exact.hardware, 2), nbytes)
        for nbytes in sizes
    )
    assert len(sizes) == 16 and seconds[0] - seconds[1] == pytest.approx(sent)
    found = search(replace(exact, strategy="fsdp"))
    line = f"The optimizer gathers whole updates of sharded matrices, which takes {format_seconds(sent)} of its time."
    assert line in plan_caption(found.plan, PlanEstimate(memory=found.memory, time=found.time), exact.hardware)


def test_what_muon_cannot_have_is_refused_in_one_line():
    exact = problem_of(2**34)
    units, optimizer = exact.description.units, exact.job.optimizer
    layouts = [UnitLayout(shard_size=2, reshard_after_forward=False) for _ in units]
    plan = Plan.of(exact.description, layouts, Batch(micro_batch_size=1, accumulation_steps=1), world_size=2)
    check_whole(plan, exact.description, optimizer)
    on_host = replace(plan, units=tuple(replace(unit, on_host=True) for unit in plan.units))
    with pytest.raises(PlanError, match=r"^muon needs whole parameters, and the plan has"):
        check_whole(on_host, exact.description, optimizer)
    job = run_job(OSDPConfig(global_batch_size=2), world_size=2, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"^muon needs whole parameters at once, which host and device do not have"):
        job.asking(host_offload=True).training()
    assert job.training().host_offload is False and not optimizer.steps_parts


@pytest.mark.parametrize(
    ("dtype", "nesterov", "whole"), [("bfloat16", False, True), ("bfloat16", True, False), ("float32", False, False)]
)
def test_muon_that_overwrites_its_momentum_is_kept_whole(dtype, nesterov, whole):
    optimizer = torch.optim.Muon(
        [torch.nn.Parameter(torch.ones(24, 8, dtype=getattr(torch, dtype)))], nesterov=nesterov
    )
    spec = spec_of_optimizer(optimizer, device_type="cpu")
    assert (spec.needs_whole, bool(spec.matrices)) == (whole, not whole)
