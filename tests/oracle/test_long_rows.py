"""Rows of more than SHORT_ROW equal units: plans are optimal among those laid out by the rule of `search/options.py`;
another order may be faster. The brute force is moments.py again, over arrays of layouts.
"""

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from hf_osdp.errors import InfeasibleError
from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.cost.moments import SegmentBytes, merging_segments
from hf_osdp.planner.cost.timing import UnitTimer, estimate_time
from hf_osdp.planner.cost.units import gradients_arriving, unit_bytes
from hf_osdp.planner.decision import Batch
from hf_osdp.planner.description import GatherSpan, ModelDescription, Segment
from hf_osdp.planner.hardware import Backend, Hardware
from hf_osdp.planner.search.search import search
from hf_osdp.planner.search.strategies import batches, search_spaces
from hf_osdp.planner.search.timeline import SHORT_ROW, BatchCosts, build_timeline
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep, Precision, TrainingJob
from tests.helpers.descriptions import at_random
from tests.helpers.hardware import toy_hardware
from tests.helpers.problems import problem
from tests.helpers.sampling import slow_but

np = pytest.importorskip("numpy")

WORLD = 2
SEEDS = (0, 4, 5, 6, 8, 123, 201, 1)
CHUNK = 2**14
"""Layouts that are walked through at once: so many stay in the cache."""


def row_of(seed: int, blocks: int) -> ModelDescription:
    """A root and equal blocks in a row; the root may come before and after."""
    small = at_random(seed, kinds=1, blocks=1)
    root, block = small.units
    units = [
        replace(block, fqn=f"b{i}", parameters=tuple(replace(p, name=f"b{i}.{p.name}") for p in block.parameters))
        for i in range(blocks)
    ]
    segments = [
        part for segment in small.segments
        for part in ([replace(segment, unit=1 + i) for i in range(blocks)] if segment.unit == 1 else [segment])
    ]  # fmt: skip
    return replace(small, units=(root, *units), segments=tuple(segments))


