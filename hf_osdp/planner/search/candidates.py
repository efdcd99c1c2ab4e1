"""Candidates of a search, one for each batch in each search space, with bounds on time and peak that need no
solver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ...errors import HardwareError, OSDPError
from ...quantities import format_bytes
from ..cost.memory import Needed, bytes_needed, peak_of_terms
from ..cost.moments import SegmentBytes
from ..cost.units import UnitBytes
from ..decision import Batch, Space, UnitLayout, groups_in
from ..placement import Activations
from ..problem import PlanningProblem, Strategy
from ..space import batches, search_spaces
from .options import Option, Timeline
from .solver import FastestSearch, Layouts, Solution, any_within, fit, least, simplest
from .timeline import BatchCosts, build_timeline

UNLIMITED = 2**60
"""More bytes than any device has."""
_EQUAL = 1 + 1e-12
"""Ratio of equal seconds that were added in other orders."""
LEAST_WORK = 0.5
"""Most work to find the lowest peak, in CP-SAT's deterministic seconds; nearly all take hundredths."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """One batch in one search space: an integer program, with lower bounds on the time and the peak of its plans."""

    problem: PlanningProblem
    batch: Batch
    costs: BatchCosts
    space: Space

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline, with the options that are not dominated."""
        return build_timeline(self.costs, self.space)

    @property
    def least_s(self) -> float:
        """Lower bound on the seconds of a step: each unit takes its fastest option."""
        return max(self.timeline.least)

    @cached_property
    def floor_bytes(self) -> int:
        """Lower bound on the peak of a last micro-step: a unit takes the least of each memory term over its options.

        Beside a replica nothing is gathered ahead: this needs no term of its own, because a unit that may be a
        replica gathers 0 bytes here, and where one unit may be a replica, all may, or are.
        """
        description = self.problem.description
        terms: dict[int, UnitBytes] = {}
        kept: dict[int, set[Activations]] = {}
        for group in self.timeline.groups:
            least = UnitBytes.least([o.bytes for o in group.options])
            terms |= dict.fromkeys(group.units, replace(least, earlier=None))
            kept |= {unit: {o.layout.activations for o in group.options} for unit in group.units}
        samples = self.batch.micro_batch_size
        segments = [
            SegmentBytes.least([SegmentBytes.of(s, description.units[s.unit].span, samples, a) for a in kept[s.unit]])
            for s in description.segments
        ]
        return peak_of_terms(
            description, [terms[i] for i in range(len(terms))], segments, self.problem.job, self.batch
        )

    def needed(self, layouts: Layouts) -> Needed:
        """Return what a plan needs, without the memory that every plan takes outside tensors."""
        ordered, hardware = [layouts[index] for index in range(len(layouts))], self.problem.hardware
        needed = bytes_needed(self.problem.description, ordered, hardware, self.problem.job, self.batch)
        return needed.less(hardware.unavoidable_bytes)

    def quickest(self, limit_bytes: int) -> Solution | None:
        """Return the plan of each unit's fastest option if it fits and no plan is faster, else None. It needs no
        solver.
        """
        done, issued = self.timeline.least
        layouts = self._each(
            lambda o: (o.seconds, o.issued, o.stays) if done >= issued else (o.issued, o.seconds, o.stays)
        )
        seconds = self.timeline.seconds(layouts)
        if seconds > self.least_s * _EQUAL or not self.fits(layouts, limit_bytes):
            return None
        return Solution(layouts=layouts, objective=seconds, bound=seconds)

    def simpler(self, layouts: Layouts, limit_bytes: int, price_s: float) -> tuple[Layouts, int, int]:
        """Return a plan of no other layouts than these with the least sum of seconds and prices of parts
        (`solver.simplest`), and the numbers of parts before and now.
        """
        own: dict[int, dict[UnitLayout, None]] = {}
        for unit, structure in enumerate(self.costs.structures):
            own.setdefault(structure, {})[layouts[unit]] = None
        space = tuple(tuple(own[structure]) for structure in self.costs.structures)
        timeline = build_timeline(self.costs, space, every_layout=True)
        simple = simplest(timeline, limit_bytes, self.needed, layouts, price_s)
        return simple, timeline.count_parts(layouts), timeline.count_parts(simple)

    def frugal(self) -> dict[int, UnitLayout]:
        """Return the plan of each unit's most frugal option; its peak is usually the least of all plans."""
        units = sum(len(group.units) for group in self.timeline.groups)

        def needed(o: Option) -> int:
            """Bytes if all units take the option: those that stay for each unit, its peak above them for one."""
            groups = self.timeline.communicator_bytes * groups_in(o.meshes)
            return units * o.stays + max(o.transient, o.call.forward, o.call.copy_out) + groups

        return self._each(lambda o: (needed(o), o.seconds))

    def solver(self, limit_bytes: int) -> FastestSearch:
        """Return the search for the fastest plan within a limit."""
        return FastestSearch(self.timeline, limit_bytes, self.needed)

    def least(self, below: int | None = None) -> tuple[Layouts, int] | None:
        """Return the plan with the lowest peak, and this peak as `needed` gives it; it is exact up to 4 GiB, above to
        about one part in a million. None if the solver finds no plan below so many bytes within `LEAST_WORK`.
        """
        plan = self.frugal()
        best: tuple[Layouts, int] | None = None
        if (needed := self.needed(plan)).host > self.timeline.host_limit_bytes and below is None:
            possible = any_within(self.timeline, UNLIMITED, self.needed)
            assert possible is not None, "a candidate's least states fit the host"
            plan, needed = dict(possible), self.needed(possible)
        if needed.host <= self.timeline.host_limit_bytes and (below is None or needed.device < below):
            best, below = (plan, needed.device), needed.device
        assert below is not None, "it is the plan's peak"
        found = None
        if self.floor_bytes < below:
            found = least(self.timeline, below - 1, self.needed, LEAST_WORK)
        if found is None or not self.fits(found, below - 1):
            return best
        return found, self.needed(found).device

    def fits(self, layouts: Layouts, limit_bytes: int) -> bool:
        """Return whether a plan fits the device and the host."""
        return fit(self.timeline, self.needed(layouts), limit_bytes)

    def _each(self, key: Callable[[Option], tuple[float, ...]]) -> dict[int, UnitLayout]:
        """Return for each unit the layout whose option has the least key."""
        found: dict[int, UnitLayout] = {}
        for group in self.timeline.groups:
            found |= dict.fromkeys(group.units, min(group.options, key=key).layout)
        return found


