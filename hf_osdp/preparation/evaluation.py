"""Evaluation under a plan's memory limit: what it needs, and how it runs so that it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from ..errors import PreflightError
from ..planner.cost.evaluation import EvaluatedModel, EvaluationLoop
from ..planner.description import ModelDescription
from ..planner.placement import Activations
from ..planner.plan import Plan
from ..quantities import format_bytes
from ..report.plan_file import PlanInputs

if TYPE_CHECKING:
    from ..modeling.batch import Inputs, Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A run's evaluation as its arguments have it."""

    loop: EvaluationLoop
    inputs: Inputs
    """Returns a batch of the longest samples."""
    sequence_length: int
    outputs: Loss
    """Computes the loss of a batch, and the outputs that the loop keeps."""
    against_cuts: str | None = None
    """Why a batch cannot be cut into parts with equal results; None if it can."""
    averages: bool = False
    """Losses are means over samples; else they add up."""
    moves: bool = False
    """It is not the user who says when outputs go to the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedEvaluation:
    """An evaluation that fits under the limit, if there is one."""

    model: EvaluatedModel
    loop: EvaluationLoop
    room_bytes: int | None
    """For tensors; None without a limit."""
    outside_bytes: int
    """Of the device, outside tensors."""
    against_cuts: str | None
    averages: bool
    moves: bool
    changes: str = ""
    """How the loop differs from the arguments, for people."""

    def of(self, loop: EvaluationLoop) -> FittedEvaluation:
        """Return the evaluation with this loop, or with one that fits and has equal results; raise PreflightError if
        there is none.
        """
        cuts, moves, room = self.against_cuts is None, self.moves and loop.keeps_outputs, self.room_bytes
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
        why = f" Batches are not cut: {self.against_cuts}." if self.against_cuts else ""
        return (
            f"Evaluation in batches of {loop.batch_size} needs {needed_text} ({moment}), and the limit leaves"
            f" {room_text}; set {remedy or 'a higher memory_limit: a single sample needs more'}.{why}"
        )

    @property
    def content(self) -> dict[str, object]:
        """Peak and loop, for a report."""
        nbytes, moment = self.model.peak(self.loop)
        return {"peak_bytes": nbytes + self.outside_bytes, "moment": moment, **asdict(self.loop)}

    @property
    def line(self) -> str:
        """What is said of it before a run."""
        nbytes, moment = self.model.peak(self.loop)
        return f"Evaluation: peak {format_bytes(nbytes + self.outside_bytes)} in {moment}{self.changes}."


def fit_evaluation(
    evaluation: Evaluation, plan: Plan, inputs: PlanInputs, describe: Callable[[], ModelDescription],
    *, memory_limit_bytes: int | None, trains: bool, device_type: str,
) -> FittedEvaluation | None:  # fmt: skip
    """Return how an evaluation runs under a plan; None if the units run in another order than in training.

    Args:
        evaluation: as the arguments have it.
        plan: the run's plan.
        inputs: those of the plan.
        describe: describes the model without gradients, on the evaluation's batches, split and grouped as planned.
        memory_limit_bytes: the user's; the plan's comes first.
        trains: whether there are optimizer states.
        device_type: `cpu` or `cuda`.

    Raises:
        PreflightError: no loop with equal results fits.
    """
    found, hardware = describe(), inputs.hardware
    if [unit.fqn for unit in found.units] != [unit.fqn for unit in inputs.description.units]:
        return None
    description = replace(found, units=inputs.description.units)
    limit = plan.memory_limit_bytes or memory_limit_bytes
    outside = 0 if hardware is None else hardware.outside_bytes(plan.communicators)
    room = limit if hardware is None or limit is None else hardware.room_bytes(limit) - outside
    layouts = plan.layouts(inputs.description)
    model = EvaluatedModel(
        description=description, layouts=tuple(replace(one, activations=Activations.SAVE) for one in layouts),
        world_size=plan.world_size, job=inputs.job, trains=trains, gathers_in_lists=device_type == "cpu",
    )  # fmt: skip
    fitted = FittedEvaluation(
        model=model, loop=evaluation.loop, room_bytes=room, outside_bytes=outside,
        against_cuts=evaluation.against_cuts, averages=evaluation.averages, moves=evaluation.moves,
    )  # fmt: skip
    return fitted.of(evaluation.loop)
