"""Optimizer states on the host beside a real GPU, with and without FSDP2, against states on the device."""

from dataclasses import replace

import pytest
import torch

from hf_osdp.modeling.units import find_units
from hf_osdp.planner.training_job import Precision
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.environment import form_process_group, move_to_device, mp_policy
from hf_osdp.sharding.gradients import local
from hf_osdp.sharding.optimizer_steps import bind_optimizer, step_by_device
from hf_osdp.sharding.state import full_state_dict
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model

from .test_host_offload_cuda import CUDA, apart, estimated_and_measured

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 6


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
    for step in range(STEPS):
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
def test_weights_are_those_of_states_on_the_device(precision, fused):
    found, places = apart(difference, precision, fused)
    assert found == 0.0 and places == {"cpu"}


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_estimate_is_what_the_allocator_counts(precision):
    estimate, measured = apart(estimated_and_measured, 2, precision, "states_on_host")
    assert -0.01 <= estimate / measured - 1 <= 0.03, (estimate, measured)