def instance(seed: int) -> tuple[ModelDescription, Hardware, TrainingJob]:
    dice = random.Random(seed)
    hardware = toy_hardware(
        1, WORLD, intra=(1e-6, dice.choice([1e7, 1e8])), backend=dice.choice(list(Backend))
    ).with_margin(0.0)
    job = TrainingJob(
        global_batch_size=WORLD * dice.choice([1, 2]), micro_batch_size=1,
        reduce_every_micro_step=dice.choice([True, False]), precision=Precision.named(dice.choice(["no", "bf16"])),
        optimizer=OptimizerSpec(states=dice.choice([0, 2]), step=dice.choice(list(OptimizerStep))),
    )  # fmt: skip
    # where compute overlaps, the first block has another window
    return row_of(seed, SHORT_ROW + 2 if hardware.backend.overlaps else SHORT_ROW + 1), hardware, job


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Every layout of the row for each choice of the root: peak, seconds, and whether the rule would make it."""

    peaks: np.ndarray
    seconds: np.ndarray
    by_rule: np.ndarray

    def fastest(self, limit: int, *, by_rule: bool) -> float:
        """Least seconds within the limit, infinite where nothing fits."""
        fits = (self.peaks <= limit) & (self.by_rule | (not by_rule))
        return float(self.seconds[fits].min(initial=np.inf))


def every_layout(description: ModelDescription, hardware: Hardware, job: TrainingJob, batch: Batch) -> Layouts:
    """All of them; options that are worse in every term are left out, as test_brute_force.py shows they may be."""
    (space,) = search_spaces(problem(description, hardware, job), batch)
    timeline = build_timeline(BatchCosts(problem(description, hardware, job), batch), space)
    group_of = {unit: group for group in timeline.groups for unit in group.units}
    assert max(len(group.units) for group in timeline.groups) > 1, "the rule has nothing to lay out"
    blocks = [[o.layout for o in group_of[index].options] for index in range(1, len(description.units))]
    table = np.indices([len(choices) for choices in blocks], dtype=np.int8).reshape(len(blocks), -1)
    by_rule = np.ones(table.shape[1], dtype=bool)
    for group in timeline.groups:
        for before, after in itertools.pairwise(group.units):  # backward meets the options in their order
            by_rule &= table[before - 1] >= table[after - 1]
    timer = UnitTimer(description, hardware, job, batch)
    peaks, seconds = [], []
    for root in space[0]:
        choices = [[root], *blocks]
        terms = [
            [unit_bytes(u, c, WORLD, job, batch) for c in own]
            for u, own in zip(description.units, choices, strict=True)
        ]
        times = [[timer(index, choice).total_s for choice in own] for index, own in enumerate(choices)]
        parts = np.array_split(table, -(-table.shape[1] // CHUNK), axis=1)
        peaks.append(
            np.concatenate([_peaks(description, job, terms[0][0], terms[1:], choices[1:], part) for part in parts])
        )
        seconds.append(times[0][0] + sum(np.array(own)[column] for own, column in zip(times[1:], table, strict=True)))
        _spot_check(description, hardware, job, batch, choices, table, peaks[-1], seconds[-1])
    return Layouts(
        peaks=np.concatenate(peaks), seconds=np.concatenate(seconds), by_rule=np.tile(by_rule, len(space[0]))
    )


def _peaks(description: ModelDescription, job: TrainingJob, root, terms, choices, table) -> np.ndarray:
    """Peak of each layout (column of `table`): the walk of moments.py."""
    highest, table, blocks = np.zeros(table.shape[1], dtype=np.int64), table.astype(np.intp), range(len(table))

    def of(name: str, block: int) -> np.ndarray:
        return np.array([getattr(t, name) for t in terms[block]], dtype=np.int64)[table[block]]

    def costs(segment: Segment, name: str) -> np.ndarray:
        block = segment.unit - 1
        ways = [choice.activations.recomputation for choice in choices[block]]
        forms = [SegmentBytes.of(segment.under(way), GatherSpan.USE, 1) for way in ways]
        return np.array([getattr(form, name) for form in forms], dtype=np.int64)[table[block]]

    def moment(level) -> None:
        np.maximum(highest, level, out=highest)

    segments, merging = description.segments, merging_segments(description, job)
    level = root.held + root.gathered + sum(of("held", b) for b in blocks)
    buffer = root.gather_buffer
    for segment in segments:
        if segment.unit == 0:
            moment(level + segment.forward.peak_bytes.bytes(1) + buffer)
            level = level + segment.saved_bytes.bytes(1)
            continue
        block = segment.unit - 1
        moment(level + buffer + of("gather_buffer", block) + of("gathered", block))
        buffer = np.where(of("managed", block), of("gather_buffer", block), buffer)
        moment(level + costs(segment, "forward_peak") + buffer + of("gathered", block))
        level = level + of("kept", block) + costs(segment, "saved")
    copies = root.copies + sum(of("copies", b) for b in blocks)
    arriving, tail, buffers, ahead = gradients_arriving(description, job), 0, 0, 0
    for index in range(len(segments) - 1, -1, -1):
        segment = segments[index]
        nearest: Any = 0  # of the units before, the last one that FSDP2 manages
        for before in segments[:index]:
            if before.unit:
                nearest = np.where(of("managed", before.unit - 1), of("prefetched", before.unit - 1), nearest)
        managed = of("managed", segment.unit - 1) if segment.unit else root.managed
        ahead = np.where(managed, nearest, ahead)
        if segment.unit == 0:
            compute, saved = segment.backward.peak_bytes.bytes(1), segment.saved_bytes.bytes(1)
            moment(level + compute + merging.get(index, 0) + ahead + tail)
            level = level - saved + (arriving[index][0] if root.unsharded_gradients else 0)
            continue
        block, compute, saved = segment.unit - 1, costs(segment, "backward_peak"), costs(segment, "saved")
        gathered, kept = of("gathered", block), of("kept", block)
        own = np.where(kept > 0, 0, gathered)
        moment(level + own + of("prefetched", block) + tail + np.where(kept > 0, 0, of("cast_buffer", block)))
        moment(level + own + compute + ahead + tail)
        level = level - saved - kept
        whole = level + costs(segment, "gradient") + ahead + of("reduce_input", block) + np.where(managed, 0, tail)
        moment(whole + of("unsharded_gradients", block) + of("reduce_copy", block))
        after, reduced = of("gradients_after", block), of("reduced_after", block)
        output = np.maximum(0, of("reduce_output", block) - reduced)
        moment(whole + after + reduced + of("last_gradient", block) + output)
        level, buffers = level + after + reduced, buffers + reduced
        tail = np.where(managed, of("reduce_tail", block), tail)
    level = level + sum(of("gradients_settled", b) for b in blocks) - root.gathered - root.joined
    moment(level + root.reduce_input + root.reduce_copy)
    level = level + root.left_at_end
    moment(level + root.reduce_input + root.last_gradient + max(root.reduced_after, root.reduce_output))
    scratch = [*(of("step_scratch", b) for b in blocks), np.full(table.shape[1], root.step_scratch)]
    highest_of = np.maximum.reduce if job.optimizer.step is OptimizerStep.FOR_LOOP else sum
    moment(level - copies - buffers + highest_of(scratch))
    return highest


def _spot_check(description, hardware, job, batch, choices, table, peaks, seconds) -> None:
    """The arrays say what the cost model says."""
    for index in random.Random(0).sample(range(table.shape[1]), 5):
        chosen = [choices[0][0], *(own[k] for own, k in zip(choices[1:], table[:, index], strict=True))]
        assert estimate_memory(description, chosen, WORLD, job, batch).peak_bytes == peaks[index]
        step_s = estimate_time(description, chosen, hardware, job, batch).step_s
        assert step_s == pytest.approx(seconds[index], rel=1e-9)


def limits_between(layouts: Layouts, count: int) -> list[int]:
    """Peaks of layouts from the least by the rule to the highest."""
    peaks = np.unique(layouts.peaks[layouts.by_rule])
    return [int(peaks[i]) for i in np.unique(np.linspace(0, len(peaks) - 1, count).astype(int))]


@pytest.mark.parametrize("seed", slow_but(SEEDS, daily=SEEDS[4:6]))
def test_plan_of_a_long_row_is_optimal_by_the_rule(seed):
    description, hardware, job = instance(seed)
    (batch,) = batches(job, WORLD)
    layouts = every_layout(description, hardware, job, batch)
    limits = limits_between(layouts, 6)
    for limit in limits:
        result = search(problem(description, hardware, job, limit))
        assert result.memory.peak_bytes <= limit
        assert result.time.step_s == pytest.approx(layouts.fastest(limit, by_rule=True), rel=2e-7)
        assert result.time.step_s >= layouts.fastest(limit, by_rule=False) * (1 - 2e-7)
    with pytest.raises(InfeasibleError) as caught:
        search(problem(description, hardware, job, limits[0] - 1))
    assert caught.value.least_peak_bytes == limits[0]
