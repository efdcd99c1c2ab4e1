"""Memory of an evaluation under a plan: forward without backward, and what the loop keeps of its batches.

docs/planner.md has the equations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import itemgetter

from ..affine import Affine
from ..decision import Batch, UnitLayout
from ..description import ModelDescription
from ..training_job import TrainingJob
from .memory import layout_terms
from .moments import SegmentBytes, all_kinds, resident_bytes, step_moments
from .units import UnitBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What generating takes for a sample, at its last token, with all its beams."""

    cache_bytes: int
    """Keys and values, and what the encoder gives."""
    growth_bytes: int
    """Of the layer that runs: its new keys beside the old, and keys and values repeated for groups of queries."""
    logits_bytes: int
    """Logits of a token, and scores made of them."""
    scores_bytes: int
    """What stays of these while the next token is computed."""
    kept_bytes: int
    """Tokens and labels, which an evaluation keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationLoop:
    """How an evaluation runs."""

    batch_size: int
    """Samples of a batch on one rank."""
    micro_batch_size: int
    """Samples that forward runs at once."""
    keeps_outputs: bool
    """Outputs, such as logits, are gathered over the ranks and kept; else the loss alone."""
    moved_after: int | None
    """Batches after which kept outputs go to the host; None is at the end."""
    samples: int
    """Samples of the data, on all ranks; a large number if it does not say how many."""
    generation: Generation | None = None
    """The loop generates, and keeps the tokens."""

    def kept_batches(self, world_size: int) -> int:
        """Return how many batches have outputs on the device together."""
        batches = -(-self.samples // (self.batch_size * world_size))
        return min(self.moved_after or batches, batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedModel:
    """A model as it evaluates under a plan."""

    description: ModelDescription
    """Units as in training, segments as they run without gradients; `output_bytes` are those of the outputs that a
    loop keeps."""
    layouts: tuple[UnitLayout, ...]
    world_size: int
    job: TrainingJob
    trains: bool = True
    """Optimizer states are on the device, too."""
    gathers_in_lists: bool = False
    """Outputs are gathered into one tensor for each rank, and then joined, as gloo needs."""

    def peak(self, loop: EvaluationLoop) -> tuple[int, str]:
        """Return the bytes of tensors at the highest moment, the first of equals, and the moment's name."""
        name, nbytes = max(self._moments(loop), key=itemgetter(1))
        return nbytes, name

    def fits(self, loop: EvaluationLoop, room_bytes: int) -> bool:
        return self.peak(loop)[0] <= room_bytes

    def fitting(self, loop: EvaluationLoop, room_bytes: int, *, cuts: bool, moves: bool) -> EvaluationLoop | None:
        """Return the loop with the largest micro-batches (only if it `cuts`), and then with the most kept batches
        (only if it `moves` them to the host earlier) that fits; None if there is none.
        """
        sizes = dict.fromkeys(-(-loop.batch_size // parts) for parts in range(1, loop.batch_size + 1))
        for size in sizes if cuts else (loop.micro_batch_size,):
            tried = replace(loop, micro_batch_size=size)
            if self.fits(tried, room_bytes):
                return tried
            counts = range(1, loop.kept_batches(self.world_size)) if moves else range(0)
            fitting = bisect_left(
                counts, True, key=lambda count: not self.fits(replace(tried, moved_after=count), room_bytes)
            )
            if fitting:
                return replace(tried, moved_after=fitting)
        return None

    def largest(self, loop: EvaluationLoop, room_bytes: int, *, cuts: bool, moves: bool) -> int:
        """Return the largest batch size up to that of the loop with which it fits; 0 if there is none."""

        def exceeds(size: int) -> bool:
            smaller = replace(loop, batch_size=size, micro_batch_size=size)
            return self.fitting(smaller, room_bytes, cuts=cuts, moves=moves) is None

        return bisect_left(range(1, loop.batch_size + 1), True, key=exceeds)

    def _moments(self, loop: EvaluationLoop) -> Iterator[tuple[str, int]]:
        """Yield name and bytes of each moment of the last batch before outputs go to the host."""
        size, job = loop.micro_batch_size, replace(self.job, holds_outputs=False)
        batch = Batch(micro_batch_size=size, accumulation_steps=1)
        whole_batch = Affine(constant=self.description.input_bytes.bytes(loop.batch_size))
        description = replace(self.description, input_bytes=whole_batch)
        units, segments = layout_terms(description, self.layouts, self.world_size, job, batch)
        if not self.trains:
            units = [replace(unit, optimizer=0) for unit in units]
        outputs = description.output_bytes if loop.keeps_outputs else Affine()
        if loop.generation is not None:
            outputs = Affine(per_sample=loop.generation.kept_bytes)
        own = outputs.bytes(loop.batch_size)
        gathered, kept = own * self.world_size, loop.kept_batches(self.world_size) - 1
        # the outputs of the batch before have a variable of their own; of the only one kept it is no copy
        before = gathered * (kept + (kept > 1))
        steady, stays = _after_a_batch(units)
        for each, beside in ((units, before), (steady, before + stays)):
            beside += own if size < loop.batch_size else 0
            walk = step_moments(description, each, segments, job, batch, all_kinds)
            for phase, unit, level in takewhile(lambda moment: moment[0].startswith("forward"), walk):
                assert unit is not None
                yield f"{phase} of {description.units[unit].label}", level + beside
        between = stays + sum(unit.held - unit.copies for unit in units)
        between += resident_bytes(description, job, size, all_kinds)
        yield "between batches", between + before
        if (made := loop.generation) is not None:
            yield "generation", between - stays + before + self._generates(made, loop.batch_size, units, job, batch)
        if self.world_size > 1:
            copies = 2 if self.gathers_in_lists else 1
            yield "gathering outputs", between + kept * gathered + own + copies * gathered
        if kept:
            samples = self.world_size * loop.batch_size
            all_samples = min((kept + 1) * samples, loop.samples)
            # an incomplete last batch is complete before it is gathered, and then a view
            last = gathered if self.world_size > 1 else outputs.bytes(all_samples - kept * samples)
            yield "joining the outputs of batches", between + kept * gathered + last + outputs.bytes(all_samples)

    def generating(self, made: Generation, samples: int) -> int:
        """Return the bytes at the highest moment of a generation for so many samples at once."""
        batch = Batch(micro_batch_size=1, accumulation_steps=1)
        units, _ = layout_terms(self.description, self.layouts, self.world_size, self.job, batch)
        rest = sum(unit.parameters + unit.optimizer for unit in units)
        rest += resident_bytes(self.description, replace(self.job, holds_outputs=False), 0, all_kinds)
        return rest + self._generates(made, samples, units, self.job, batch)

    def _generates(
        self, made: Generation, samples: int, units: Sequence[UnitBytes], job: TrainingJob, batch: Batch
    ) -> int:
        """Return what is there at the last token, each of which gathers all units, also those that stay after a
        forward.
        """
        gathers = self._gathers(units, job, batch) + sum(unit.copies for unit in units)
        forward = samples * made.scores_bytes + max(samples * made.growth_bytes, gathers)
        return samples * made.cache_bytes + max(samples * made.logits_bytes, forward)

    @property
    def standing_bytes(self) -> tuple[int, int]:
        """The model's own bytes, and the most that a forward gathers."""
        batch = Batch(micro_batch_size=1, accumulation_steps=1)
        units, _ = layout_terms(self.description, self.layouts, self.world_size, self.job, batch)
        held = sum(unit.parameters for unit in units) + self.description.buffer_bytes
        return held, self._gathers(units, self.job, batch)

    def _gathers(self, units: Sequence[UnitBytes], job: TrainingJob, batch: Batch) -> int:
        """Return what a forward of one token gathers at its highest moment."""
        nothing = SegmentBytes(**dict.fromkeys(SegmentBytes.__slots__, 0))
        alone = replace(self.description, buffer_bytes=0, other_bytes=0, input_bytes=Affine())
        walk = step_moments(alone, units, [nothing] * len(alone.segments), job, batch, all_kinds)
        levels = [level for phase, _, level in walk if phase.startswith("forward")]
        return max(levels) - sum(unit.held for unit in units) if levels else 0


def _after_a_batch(units: Sequence[UnitBytes]) -> tuple[list[UnitBytes], int]:
    """Return units as a later batch finds them, where those that stay gathered after forward need no gather, and the
    bytes of these.
    """
    stays = sum(unit.kept for unit in units)
    return [
        replace(unit, kept=0, gathered=0, gather_buffer=0, gather_stage=0, copy_out=0) if unit.kept else unit
        for unit in units
    ], stays
