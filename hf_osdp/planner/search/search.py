"""Find the fastest plan that fits: build the stations, solve, decode."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ...errors import HardwareError, InfeasibleError, OSDPError
from ...quantities import format_bytes
from ..cost.evaluate import capacity_needed, is_replayed
from ..cost.memory import MemoryEstimate, estimate_memory
from ..cost.timing import TimeEstimate, estimate_time
from ..decision import Batch, UnitLayout
from ..description import GatherSpan, ModelDescription
from ..hardware import Hardware
from ..job import TrainingJob
from ..plan import Plan
from ..problem import PlanningProblem, Strategy
from .bounds import frugal_choices, in_order, peak_floor
from .remedies import remedies_for
from .reserved import within_reserved
from .solver import Solution, any_within, fastest, least_peak
from .stages import Line
from .strategies import batches, search_spaces
from .timeline import build_line


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """A plan with what it is expected to need."""

    plan: Plan
    memory: MemoryEstimate
    time: TimeEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyResult:
    """What one strategy can do at its own best batch, or why it cannot run."""

    strategy: Strategy
    result: SearchResult | None
    reason: str = ""
    least_peak_bytes: int | None = None
    """Where nothing fits: the tightest limit that it would meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """One batch in one space: an integer program, with the time and the peak that no plan of it can beat."""

    batch: Batch
    line: Line
    bound_s: float
    floor_bytes: int


_UNLIMITED = 2**60
_NEAR = 1.02
"""Times the first plan's step: closer to it, single strategies are not asked."""


def search(problem: PlanningProblem) -> SearchResult:
    """Return the plan with the most samples a second whose peak stays within the limit less the margin, proven for the cost model.

    The global batch is fixed, so that most samples a second is least time a step. On CUDA the plan also has to run as torch's caching
    allocator serves it (`within_reserved`), where the description has traces.

    Args:
        problem: the model at one sequence length, devices, job, limit and strategy.

    Returns:
        The plan with memory and time estimates.

    Raises:
        InfeasibleError: no plan fits; it gives the tightest limit that could be met and what would help.
        ValueError: a global batch that the world size does not divide.
    """
    problem = replace(problem, job=replace(problem.job, precision=problem.job.precision.on(problem.hardware.world_size)))
    description, hardware, job = problem.description, problem.hardware, problem.job
    found = _found(description, hardware, job, problem.memory_limit_bytes, problem.strategy)
    if found is None:
        raise _infeasible(problem)
    return found


def _found(description, hardware, job, memory_limit_bytes: int, strategy: Strategy) -> SearchResult | None:
    """The best plan, as the allocator serves it where it can be replayed; None where none fits.

    Where the allocator does not serve the first plan, another is found by what that one missed; single strategies may miss less.
    """
    first, found = _served(description, hardware, job, memory_limit_bytes, strategy)
    if strategy is not Strategy.OSDP or first is None or (found is not None and found.time.step_s <= _NEAR * first.time.step_s):
        return found  # no other plan is quicker than the first
    served = [] if found is None else [found]
    for single in (one for one in Strategy if one is not Strategy.OSDP):
        with suppress(ValueError):  # no group size between 1 and all
            if (other := _served(description, hardware, job, memory_limit_bytes, single)[1]) is not None:
                served.append(replace(other, plan=replace(other.plan, strategy=strategy.value, proven_optimal=False)))
    return min(served, key=lambda result: result.time.step_s, default=None)


def _served(description, hardware, job, memory_limit_bytes: int, strategy: Strategy) -> tuple[SearchResult | None, SearchResult | None]:
    """The best plan of one strategy by its estimate, and the best that the allocator serves, where it can be replayed."""

    def find(job: TrainingJob) -> SearchResult | None:
        candidates = _sorted_candidates(description, hardware, job, strategy)
        return _fastest(description, hardware, job, memory_limit_bytes, strategy, candidates)

    def least() -> SearchResult | None:
        found = _least(description, hardware, job, strategy)
        return found if found.memory.on(hardware) <= hardware.room_bytes(memory_limit_bytes) else None

    first = find(job)
    if first is None or not is_replayed(description, hardware):
        return first, first
    return first, within_reserved(first, find, least, description, hardware, job, memory_limit_bytes)


def search_or_floor(problem: PlanningProblem) -> SearchResult | int:
    """Return what `search` finds, or where nothing fits a bound below every plan's peak, in bytes; it takes less time than the error."""
    description, hardware, job = problem.description, problem.hardware, problem.job
    found = _found(description, hardware, job, problem.memory_limit_bytes, problem.strategy)
    if found is not None:
        return found
    candidates = _candidates(description, hardware, job, problem.strategy)
    return hardware.limit_for(min(c.floor_bytes for c in candidates) + hardware.unavoidable_bytes)


def _sorted_candidates(description, hardware, job, strategy: Strategy) -> list[_Candidate]:
    """Those that may be fastest come first."""
    _check_uses(description)
    return sorted(_candidates(description, hardware, job, strategy), key=lambda c: c.bound_s)


