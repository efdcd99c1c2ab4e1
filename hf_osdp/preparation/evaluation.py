"""What a run does under a plan beside its steps: evaluation, and generation between them, so that both keep the
limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..distributed.consensus import on_rank_zero
from ..errors import PreflightError
from ..planner.cost.evaluation import EvaluatedModel, EvaluationLoop
from ..planner.cost.phases import Phase
from ..planner.description import ModelDescription
from ..planner.placement import Activations
from ..planner.plan import Plan
from ..quantities import format_bytes
from ..report.plan_file import PlanInputs
from .job import Evaluation, Job


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedEvaluation:
    """An evaluation under a plan, which fits under the limit if there is one."""

    asked: Evaluation
    model: EvaluatedModel
    loop: EvaluationLoop
    """As it runs."""
    room_bytes: int | None
    """For tensors; None without a limit."""
    outside_bytes: int
    """Of the device, outside tensors."""

    def of(self, loop: EvaluationLoop) -> FittedEvaluation:
        """Return the evaluation with this loop, or with one that fits and has equal results; raise PreflightError if
        there is none.
        """
        room, cuts, moves = self.room_bytes, self.asked.against_cuts is None, self.asked.moves and loop.keeps_outputs
        if room is not None and not self.model.fits(loop, room):
            fitting = self.model.fitting(loop, room, cuts=cuts, moves=moves)
            if fitting is None:
                raise PreflightError(self._refusal(loop, room, cuts=cuts, moves=moves))
            loop = fitting
        return replace(self, loop=loop)

    def _refusal(self, loop: EvaluationLoop, room: int, *, cuts: bool, moves: bool) -> str:
        needed, moment = self.model.peak(loop)
        needed_text, room_text = (format_bytes(nbytes + self.outside_bytes) for nbytes in (needed, room))
        size = self.model.largest(loop, room, cuts=cuts, moves=moves)
        earlier = None if moves else self.model.fitting(loop, room, cuts=cuts, moves=loop.keeps_outputs)
        ways = [f"per_device_eval_batch_size={size}"] if size else []
        if earlier is not None:
            ways.append(f"eval_accumulation_steps={earlier.moved_after}")
        why = "" if cuts else f" Batches are not cut: {self.asked.against_cuts}."
        return (
            f"Evaluation in batches of {loop.batch_size} needs {needed_text} ({moment}), and the limit leaves"
            f" {room_text}; set {' or '.join(ways) or 'a higher memory_limit: a single sample needs more'}.{why}"
        )

    @property
    def phase(self) -> Phase:
        nbytes, moment = self.model.peak(self.loop)
        return Phase(name="evaluation", peak_bytes=nbytes, moment=moment)

    @property
    def line(self) -> str:
        """What is said before a run of the evaluation that its arguments ask for."""
        loop, phase = self.loop, self.phase
        ways = {
            f"batches of {loop.batch_size} run in parts of at most {loop.micro_batch_size} samples":
                loop.micro_batch_size < loop.batch_size,
            f"eval_accumulation_steps is {loop.moved_after}": loop.moved_after != self.asked.loop.moved_after,
        }  # fmt: skip
        said = " and ".join(way for way, holds in ways.items() if holds)
        changes = f"; to fit, {said}, with equal results" if said else ""
        return f"Evaluation: peak {format_bytes(phase.peak_bytes + self.outside_bytes)} in {phase.moment}{changes}."


def fit_rollouts(job: Job, plan: Plan, inputs: PlanInputs) -> tuple[Phase, ...]:
    """Return what a step's generation needs under a plan, if it generates; raise PreflightError if it does not fit."""
    if job.rollouts is None:
        return ()
    made, samples = job.rollouts
    needed = _evaluated(job, plan, inputs, inputs.description).generating(made, samples)
    room = inputs.room_bytes(plan, job.config.memory_limit_bytes)
    if room is not None and needed > room:
        needed_text, room_text = (format_bytes(nbytes + inputs.outside_bytes(plan)) for nbytes in (needed, room))
        raise PreflightError(
            f"Generating {samples} completions at once needs {needed_text}, and the limit leaves {room_text}; lower"
            " steps_per_generation, per_device_train_batch_size or max_completion_length."
        )
    return (Phase(name="generation", peak_bytes=needed, moment="the last token"),)


def fit_evaluation(
    job: Job, plan: Plan, inputs: PlanInputs, described: Callable[[Evaluation], ModelDescription | None]
) -> FittedEvaluation | None:
    """Return how a run evaluates under a plan; None if it does not, or if its memory is not known; raise
    PreflightError if no loop with equal results fits. `described` describes the model as it evaluates, on rank 0.
    Collective.
    """
    if (asked := job.evaluation) is None:
        return None
    if (description := on_rank_zero(lambda: described(asked))) is None:
        return None
    fitted = FittedEvaluation(
        asked=asked, model=_evaluated(job, plan, inputs, description), loop=asked.loop,
        room_bytes=inputs.room_bytes(plan, job.config.memory_limit_bytes), outside_bytes=inputs.outside_bytes(plan),
    )  # fmt: skip
    return fitted.of(asked.loop)


def _evaluated(job: Job, plan: Plan, inputs: PlanInputs, description: ModelDescription) -> EvaluatedModel:
    return EvaluatedModel(
        description=description, world_size=plan.world_size, job=inputs.job, trains=job.trains,
        layouts=tuple(replace(one, activations=Activations.SAVE) for one in plan.layouts(description)),
        gathers_in_lists=job.device_type == "cpu",
    )  # fmt: skip
