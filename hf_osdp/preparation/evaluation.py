"""Evaluation under a plan's memory limit: what it needs, and how it runs so that it fits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..distributed.consensus import on_rank_zero
from ..errors import DescriptionError, PreflightError
from ..planner.cost.evaluation import EvaluatedModel, EvaluationLoop
from ..planner.cost.phases import Phase
from ..planner.description import ModelDescription
from ..planner.placement import Activations
from ..planner.plan import Plan
from ..quantities import format_bytes
from ..report.plan_file import PlanInputs
from .job import Evaluation, Job

_log = logging.getLogger(__name__)


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
    changes: str = ""
    """How the loop differs from the arguments, for people."""

    def of(self, loop: EvaluationLoop) -> FittedEvaluation:
        """Return the evaluation with this loop, or with one that fits and has equal results; raise PreflightError if
        there is none.
        """
        room, cuts, moves = self.room_bytes, self.asked.against_cuts is None, self.asked.moves and loop.keeps_outputs
        if room is None or self.model.fits(loop, room):
            return replace(self, loop=loop, changes="")
        fitting = self.model.fitting(loop, room, cuts=cuts, moves=moves)
        if fitting is None:
            raise PreflightError(self._refusal(loop, room, cuts=cuts, moves=moves))
        ways = {
            f"batches of {loop.batch_size} run in parts of at most {fitting.micro_batch_size} samples":
                fitting.micro_batch_size < loop.batch_size,
            f"eval_accumulation_steps is {fitting.moved_after}":
                fitting.moved_after != loop.moved_after,
        }  # fmt: skip
        said = " and ".join(way for way, holds in ways.items() if holds)
        return replace(self, loop=fitting, changes=f"; to fit, {said}, with equal results")

    def _refusal(self, loop: EvaluationLoop, room: int, *, cuts: bool, moves: bool) -> str:
        needed, moment = self.model.peak(loop)
        needed_text, room_text = (format_bytes(nbytes + self.outside_bytes) for nbytes in (needed, room))
        size = self.model.largest(loop, room, cuts=cuts, moves=moves)
        earlier = None if moves else self.model.fitting(loop, room, cuts=cuts, moves=loop.keeps_outputs)
        ways = {f"per_device_eval_batch_size={size}": size}
        ways |= {} if earlier is None else {f"eval_accumulation_steps={earlier.moved_after}": 1}
        remedy = " or ".join(way for way, is_open in ways.items() if is_open)
        why = "" if cuts else f" Batches are not cut: {self.asked.against_cuts}."
        return (
            f"Evaluation in batches of {loop.batch_size} needs {needed_text} ({moment}), and the limit leaves"
            f" {room_text}; set {remedy or 'a higher memory_limit: a single sample needs more'}.{why}"
        )

    @property
    def phase(self) -> Phase:
        nbytes, moment = self.model.peak(self.loop)
        return Phase(name="evaluation", peak_bytes=nbytes, moment=moment)

    @property
    def line(self) -> str:
        """What is said of it before a run."""
        nbytes, moment = self.model.peak(self.loop)
        return f"Evaluation: peak {format_bytes(nbytes + self.outside_bytes)} in {moment}{self.changes}."


def fit_rollouts(job: Job, plan: Plan, inputs: PlanInputs) -> tuple[Phase, ...]:
    """Return what a step's generation needs under a plan, if it generates; raise PreflightError if it does not fit."""
    if job.rollouts is None:
        return ()
    made, samples = job.rollouts
    needed, (room, outside) = _evaluated(job, plan, inputs).generating(made, samples), _room(job, plan, inputs)
    if room is not None and needed > room:
        raise PreflightError(
            f"Generating {samples} completions at once needs {format_bytes(needed + outside)}, and the limit leaves"
            f" {format_bytes(room + outside)}; lower steps_per_generation, per_device_train_batch_size or"
            " max_completion_length."
        )
    return (Phase(name="generation", peak_bytes=needed, moment="the last token"),)


def _evaluated(job: Job, plan: Plan, inputs: PlanInputs) -> EvaluatedModel:
    layouts = (replace(layout, activations=Activations.SAVE) for layout in plan.layouts(inputs.description))
    return EvaluatedModel(
        description=inputs.description, layouts=tuple(layouts), world_size=plan.world_size, job=inputs.job,
        trains=job.trains, gathers_in_lists=job.device_type == "cpu",
    )  # fmt: skip


def _room(job: Job, plan: Plan, inputs: PlanInputs) -> tuple[int | None, int]:
    """Return the bytes that the limit leaves for tensors, None without a limit, and those of the device outside."""
    limit, hardware = plan.memory_limit_bytes or job.config.memory_limit_bytes, inputs.hardware
    outside = 0 if hardware is None else hardware.outside_bytes(plan.communicators)
    return limit if hardware is None or limit is None else hardware.room_bytes(limit) - outside, outside


def fit_evaluation(
    job: Job, plan: Plan, inputs: PlanInputs, describe: Callable[[Evaluation], ModelDescription]
) -> FittedEvaluation | None:
    """Return how a run evaluates under a plan; None if it does not, or if its memory cannot be estimated. Collective.

    `describe` describes the model as it evaluates, split and grouped as planned. Raise PreflightError if no loop with
    equal results fits.
    """
    asked = job.evaluation
    if asked is None:
        return None

    def described() -> ModelDescription | None:
        try:
            found = describe(asked)
        except DescriptionError as error:
            _log.warning("The memory of evaluation is not known (%s).", str(error).rstrip("."))
            return None
        units = inputs.description.units
        alike = [unit.fqn for unit in found.units] == [unit.fqn for unit in units]
        return replace(found, units=units) if alike else None

    if (description := on_rank_zero(described)) is None:
        return None
    model = _evaluated(job, plan, replace(inputs, description=description))
    room, outside = _room(job, plan, inputs)
    fitted = FittedEvaluation(asked=asked, model=model, loop=asked.loop, room_bytes=room, outside_bytes=outside)
    return fitted.of(asked.loop)
