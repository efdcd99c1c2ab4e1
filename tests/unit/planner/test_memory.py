"""Peaks in closed form, and the order of moments; `tests/property/test_memory_walk.py` sums every moment anew."""

from dataclasses import replace

import pytest

from hf_osdp.planner.affine import Affine
from hf_osdp.planner.cost.memory import MemoryEstimate, estimate_memory
from hf_osdp.planner.cost.moments import combined_scratch, gathered_ahead
from hf_osdp.planner.decision import Batch, layouts_for
from hf_osdp.planner.description import (
    DType,
    GatherSpan,
    ModelDescription,
    ParameterSpec,
    PhaseCost,
    Segment,
    UnitDescription,
)
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep, TrainingJob
from tests.helpers.descriptions import linear_envelope, transformer

ONCE, TWICE = (Batch(micro_batch_size=1, accumulation_steps=steps) for steps in (1, 2))
JOB = TrainingJob(global_batch_size=8)
NO_STATES = TrainingJob(global_batch_size=8, optimizer=OptimizerSpec(states=0))
LAYERS = 4
P = 4 * 100
"""Bytes of a block's parameters: 100 rows of one float32."""


def blocks(*, saved: int = 0, head_saved: int = 0, head_workspace: int = 0) -> ModelDescription:
    """An empty root, LAYERS blocks of P bytes, then a head that belongs to the root."""

    def unit(fqn: str, span: GatherSpan, *parameters: ParameterSpec) -> UnitDescription:
        return UnitDescription(fqn=fqn, module_names=(fqn,), class_name="Block", span=span, parameters=parameters)

    def segment(unit: int, saved: int, workspace: int) -> Segment:
        phase = PhaseCost(peak_bytes=linear_envelope(per_sample=workspace))
        return Segment(unit=unit, saved_bytes=Affine(per_sample=saved), forward=phase, backward=phase)

    weights = (ParameterSpec(name=f"b{i}.w", shape=(100,), dtype=DType.FLOAT32) for i in range(LAYERS))
    units = (unit("", GatherSpan.STEP), *(unit(f"b{i}", GatherSpan.USE, one) for i, one in enumerate(weights)))
    segments = (*(segment(1 + i, saved, 0) for i in range(LAYERS)), segment(0, head_saved, head_workspace))
    return replace(transformer(), sequence_length=1, units=units, segments=segments, input_bytes=Affine())


def estimate(description, g, *, world_size=4, job=JOB, batch=ONCE, **chosen) -> MemoryEstimate:
    layouts = [layouts_for(unit.span, (g,), reshard_after_forward=True)[0] for unit in description.units]
    return estimate_memory(description, [replace(one, **chosen) for one in layouts], world_size, job, batch)


PEAKS = {
    # parameter and two states, cut in 4; b3 is gathered ahead, into a buffer of P bytes
    "activations dominate: at the head": (blocks(saved=10**6, head_workspace=10**5, head_saved=10**5), dict(g=4),
        ("backward", "(root)"), LAYERS * 3 * P // 4 + LAYERS * 10**6 + 2 * 10**5 + P),
    # all parameters, the gradients of b1..b3, b0 gathered, and the buffer in which b1 is reduced
    "gradients dominate: in the block that runs last": (blocks(), dict(g=1, job=NO_STATES), ("backward: gather", "b0"),
        LAYERS * P + (LAYERS - 1) * P + P + P),
    # parameters and gradients, one block gathered, and the buffer in which the one after it is reduced
    "whole gradients that are held are all there": (blocks(),
        dict(g=1, job=NO_STATES, batch=TWICE, reduce_every_micro_step=False), ("backward: gather", "b2"),
        2 * LAYERS * P + P + P),
    # b1: its only gradient and the buffer in which it is reduced, and the buffer of b0, gathered ahead; then as much
    # again where b0 is copied out: gathered, its buffer, and the reduce buffer of b1 in flight
    "full sharding of one block at a time": (blocks(), dict(g=4, job=NO_STATES), ("backward: reduce", "b1"),
        LAYERS * P // 4 + (LAYERS - 1) * P // 4 + P + P + P),
}  # fmt: skip


@pytest.mark.parametrize(("description", "asked", "where", "total_bytes"), PEAKS.values(), ids=PEAKS)
def test_peak_in_closed_form(description, asked, where, total_bytes):
    memory = estimate(description, **asked)
    assert (memory.peak.phase, memory.peak.unit) == where
    assert memory.peak_bytes == memory.peak.total_bytes == total_bytes
    assert memory.peak is next(moment for moment in memory.moments if moment.total_bytes == total_bytes)


@pytest.mark.parametrize(
    ("step", "expected"), [(OptimizerStep.FOREACH, 60), (OptimizerStep.FOR_LOOP, 30), (OptimizerStep.FUSED, 60)]
)
def test_scratch_of_a_loop_is_its_largest(step, expected):
    job = TrainingJob(global_batch_size=1, optimizer=OptimizerSpec(step=step))
    assert (combined_scratch(job, [10, 20, 30]), combined_scratch(job, [])) == (expected, 0)


ORDERS = {
    "head shared: nothing is gathered during the loss": ((1, 0, 2, 3, 0, 1, 0), (None, None, None, 2, 3, 3, None)),
    "root's head: the last block is gathered during the loss": ((0, 2, 3, 0), (None, None, 2, 3)),
    "root between blocks": ((0, 2, 0, 3), (None, None, 2, 2)),
    "shared weights run more often than they have modules": ((1, 2, 1, 3, 1), (None, None, 2, None, 3)),
    "a shared module that never runs has no place in the order": ((1, 2, 3, 0), (None, None, 2, 3)),
}


@pytest.mark.parametrize(("order", "ahead"), ORDERS.values(), ids=ORDERS)
def test_gathered_ahead_follows_fsdp2s_order_of_forwards(order, ahead):
    description = transformer(layers=2)
    root, tied, *rest = description.units
    units = (root, replace(tied, module_names=("embedding", "head")), *rest)
    segments = tuple(Segment(unit=unit) for unit in order)
    assert gathered_ahead(replace(description, units=units, segments=segments)) == ahead
