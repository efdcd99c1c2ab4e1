"""Find a run's plan with its blocks in the form that the user asks for: compiled, if that pays within the run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from ..distributed.consensus import on_rank_zero
from ..errors import InfeasibleError
from ..planner.hardware import Backend
from ..planner.search.search import search
from ..quantities import format_seconds
from .find_plan import FoundPlan, find_plan
from .job import Job

_COMPILE_S = {"cuda": 6.0, "cpu": 45.0}
"""Seconds to compile forward and backward of a block class with one kind of recomputation, nothing cached. CUDA: 2 to
3 s for forward of Llama with 1B to 13B parameters (Accelerate's benchmarks/torch.compile), the same assumed for
backward. CPU: measured (docs/compiled.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormGain:
    """Estimated cost and gain of compiled blocks in a run."""

    eager_step_s: float
    """Step time of the best plan with eager blocks."""
    step_s: float
    compile_s: float
    steps: int | None
    """Optimizer steps of the run; None if unknown."""
    taken: bool = True
    """Whether the plan compiles them."""

    @property
    def too_short(self) -> bool:
        """Whether the run has too few steps to make up for the compile time."""
        return self.steps is not None and self.steps * (self.eager_step_s - self.step_s) < self.compile_s

    @property
    def pays(self) -> bool:
        return self.step_s < self.eager_step_s and not self.too_short

    @property
    def line(self) -> str:
        """One line for the user, with advice if the plan compiles without a gain."""
        text = f"By the estimate, compiled blocks make a step {self.eager_step_s / self.step_s:.2f} times as fast as eager blocks"  # noqa: E501
        if self.too_short and self.step_s < self.eager_step_s:
            saved = (self.steps or 0) * (self.eager_step_s - self.step_s)
            text += f", which saves {format_seconds(saved)} in {self.steps:,} steps; compiling takes about {format_seconds(self.compile_s)}"  # noqa: E501
        if self.taken:
            return f"{text}." if self.pays else f"{text}. Leave compilation out."
        return f"{text}. Blocks run eager; compile=True compiles them anyway."


def find_form(model: nn.Module, job: Job) -> tuple[FoundPlan, FormGain | None]:
    """Find the run's plan, and what compiled blocks gain if the user asked about that. Collective; errors are those
    of `find_plan`.
    """
    found, asked = find_plan(model, job), job.config.compile
    eager = job.asking(compile=False)
    if asked == "auto" and isinstance(found.outcome, InfeasibleError):
        return find_plan(model, eager), None
    if not asked or isinstance(found.outcome, InfeasibleError) or not (asked == "auto" or job.config.compare):
        return found, None
    gain = on_rank_zero(lambda: _weighed(found, job.steps))
    if gain is None or gain.pays or asked is True:
        return found, gain
    return find_plan(model, eager), replace(gain, taken=False)


def _weighed(found: FoundPlan, steps: int | None) -> FormGain | None:
    """Compare a plan with compiled blocks with the best plan without; return None if no eager plan fits or can be
    estimated.
    """
    plan, problem = found.plan, found.problem
    if found.eager is None:
        return None
    try:
        eager_step_s = search(replace(problem, description=found.eager)).time.step_s
    except InfeasibleError:
        return None
    pairs = zip(problem.description.units, plan.units, strict=True)
    kinds = {
        (unit.class_name, decision.activations.recomputation)
        for unit, decision in pairs
        if plan.changes(unit.class_name)
    }
    compile_s = len(kinds) * _COMPILE_S["cpu" if problem.hardware.backend is Backend.GLOO else "cuda"]
    assert plan.step_s is not None
    return FormGain(eager_step_s=eager_step_s, step_s=plan.step_s, compile_s=compile_s, steps=steps)
