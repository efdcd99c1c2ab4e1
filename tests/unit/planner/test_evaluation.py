from __future__ import annotations

from dataclasses import replace

import pytest

from hf_osdp.errors import PreflightError
from hf_osdp.planner.cost.memory import layout_terms
from hf_osdp.planner.decision import Batch
from tests.helpers.evaluations import evaluation_of

OUTPUT = 2**24
"""Bytes of a sample's outputs, so that what is kept is the peak."""


@pytest.mark.parametrize(("world", "layout"), [(1, "replicate"), (4, "zero3"), (4, "zero2")])
@pytest.mark.parametrize("moved_after", [1, 2, 3, None])
def test_moments_are_sums_of_what_is_there(world, layout, moved_after):
    evaluation = evaluation_of(world=world, outputs=OUTPUT, layout=layout)
    model, loop = evaluation.model, replace(evaluation.loop, moved_after=moved_after)
    kept, batch = moved_after or 8, 8 * OUTPUT
    units, _ = layout_terms(
        model.description, model.layouts, world, model.job, Batch(micro_batch_size=8, accumulation_steps=1)
    )
    between = sum(u.parameters + u.optimizer + u.kept for u in units) + model.description.input_bytes.bytes(8)
    joining = 2 * kept * batch * world if kept > 1 else 0
    gathering = (kept - 1) * batch * world + batch * (1 + world) if world > 1 else 0
    if joining or gathering:
        assert model.peak(loop)[0] == between + max(joining, gathering)
    else:
        alone = replace(loop, keeps_outputs=False)
        assert model.peak(loop) == model.peak(alone)
        assert model.peak(loop)[1].startswith("forward")


def test_parts_add_the_outputs_of_the_batch_and_need_less_for_forward():
    evaluation = evaluation_of(world=1, outputs=1)
    model, whole = evaluation.model, replace(evaluation.loop, moved_after=1)
    peaks = [model.peak(replace(whole, micro_batch_size=size))[0] for size in (8, 4, 1)]
    assert peaks == sorted(peaks, reverse=True)
    segments = model.description.segments
    head = segments[-1].forward.peak_bytes
    saved = sum(segment.saved_bytes.change(4) - segment.saved_bytes.change(8) for segment in segments[:-1])
    assert peaks[1] - peaks[0] == head.bytes(4) - head.bytes(8) + saved + model.description.output_bytes.bytes(8)


def test_largest_parts_and_then_most_batches_are_taken():
    evaluation = evaluation_of(world=2, outputs=OUTPUT, moves=True)
    for size, moved in ((8, 5), (8, 1)):
        asked = replace(evaluation.loop, micro_batch_size=size, moved_after=moved)
        limited = replace(evaluation, room_bytes=evaluation.model.peak(asked)[0])
        assert limited.of(evaluation.loop).loop == asked
    large = evaluation_of(world=1, outputs=1, moves=True)
    part = replace(large.loop, micro_batch_size=3)
    room_bytes = large.model.peak(part)[0]
    found = replace(large, room_bytes=room_bytes).of(large.loop)
    assert found.loop == part
    assert found.line.endswith("; to fit, batches of 8 run in parts of at most 3 samples, with equal results.")


def test_batch_size_of_the_refusal_fits_and_the_next_does_not():
    evaluation = evaluation_of(world=2, outputs=OUTPUT)
    fits = replace(evaluation.loop, batch_size=5, micro_batch_size=5, moved_after=3)
    limited = replace(evaluation, room_bytes=evaluation.model.peak(fits)[0])
    asked = replace(evaluation.loop, moved_after=3)
    with pytest.raises(PreflightError, match=r"set per_device_eval_batch_size=5 or eval_accumulation_steps=1\."):
        limited.of(asked)
    assert limited.of(fits).loop == fits
    with pytest.raises(PreflightError, match="per_device_eval_batch_size=5"):
        limited.of(replace(fits, batch_size=6, micro_batch_size=6))


def test_limit_below_one_sample_asks_for_more_memory():
    evaluation = replace(evaluation_of(world=1, outputs=OUTPUT), room_bytes=1000)
    with pytest.raises(PreflightError, match="a higher memory_limit: a single sample needs more"):
        evaluation.of(evaluation.loop)
