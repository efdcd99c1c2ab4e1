"""Units on the host of a real GPU, or their optimizer states alone, in one process: equality with plain torch or with
states on the device, memory against the estimate.
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_osdp.measurement.rates import measure_host
from hf_osdp.modeling.batch import training_batch
from hf_osdp.modeling.build import build_on_meta
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.training_job import OptimizerSpec, Precision, TrainingJob
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.environment import form_process_group, move_to_device, mp_policy
from hf_osdp.sharding.gradients import clip_grad_norm_, local
from hf_osdp.sharding.host import host_parameters
from hf_osdp.sharding.optimizer_steps import bind_optimizer, step_by_device
from hf_osdp.sharding.state import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from hf_osdp.tracing.describe import describe
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.read_back import verify_applied
from tests.helpers.steps import batch_on, make_optimizer, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS, MAX_NORM = 3, 0.5
CUDA = torch.device("cuda", 0)
PICKS = {"all": 1, "some": 2}
"""Each so many-th unit is on the host."""


def apart(fn: Callable[..., Any], *args: Any) -> Any:
    """The function's result from a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(fn, *args).result()


def offloaded(every: int, *, seed: int = 0) -> torch.nn.Module:
    model = tiny_model("gpt2", seed=seed)
    units = find_units(model)
    plan = plan_of(units, 1, "zero3")
    plan = replace(plan, units=tuple(replace(unit, on_host=i % every == 0) for i, unit in enumerate(plan.units)))
    apply_plan(model, plan, units)
    verify_applied(model, plan, units)
    return move_to_device(model, CUDA)


def stepped(model, optimizer, step, clip) -> float:
    tiny_loss(model, {name: value.to(CUDA) for name, value in tiny_batch(step).items()}).backward()
    norm = clip(model.parameters(), MAX_NORM).item()
    optimizer.step()
    optimizer.zero_grad()
    return norm


def worst_difference(every: int, options: dict[str, Any]) -> tuple[float, float, bool]:
    """Of norms and of weights, and whether states are on the host where they should be."""
    plain, model = tiny_model("gpt2").to(CUDA), offloaded(every)
    one, two = (torch.optim.AdamW(m.parameters(), lr=1e-3, **o) for m, o in ((plain, {}), (model, options)))
    step_by_device(two, host_parameters(model))
    stock = torch.nn.utils.clip_grad_norm_
    pairs = [(stepped(plain, one, i, stock), stepped(model, two, i, clip_grad_norm_)) for i in range(STEPS)]
    norms = [abs(theirs - ours) for theirs, ours in pairs]
    state, wanted = full_state_dict(model), plain.state_dict()
    states = [two.state[p][key] for p in host_parameters(model) for key in ("exp_avg", "exp_avg_sq")]
    there = all(value.device.type == "cpu" for value in states)
    return max(norms), max((state[name] - wanted[name].cpu()).abs().max().item() for name in wanted), there


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("every", PICKS.values(), ids=PICKS)
def test_trains_as_plain_torch(every, options):
    norms, weights, there = apart(worst_difference, every, options)
    assert norms < 1e-12 and weights < 1e-11 and there


def resumed() -> float:
    """Whole states of some units on the host, loaded where all are."""
    first, second = offloaded(2), offloaded(1, seed=1)
    one, two = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (first, second))
    for model, optimizer in ((first, one), (second, two)):
        step_by_device(optimizer, host_parameters(model))
    stepped(first, one, 0, clip_grad_norm_)
    load_full_state_dict(second, full_state_dict(first))
    load_full_optimizer_state_dict(second, two, full_optimizer_state_dict(first, one))
    for model, optimizer in ((first, one), (second, two)):
        stepped(model, optimizer, 1, clip_grad_norm_)
    ours, theirs = full_state_dict(first), full_state_dict(second)
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def test_whole_states_go_over_to_another_plan():
    assert apart(resumed) < 1e-12


