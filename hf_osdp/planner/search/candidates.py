"""Candidates of a search, one for each batch in each search space, with bounds on time and peak that need no solver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from ...errors import HardwareError, OSDPError
from ...quantities import format_bytes
from ..cost.memory import MemoryEstimate, SegmentBytes, estimate_memory, peak_of_terms
from ..cost.units import UnitBytes
from ..decision import Batch, UnitLayout
from ..description import Activations
from ..problem import PlanningProblem
from .fitting import ADVICE_WORK, any_within, least_peak
from .options import Option, Timeline
from .solver import Solution
from .strategies import batches, search_spaces
from .timeline import BatchCosts, build_timeline

UNLIMITED = 2**60
"""Bytes that no device has."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """One batch in one search space: an integer program, with the time and the peak that no plan of it can beat."""

    problem: PlanningProblem
    batch: Batch
    timeline: Timeline

    @cached_property
    def least_s(self) -> float:
        """Seconds of a step that no plan goes below."""
        return sum(len(group.units) * min(option.seconds for option in group.options) for group in self.timeline.groups)

    @cached_property
    def floor_bytes(self) -> int:
        """Bytes that no plan's peak goes below: every unit takes the least of each term, whichever layout it is from.

        Every moment is a sum of terms with positive sign, so that the floor holds for each of them.
        """
        description = self.problem.description
        terms: dict[int, UnitBytes] = {}
        kept: dict[int, set[Activations]] = {}
        for group in self.timeline.groups:
            least = {f.name: min(getattr(o.bytes, f.name) for o in group.options) for f in fields(UnitBytes)}
            least["cast_buffer"] = min(0 if o.bytes.kept else o.bytes.cast_buffer for o in group.options)  # what is kept is not cast again
            terms |= dict.fromkeys(group.units, UnitBytes(**least))
            kept |= {unit: {o.layout.activations for o in group.options} for unit in group.units}
        samples = self.batch.micro_batch_size
        segments = [SegmentBytes.least(s, description.units[s.unit].span, samples, kept[s.unit]) for s in description.segments]
        return peak_of_terms(description, [terms[i] for i in range(len(terms))], segments, self.problem.job, self.batch)

    def memory(self, layouts: Mapping[int, UnitLayout]) -> MemoryEstimate:
        """Return the memory of a plan."""
        ordered = [layouts[index] for index in range(len(layouts))]
        return estimate_memory(self.problem.description, ordered, self.problem.hardware.world_size, self.problem.job, self.batch)

    def needed_bytes(self, layouts: Mapping[int, UnitLayout]) -> int:
        """Return a plan's peak, less what no plan avoids."""
        return self.memory(layouts).on(self.problem.hardware) - self.problem.hardware.unavoidable_bytes

    def quickest(self, limit_bytes: int) -> Solution | None:
        """Return each unit's quickest option, where all of them fit together: then there is nothing to solve."""
        layouts = self._each(lambda o: (o.seconds, o.stays))
        return Solution(layouts=layouts, objective=self.least_s, proven=True) if self._fit(layouts, limit_bytes) else None

    def frugal(self) -> dict[int, UnitLayout]:
        """Return for each unit the option that needs least memory; most often no plan needs less."""
        units = sum(len(group.units) for group in self.timeline.groups)

        # of bytes where all units take the option, what stays is there for all of them, what passes for one
        return self._each(lambda o: (units * o.stays + max(o.transient, o.forward_peak, o.copy_out_peak), o.seconds))

    def fits(self, limit_bytes: int) -> bool:
        """Return whether any plan fits, as far as is found out in a while."""
        return self.floor_bytes <= limit_bytes and (self._fit(self.frugal(), limit_bytes) or self.any_within(limit_bytes))

    def any_within(self, limit_bytes: int) -> bool:
        """Return whether the solver soon finds a plan that fits."""
        return any_within(self.timeline, self.problem.job, limit_bytes, ADVICE_WORK) is not None

    def least(self) -> tuple[dict[int, UnitLayout], int]:
        """Return the plan with the lowest peak, and that peak less what no plan avoids."""
        job, start = self.problem.job, self.frugal()
        if not self.timeline.fits_host(start):
            possible = any_within(self.timeline, job, UNLIMITED)
            assert possible is not None, "a candidate's least states fit the host"
            start = possible
        return least_peak(self.timeline, job, start, self.floor_bytes, self.needed_bytes)

    def _fit(self, layouts: Mapping[int, UnitLayout], limit_bytes: int) -> bool:
        return self.needed_bytes(layouts) <= limit_bytes and self.timeline.fits_host(layouts)

    def _each(self, key: Callable[[Option], tuple[float, ...]]) -> dict[int, UnitLayout]:
        """Return for each unit the first of its options by a key."""
        return {unit: min(group.options, key=key).layout for group in self.timeline.groups for unit in group.units}


def all_candidates(problem: PlanningProblem, *, smallest_first: bool = False) -> Iterator[Candidate]:
    """Yield every batch in every space, the largest micro-batches first unless said otherwise."""
    order = -1 if smallest_first else 1
    for batch in list(batches(problem.job, problem.hardware.world_size))[::order]:
        costs = BatchCosts(problem, batch)
        for space in search_spaces(problem, batch):
            yield Candidate(problem=problem, batch=batch, timeline=build_timeline(costs, space))


def possible_candidates(problem: PlanningProblem) -> list[Candidate]:
    """Return the candidates that some host and some device have memory for; HardwareError or OSDPError where there are none."""
    every = list(all_candidates(problem))
    fitting = [candidate for candidate in every if candidate.timeline.least_host_bytes <= candidate.timeline.host_limit_bytes]
    if not fitting:
        least = min(candidate.timeline.least_host_bytes for candidate in every)
        raise HardwareError(
            f"What is to lie on the host takes {format_bytes(least)} of its memory for each rank, but there is"
            f" {format_bytes(every[0].timeline.host_limit_bytes)} ({problem.hardware.device.name}); leave host_offload and"
            " offload_activations open, or use more devices."
        )
    if all(candidate.floor_bytes > UNLIMITED for candidate in fitting):
        raise OSDPError(f"At every batch a device would need more than {format_bytes(UNLIMITED)}; no model does. Describe it again.")
    return fitting