def all_candidates(problem: PlanningProblem, *, smallest: bool = False) -> Iterator[Candidate]:
    """Yield the candidate of each batch and space, the largest micro-batch first; or those of the `smallest` alone,
    whose units are replicated or sharded over all ranks at once if they can: but for padding, no others need less.
    """
    for batch in list(batches(problem.job, problem.hardware.world_size))[-1 if smallest else 0 :]:
        costs = _batch_costs(replace(problem, strategy=Strategy.OSDP, memory_limit_bytes=1), batch)
        for space in search_spaces(problem, batch):
            own = _extremes(space, problem.hardware.world_size) if smallest else space
            yield Candidate(problem=problem, batch=batch, costs=costs, space=own)


def _extremes(space: Space, world_size: int) -> Space:
    """Return the space without groups of some ranks and without stages, but where a unit has no other layouts."""
    own = {
        id(layouts): tuple(one for one in layouts if one.shard_size in (1, world_size) and not one.two_stage)
        for layouts in space
    }
    return tuple(own[id(layouts)] or layouts for layouts in space)


_batch_costs = lru_cache(maxsize=32)(BatchCosts)
"""Costs at one batch, which searches of all strategies and limits share."""


def possible_candidates(problem: PlanningProblem) -> list[Candidate]:
    """Return the candidates whose states fit the host; HardwareError if there are none, OSDPError if each passes
    `UNLIMITED`.
    """
    every = list(all_candidates(problem))
    fitting = [
        candidate for candidate in every if candidate.timeline.least_host_bytes <= candidate.timeline.host_limit_bytes
    ]
    if not fitting:
        least = min(candidate.timeline.least_host_bytes for candidate in every)
        raise HardwareError(
            f"States and activations on the host need {format_bytes(least)} of its memory for each rank, but it has"
            f" {format_bytes(every[0].timeline.host_limit_bytes)} ({problem.hardware.device.name}). Leave"
            f" {' and '.join(problem.job.asked)} to the planner, or use more devices."
        )
    if all(candidate.floor_bytes > UNLIMITED for candidate in fitting):
        raise OSDPError(
            f"Each plan needs more than {format_bytes(UNLIMITED)} per device. The model's description is wrong; make"
            " it again."
        )
    return fitting