def _fastest(
    description, hardware, job, memory_limit_bytes: int, strategy: Strategy, candidates: Sequence[_Candidate]
) -> SearchResult | None:
    """The best plan of all candidates; None where none fits."""
    limit = hardware.tensor_bytes(memory_limit_bytes)
    best: tuple[_Candidate, Solution] | None = None
    best_s, proven = float("inf"), True
    for candidate in candidates:
        if candidate.bound_s >= best_s:
            break  # bounds only rise from here
        if candidate.floor_bytes > limit:
            continue
        cutoff = None if best is None else best_s
        solution = _free_choice(description, hardware, job, candidate, limit) or fastest(candidate.line, job, limit, cutoff_s=cutoff)
        if solution is None:
            continue
        proven = proven and solution.proven
        if solution.objective < best_s:
            best, best_s = (candidate, solution), solution.objective
    if best is None:
        return None
    candidate, solution = best
    return _decode(description, hardware, job, memory_limit_bytes, strategy, candidate.batch, solution.choices, proven)


def fastest_without_limit(problem: PlanningProblem) -> float:
    """Return the seconds of a step that no plan of the strategy goes below under any memory limit."""
    return min(c.bound_s for c in _candidates(problem.description, problem.hardware, problem.job, problem.strategy))


def least_memory(problem: PlanningProblem) -> int:
    """Return the tightest limit that some plan of the strategy meets, in bytes of one rank, with what the device reserves and the margin.

    The problem's own limit has no part in it.

    Raises:
        ValueError: a global batch that the world size does not divide.
    """
    description, hardware, job = problem.description, problem.hardware, problem.job
    least = _least(description, hardware, job, problem.strategy)
    return hardware.limit_for(_needed(least, description, hardware, job))


def compare_strategies(problem: PlanningProblem, *, split: ModelDescription | None = None) -> tuple[StrategyResult, ...]:
    """Compare all strategies, each at its own best batch under the same limit, OSDP first; `split` is the model as OSDP has it split.

    Returns:
        One row a strategy; a strategy that cannot run here has a reason instead of a result. Two stages have a row where
        there are several nodes of several devices.
    """
    rows = []
    several = 1 < problem.hardware.devices_per_node < problem.hardware.world_size
    for strategy in (one for one in Strategy if several or one is not Strategy.TWO_STAGE):
        try:
            model = split if split is not None and strategy is Strategy.OSDP else problem.description
            rows.append(StrategyResult(strategy=strategy, result=search(replace(problem, description=model, strategy=strategy))))
        except InfeasibleError as error:
            reason = f"needs {format_bytes(error.least_peak_bytes)}"
            rows.append(StrategyResult(strategy=strategy, result=None, reason=reason, least_peak_bytes=error.least_peak_bytes))
        except ValueError:
            if strategy is not Strategy.HSDP:
                raise
            rows.append(StrategyResult(strategy=strategy, result=None, reason="no group size between 1 and all"))
    return tuple(rows)


def _candidates(description: ModelDescription, hardware: Hardware, job: TrainingJob, strategy: Strategy) -> list[_Candidate]:
    """Every batch in every space, but for those of which each plan has more on the host than fits there, or than there is anywhere.

    Raises:
        HardwareError: on the host that is so of all.
        OSDPError: it is so of all on a device.
    """
    lines = [
        (batch, build_line(description, hardware, job, batch, space))
        for batch in batches(job, hardware.world_size)
        for space in search_spaces(strategy, description, hardware, job, batch)
    ]
    fitting = [(batch, line) for batch, line in lines if line.least_host_bytes <= line.host_limit_bytes]
    if not fitting:
        least = min(line.least_host_bytes for _, line in lines)
        raise HardwareError(
            f"What is to lie on the host takes {format_bytes(least)} of its memory for each rank, but there is"
            f" {format_bytes(hardware.host.memory_bytes)} ({hardware.device.name}); leave host_offload and offload_activations open, or"
            " use more devices."
        )
    candidates = []
    for batch, line in fitting:
        quickest = sum(len(g.units) * min(o.seconds for o in g.options) for g in line.groups)
        floor = peak_floor(description, line, job, batch)
        candidates.append(_Candidate(batch=batch, line=line, bound_s=quickest, floor_bytes=floor))
    if not (possible := [candidate for candidate in candidates if candidate.floor_bytes <= _UNLIMITED]):
        raise OSDPError(f"At every batch a device would need more than {format_bytes(_UNLIMITED)}; no model does. Describe it again.")
    return possible


def _free_choice(description, hardware, job, candidate: _Candidate, limit: int) -> Solution | None:
    """Each unit's quickest option, where all of them fit together: then there is nothing to solve."""
    choices: dict[int, UnitLayout] = {}
    for group in candidate.line.groups:
        quickest = min(group.options, key=lambda o: (o.seconds, o.bytes.held + o.left_by_forward + o.left_by_backward))
        choices |= {unit: quickest.choice for unit in group.units}
    memory = estimate_memory(description, in_order(choices), hardware.world_size, job, candidate.batch)
    if memory.on(hardware) - hardware.unavoidable_bytes > limit or not candidate.line.fits_host(choices):
        return None
    return Solution(choices=choices, objective=candidate.bound_s, proven=True)