def estimated_and_measured(every: int, precision: str, way: str) -> tuple[int, int]:
    """Peaks of a step in bytes; `way` is what is decided for each so many-th unit."""
    from transformers import GPT2Config

    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_layer=6, n_embd=768, n_head=12, n_positions=256, **no_dropout)
    job = TrainingJob(global_batch_size=1, precision=Precision.named(precision), optimizer=OptimizerSpec())
    description = describe(config, sequence_length=256, compute_dtype=job.precision.compute, device_type="cuda")
    plain = UnitLayout(shard_size=1, reshard_after_forward=True)
    choices = [replace(plain, **{way: index % every == 0}) for index in range(len(description.units))]
    batch = Batch(micro_batch_size=1, accumulation_steps=1)
    plan = Plan.of(description, choices, batch, world_size=1)
    model = build_on_meta(config)
    form_process_group(needed=precision != "no")
    apply_plan(model, plan, description.units, mp_policy=mp_policy(job.precision))
    move_to_device(model, CUDA, empty=True)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    optimizer = make_optimizer(model, job.optimizer, plan, description.units)
    inputs = batch_on(training_batch(model, 256), 1, CUDA)
    for _ in range(2):  # the first makes states and workspaces
        torch.cuda.reset_peak_memory_stats()
        train_step(model, optimizer, inputs, plan, job)
    workspaces = torch.cuda.memory_allocated() - sum(t.nbytes for t in _on_cuda(model, optimizer, inputs))
    measured = torch.cuda.max_memory_allocated() - max(0, workspaces)
    return estimate_memory(description, choices, 1, job, batch).peak_bytes, measured


def _on_cuda(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = [*model.parameters(), *model.buffers(), *states, *inputs.values()]
    return [t for t in (getattr(t, "_local_tensor", t) for t in held) if isinstance(t, torch.Tensor) and t.is_cuda]


WAYS = [(1, "on_host"), (2, "on_host"), (2, "states_on_host")]


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(("every", "way"), WAYS, ids=["all", "some", "states_on_the_host"])
def test_the_estimate_is_what_the_allocator_counts(every, precision, way):
    estimate, measured = apart(estimated_and_measured, every, precision, way)
    assert -0.01 <= estimate / measured - 1 <= 0.03, (estimate, measured)


def test_the_host_is_measured():
    host = measure_host(CUDA, 0.5)
    assert 2**30 < host.memory_bytes < 2**50
    rates = (host.to_device_bytes_per_s, host.to_host_bytes_per_s, host.update_bytes_per_s)
    assert all(1e8 < rate < 1e13 for rate in rates)


def trained(away: bool, precision: str, fused: bool) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Weights after some steps, and where the states are that the plan keeps on the host."""
    model = tiny_model("gpt2")
    units, policy = find_units(model), mp_policy(Precision.named(precision))
    plan = plan_of(units, 1, "replicate")
    if away:
        units_away = tuple(replace(unit, states_on_host=i != 1) for i, unit in enumerate(plan.units))
        plan = replace(plan, accumulation_steps=1, units=units_away)
    apply_plan(model, plan, units, mp_policy=policy)
    move_to_device(model, CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    step_by_device(optimizer)
    bind_optimizer(model, plan, units, [optimizer])
    for step in range(2 * STEPS):
        torch.cuda._sleep(20_000_000)  # copies and kernels that do not wait for each other would show
        tiny_loss(model, {name: value.to(CUDA) for name, value in tiny_batch(step).items()}).backward()
        optimizer.step()
        optimizer.zero_grad()
    named = dict(model.named_parameters())
    on_host = [named[p.name] for unit in units if plan.decision(unit.fqn).states_on_host for p in unit.trainable]
    return full_state_dict(model), {local(optimizer.state[p]["exp_avg"]).device.type for p in on_host}


def difference(precision: str, fused: bool) -> tuple[float, set[str]]:
    form_process_group(needed=precision != "no")
    plain, _ = trained(False, precision, fused)
    other, places = trained(True, precision, fused)
    return max((plain[name] - other[name]).abs().max().item() for name in plain), places


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_weights_with_states_on_the_host_are_those_on_the_device(precision, fused):
    found, places = apart(difference, precision, fused)
    assert found == 0.0 and places == {"cpu"}
