from __future__ import annotations

from dataclasses import replace

import pytest

from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.cost.phases import Phase, phases
from hf_osdp.planner.decision import Batch
from hf_osdp.planner.training_job import TrainingJob
from tests.helpers.descriptions import transformer
from tests.helpers.layouts import plan_of

EVALUATION = Phase(name="evaluation", peak_bytes=7, moment="forward")


@pytest.mark.parametrize("layout", ["replicate", "zero3"])
@pytest.mark.parametrize("world", [1, 4])
def test_parts_are_sums_of_what_is_there(world, layout):
    description = replace(transformer(), buffer_bytes=11, other_bytes=13)
    job, batch = TrainingJob(global_batch_size=2 * world), Batch(micro_batch_size=2, accumulation_steps=1)
    layouts = plan_of(description.units, world, layout if world > 1 else "replicate").layouts(description)
    memory = estimate_memory(description, layouts, world, job, batch)
    parts = {one.name: one for one in phases(description, layouts, memory, job, world, [EVALUATION])}
    assert list(parts) == ["training step", "evaluation", "save of whole tensors", "resume"]
    assert parts["evaluation"] is EVALUATION
    assert parts["training step"].peak_bytes == memory.peak_bytes
    sharded = layout == "zero3" and world > 1
    rest = sum(unit.parameters + unit.optimizer for unit in memory.units) + 24
    parameters = [p for unit in description.units for p in unit.parameters]
    most = max(parameters, key=lambda p: p.numel)
    whole, shard = most.numel * 4, most.sharded_bytes(world)
    assert parts["save of whole tensors"].peak_bytes == rest + (world * shard if sharded else 0)
    gradients = sum(p.sharded_bytes(world if sharded else 1) for p in parameters if p.requires_grad)
    received = 0 if world == 1 else whole + (shard if sharded else 0)
    scratch = max(unit.step_passing for unit in memory.units)
    assert parts["resume"].peak_bytes == rest + max(gradients + scratch, received)
