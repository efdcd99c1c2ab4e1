"""Try a plan, correct the estimates by what was seen, plan again, until the plan stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from ..distributed.consensus import broadcast_plan, on_rank_zero
from ..errors import InfeasibleError
from ..measurement.step_meter import Observation
from ..modeling.split_candidates import possible_splits
from ..planner.cost.correction import Correction, correction_of
from ..planner.cost.evaluate import estimate_plan
from ..planner.description import ModelDescription
from ..planner.hardware import Hardware
from ..planner.job import TrainingJob
from ..planner.plan import Plan
from ..planner.problem import PlanningProblem, Strategy
from ..planner.search.search import SearchResult, search
from ..planner.search.split_search import choose_description
from ..planner.split import ModelSplit
from ..quantities import format_bytes

MOST_ROUNDS = 3
_OUT_OF_MEMORY_MARGIN = 0.02
"""How far above the limit a plan is taken to be that ran out of memory; how far it really is nobody saw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a search is given."""

    description: ModelDescription
    hardware: Hardware
    job: TrainingJob
    memory_limit_bytes: int
    strategy: str = "osdp"

    @property
    def question(self) -> PlanningProblem:
        """Return what the planner is asked."""
        return PlanningProblem(
            description=self.description,
            hardware=self.hardware,
            job=self.job,
            memory_limit_bytes=self.memory_limit_bytes,
            strategy=Strategy.parse(self.strategy),
        )

    def solve(self) -> Plan:
        """The fastest plan that fits.

        Raises:
            InfeasibleError: none fits.
        """
        return search(self.question).plan

    def with_best_split(self, model: nn.Module, describe: Callable[[ModelSplit], ModelDescription], *, vocabulary: bool) -> Problem:
        """The problem of the model split as it trains fastest.

        Args:
            model: whole, not sharded.
            describe: from a split to the description of the model that is split so.
            vocabulary: as for `possible_splits`.
        """
        description = choose_description(self.question, lambda: possible_splits(model, self.description, vocabulary=vocabulary), describe)
        return replace(self, description=description)

    def result(self, plan: Plan) -> SearchResult:
        """What the plan is expected to need."""
        estimate = estimate_plan(plan, self.description, self.job, self.hardware)
        assert estimate.time is not None
        return SearchResult(plan=plan, memory=estimate.memory, time=estimate.time)

    def corrected(self, correction: Correction) -> Problem:
        """The same problem by what was seen."""
        return replace(
            self,
            description=correction.of_description(self.description, self.hardware),
            hardware=correction.of_hardware(self.hardware),
            job=correction.of_job(self.job),
        )

    def tensor_bytes(self, plan: Plan) -> int:
        """What the limit leaves for a plan's tensors."""
        return self.hardware.room_bytes(self.memory_limit_bytes) - self.hardware.outside_bytes(plan.communicators)

    def restated(self, plan: Plan) -> Plan:
        """The plan with this problem's estimates of it."""
        needs = self.result(plan)
        return replace(plan, peak_bytes=needs.memory.on(self.hardware), step_s=needs.time.step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One plan that was tried."""

    plan: Plan
    estimated_peak_bytes: int
    """Of tensors, by what was known before the round."""
    estimated_step_s: float
    observed: Observation
    correction: Correction
    """What the observation changed."""
    fits: bool
    """The observed peak, with what no tensor can have, is within the limit less the margin."""

    def peak_on(self, hardware: Hardware) -> int:
        """Observed peak with what no tensor can have."""
        return (self.observed.peak_bytes or 0) + hardware.outside_bytes(self.plan.communicators)


class Recalibration:
    """Rounds so far. It lives on rank 0."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        """With the corrections of all rounds."""
        self.rounds: list[Round] = []

    def record(self, plan: Plan, observed: Observation) -> tuple[Round, Plan, bool]:
        """Learn from a round.

        Returns:
            The round, the plan to go on with, and whether that is the one to run.

        Raises:
            InfeasibleError: no plan fits by what was seen.
        """
        self.rounds.append(self._round(plan, observed))
        self.problem = self.problem.corrected(self.rounds[-1].correction)
        tried = {past.plan.fingerprint for past in self.rounds}
        try:
            following = self.problem.solve()
        except InfeasibleError as error:
            if not any(past.fits for past in self.rounds):
                raise self._infeasible(error.remedies) from error
            following = plan
        if following.fingerprint not in tried and len(self.rounds) < MOST_ROUNDS:
            return self.rounds[-1], following, False
        return self.rounds[-1], self._best(), True

    def _round(self, plan: Plan, observed: Observation) -> Round:
        problem = self.problem
        limit = problem.tensor_bytes(plan)
        estimate = problem.result(plan)
        peak = int(limit * (1 + _OUT_OF_MEMORY_MARGIN)) + 1 if observed.out_of_memory else observed.peak_bytes
        correction = correction_of(
            plan, problem.description, problem.hardware, problem.job,
            peak_bytes=peak, step_s=observed.median_step_s, timings=observed.timings,
        )  # fmt: skip
        return Round(
            plan=plan,
            estimated_peak_bytes=estimate.memory.peak_bytes,
            estimated_step_s=estimate.time.step_s,
            observed=observed,
            correction=correction,
            fits=peak is None or peak <= limit,
        )

    def _best(self) -> Plan:
        """The fastest of those that were tried and fit."""
        fitting = [past for past in self.rounds if past.fits]
        if not fitting:
            raise self._infeasible(())
        best = min(fitting, key=lambda past: past.observed.median_step_s or float("inf"))
        return self.problem.restated(best.plan)

    def _infeasible(self, remedies: tuple[str, ...]) -> InfeasibleError:
        hardware, limit = self.problem.hardware, self.problem.memory_limit_bytes
        seen = "; ".join(
            f"plan {past.plan.fingerprint} needed {_peak_text(past, hardware)}, estimated"
            f" {format_bytes(past.estimated_peak_bytes + hardware.outside_bytes(past.plan.communicators))}"
            for past in self.rounds
        )
        ways = remedies or ("a higher memory_limit", "more devices", "a shorter sequence_length")
        peaks = [past.peak_on(hardware) for past in self.rounds if past.observed.peak_bytes is not None]
        return InfeasibleError(
            f"No plan that was tried fits {format_bytes(limit)} per device: {seen}. Use {'; or '.join(ways)}.",
            memory_limit_bytes=limit,
            least_peak_bytes=max(limit + 1, hardware.limit_for(min(peaks, default=0))),
            remedies=tuple(ways),
        )


def recalibrate(
    plan: Plan, problem: Problem | None, probe: Callable[[Plan], Observation]
) -> tuple[Plan, tuple[Round, ...], Problem | None]:
    """Try the plan and those that follow from what is seen. Collective.

    Args:
        plan: the first, the same on every rank.
        problem: what it was found for; rank 0's counts, other ranks may give None.
        probe: tries a plan; collective, with the same observation on every rank.

    Returns:
        The plan to run, the same on every rank: the fastest of those that were tried and fit; the rounds; and on rank 0 the
        problem with all corrections.

    Raises:
        InfeasibleError: every plan that was tried passed the limit, or none fits by what was seen.
    """
    session: list[Recalibration] = []
    rounds: list[Round] = []
    done = False
    while not done:
        observed = probe(plan)

        def record(plan: Plan = plan, observed: Observation = observed) -> tuple[Round, Plan, bool]:
            if not session:
                assert problem is not None, "rank 0 knows what was searched for"
                session.append(Recalibration(problem))
            return session[0].record(plan, observed)

        past, plan, done = on_rank_zero(record)
        rounds.append(past)
    return broadcast_plan(plan), tuple(rounds), session[0].problem if session else None


def _peak_text(past: Round, hardware: Hardware) -> str:
    return "more memory than there is" if past.observed.peak_bytes is None else format_bytes(past.peak_on(hardware))