def _decode(
    description, hardware, job, memory_limit_bytes: int | None, strategy, batch: Batch, chosen: dict[int, UnitLayout], proven: bool
) -> SearchResult:
    choices = in_order(chosen)
    memory = estimate_memory(description, choices, hardware.world_size, job, batch)
    time = estimate_time(description, choices, hardware, job, batch)
    fits = memory_limit_bytes is None or memory.on(hardware) <= hardware.room_bytes(memory_limit_bytes)
    assert fits, "the solver's moments are those of the walk"
    plan = Plan.of(
        description,
        choices,
        batch,
        world_size=hardware.world_size,
        strategy=strategy.value,
        memory_limit_bytes=memory_limit_bytes,
        peak_bytes=memory.on(hardware),
        step_s=time.step_s,
        proven_optimal=proven,
        hardware=hardware.summary,
        devices_per_node=hardware.devices_per_node,
    )
    return SearchResult(plan=plan, memory=memory, time=time)


def _check_uses(description: ModelDescription) -> None:
    """A unit that is freed after use may run once a micro-step, or have span CALLS: each gather has its cost."""
    seen = set()
    for segment in description.segments:
        unit = description.units[segment.unit]
        if unit.span is GatherSpan.USE and segment.unit in seen:
            raise OSDPError(f"Unit {unit.label!r} runs more than once a forward pass; describe it with span STEP or CALLS.")
        seen.add(segment.unit)


def _infeasible(problem: PlanningProblem) -> InfeasibleError:
    """Name the tightest limit that could be met, what fills it, and the cheapest ways out."""
    description, hardware, job = problem.description, problem.hardware, problem.job
    limit, strategy = problem.memory_limit_bytes, problem.strategy
    least = _least(description, hardware, job, strategy)
    memory, samples = least.memory, least.plan.micro_batch_size
    needed, room = _needed(least, description, hardware, job), hardware.room_bytes(limit)
    gaps = needed - memory.on(hardware)
    peak = memory.peak
    kinds = [(getattr(peak.breakdown, name), name) for name in peak.breakdown.__slots__]
    outside = [*((nbytes, name) for name, nbytes in memory.outside(hardware).items()), (gaps, "gaps of torch's allocator")]
    parts = sorted([*kinds, *outside], reverse=True)
    largest = ", ".join(f"{name} {format_bytes(nbytes)}" for nbytes, name in parts[:2])
    ways = remedies_for(problem, limit_bytes=limit - gaps, needed_bytes=needed)
    margin = f", of which a margin of {format_bytes(limit - room)} stays free" if limit > room else ""
    message = (
        f"No plan fits {format_bytes(limit)} per device{margin}: the least that {strategy.value} needs on {hardware.world_size}"
        f" device{'s' if hardware.world_size > 1 else ''} is {format_bytes(needed)}{_difference(needed, room)}, at micro-batch size"
        f" {samples} in {peak.phase} of {peak.unit} ({largest}). Use {'; or '.join(ways)}."
    )
    return InfeasibleError(message, memory_limit_bytes=limit, least_peak_bytes=hardware.limit_for(needed), remedies=tuple(ways))


def _difference(needed: int, room: int) -> str:
    """Bytes that are missing, where both figures read the same."""
    missing = needed - room
    return f" ({missing:,} byte{'s' if missing > 1 else ''} more)" if format_bytes(needed) == format_bytes(room) else ""


def _needed(least: SearchResult, description, hardware, job) -> int:
    """What a plan needs of a device: as the allocator serves it, where that can be replayed, with all that no tensor can have."""
    if not is_replayed(description, hardware):
        return least.memory.on(hardware)
    outside = hardware.outside_bytes(least.plan.communicators) + min(0, job.correction_bytes)
    return max(least.memory.on(hardware), capacity_needed(least.plan, description, job) + outside)


def _least(description, hardware, job, strategy: Strategy) -> SearchResult:
    """The plan that needs least memory by its estimate, communicators included."""
    needed, found, batch = None, None, None
    for candidate in sorted(_sorted_candidates(description, hardware, job, strategy), key=lambda c: c.floor_bytes):
        if needed is not None and (candidate.floor_bytes >= needed or any_within(candidate.line, job, needed - 1) is None):
            continue
        found, needed = _tightest(description, hardware, job, candidate)
        batch = candidate.batch
    return _decode(description, hardware, job, None, strategy, batch, found, proven=False)


def _tightest(description, hardware, job, candidate: _Candidate) -> tuple[dict[int, UnitLayout], int]:
    def needed_by(choices: dict[int, UnitLayout]) -> int:
        memory = estimate_memory(description, in_order(choices), hardware.world_size, job, candidate.batch)
        return memory.on(hardware) - hardware.unavoidable_bytes

    start = frugal_choices(candidate.line)
    if not candidate.line.fits_host(start):
        start = any_within(candidate.line, job, _UNLIMITED)
    return least_peak(candidate.line, job, start, candidate.floor_bytes, needed_by)
