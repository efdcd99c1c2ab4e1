"""One process in bf16 is estimated as it runs: under autocast, or FSDP2 where units live on the host."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.modeling.units import find_units
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_model

STEPS = 10


def trained(on_host: bool) -> OSDPAccelerator:
    """Train without a launcher."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    model = tiny_model("gpt2", dtype=torch.float32)
    options: dict[str, Any] = {"sequence_length": 12, "hardware": "cpu"}
    if on_host:
        plan = plan_of(find_units(model), 1, "zero3")
        plan = replace(plan, sequence_length=12, units=tuple(replace(unit, on_host=True) for unit in plan.units))
        options = {"sequence_length": 12, "plan": plan}
    accelerator = OSDPAccelerator(cpu=True, mixed_precision="bf16", osdp=options)
    rows = [{name: value[0] for name, value in tiny_batch(0).items()} for _ in range(STEPS)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(rows))
    for batch in loader:
        outputs = model(**batch)
        accelerator.backward(outputs.loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return accelerator


def what_ran(accelerator: OSDPAccelerator) -> tuple[bool, bool, bool]:
    run = accelerator.planned_run
    return accelerator.is_fsdp2, run.inputs.job.precision.autocast, "under autocast" in run.inputs.description.trace


@pytest.mark.on_ranks(1, init=False)
def test_estimate_of_one_process_in_bf16_counts_autocast():
    accelerator = trained(on_host=False)
    run = accelerator.planned_run
    assert what_ran(accelerator) == (False, True, True)
    estimated = run.inputs.estimate(run.plan).memory.peak_bytes
    assert estimated == pytest.approx(accelerator.measured.peak_bytes, rel=0.02)


@pytest.mark.on_ranks(1, init=False)
def test_one_process_with_units_on_host_is_estimated_as_fsdp2():
    assert what_ran(trained(on_host=True)) == (True, False, False)
