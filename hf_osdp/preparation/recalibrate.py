"""Try a plan, correct the estimates by the observations, and plan again, until the plan no longer changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..distributed.consensus import on_rank_zero
from ..errors import InfeasibleError, Remedy
from ..measurement.step_meter import Observation
from ..planner.cost.correction import Correction, correction_of
from ..planner.cost.evaluate import estimate_plan
from ..planner.hardware import Hardware
from ..planner.plan import Plan
from ..planner.problem import PlanningProblem
from ..planner.search.search import SearchResult, search
from ..quantities import format_bytes

MOST_ROUNDS = 3
_OUT_OF_MEMORY_MARGIN = 0.02
"""Share above the limit that a plan is assumed to need if it ran out of memory; its real peak is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One plan that was tried."""

    plan: Plan
    estimated_peak_bytes: int
    """Estimated peak of tensors before the round's correction."""
    estimated_step_s: float
    observed: Observation
    correction: Correction
    """Correction of the estimates that follows from the observation."""
    fits: bool
    """The observed peak, with the memory outside of tensors, is within the limit less the margin."""

    def peak_on(self, hardware: Hardware) -> int:
        """Return the observed peak with the memory outside of tensors."""
        return (self.observed.peak_bytes or 0) + hardware.outside_bytes(self.plan.communicators)


def estimated(problem: PlanningProblem, plan: Plan) -> SearchResult:
    """Return a plan of the problem with its estimates."""
    estimate = estimate_plan(plan, problem.description, problem.job, problem.hardware)
    assert estimate.time is not None
    return SearchResult(plan=plan, memory=estimate.memory, time=estimate.time)


def recalibrate(
    plan: Plan, problem: PlanningProblem, probe: Callable[[Plan], Observation]
) -> tuple[Plan, tuple[Round, ...], PlanningProblem]:
    """Try the problem's plan, and then the plans of the corrected problems, by `probe`. Collective.

    Return the fastest plan of those that were tried and fit, the same on every rank; the rounds; the problem, on rank
    0 with all corrections. Raise InfeasibleError if every plan that was tried exceeded the limit, or no plan fits the
    corrected estimates.
    """
    rounds: list[Round] = []
    done = False
    while not done:
        observed = probe(plan)

        def learn(plan: Plan = plan, observed: Observation = observed) -> tuple[Round, Plan, bool]:
            nonlocal problem
            past = _round(problem, plan, observed)
            problem = replace(
                problem,
                description=past.correction.of_description(problem.description, problem.hardware),
                hardware=past.correction.of_hardware(problem.hardware),
                job=past.correction.of_job(problem.job),
            )
            return past, *_next(problem, [*rounds, past])

        past, plan, done = on_rank_zero(learn)
        rounds.append(past)
    return plan, tuple(rounds), problem


def _round(problem: PlanningProblem, plan: Plan, observed: Observation) -> Round:
    """Compare an observation with the estimate."""
    limit = problem.room_bytes - problem.hardware.outside_bytes(plan.communicators)
    estimate = estimated(problem, plan)
    peak = int(limit * (1 + _OUT_OF_MEMORY_MARGIN)) + 1 if observed.out_of_memory else observed.peak_bytes
    return Round(
        plan=plan,
        estimated_peak_bytes=estimate.memory.peak_bytes,
        estimated_step_s=estimate.time.step_s,
        observed=observed,
        correction=correction_of(
            plan, problem.description, problem.hardware, problem.job,
            peak_bytes=peak, step_s=observed.median_step_s, timings=observed.timings,
        ),
        fits=peak is None or peak <= limit,
    )  # fmt: skip


def _next(problem: PlanningProblem, rounds: list[Round]) -> tuple[Plan, bool]:
    """Return the next plan to try and False, or the fastest tried plan that fits and True.

    Only the plan of the last search has something proven about it: corrected estimates void what was proven before.
    """
    fitting = [past for past in rounds if past.fits]
    following: Plan | None = None
    remedies: tuple[Remedy, ...] = ()
    try:
        following = search(problem).plan
        if following.fingerprint not in {past.plan.fingerprint for past in rounds} and len(rounds) < MOST_ROUNDS:
            return following, False
    except InfeasibleError as error:
        remedies = error.remedies
    if not fitting:
        raise _infeasible(problem, rounds, remedies)
    best = min(fitting, key=lambda past: past.observed.median_step_s or float("inf")).plan
    if following is not None and following.fingerprint == best.fingerprint:
        return following, True
    now = estimated(problem, best)
    return replace(
        best, peak_bytes=now.memory.on(problem.hardware), step_s=now.time.step_s,
        proven_optimal=False, gap=None, simplified="", proven_simplest=None,
    ), True  # fmt: skip


def _infeasible(problem: PlanningProblem, rounds: list[Round], remedies: tuple[Remedy, ...]) -> InfeasibleError:
    hardware, limit, tried = problem.hardware, problem.memory_limit_bytes, []
    for past in rounds:
        needed = (
            "more memory than is available"
            if past.observed.peak_bytes is None
            else format_bytes(past.peak_on(hardware))
        )
        estimate = format_bytes(past.estimated_peak_bytes + hardware.outside_bytes(past.plan.communicators))
        tried.append(f"plan {past.plan.fingerprint} needed {needed}, estimated {estimate}")
    peaks = (past.peak_on(hardware) for past in rounds if past.observed.peak_bytes is not None)
    ways = remedies or tuple(map(Remedy, ("a higher memory_limit", "more devices", "a shorter sequence_length")))
    return InfeasibleError(
        f"No plan that was tried fits {format_bytes(limit)} per device: {'; '.join(tried)}.",
        memory_limit_bytes=limit,
        least_peak_bytes=max(limit + 1, hardware.limit_for(min(peaks, default=0))),
        remedies=ways,
    )
