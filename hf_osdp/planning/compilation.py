"""Whether compiled blocks pay within a run, by the estimate."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import InfeasibleError
from ..planner.hardware import Backend
from ..planner.search.search import search
from ..quantities import format_seconds
from .problem import FoundPlan

_COMPILE_S = {"cuda": 6.0, "cpu": 45.0}
"""Of one kind of block in one way, forward and backward, nothing cached. CUDA: Accelerate's benchmarks/torch.compile takes 2 to 3 s for
forward, of Llama with 1B to 13B parameters; backward is taken to need as much. CPU: measured (docs/compiled.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """What compiled blocks cost and gain in a run, by the estimate."""

    eager_step_s: float
    """Of the best plan whose blocks run as they are."""
    step_s: float
    compile_s: float
    steps: int | None
    """Optimizer steps of the run, where they are known."""

    @property
    def too_short(self) -> bool:
        """The run has too few steps to win back the seconds of compiling."""
        return self.steps is not None and self.steps * (self.eager_step_s - self.step_s) < self.compile_s

    @property
    def pays(self) -> bool:
        return self.step_s < self.eager_step_s and not self.too_short

    def line(self, *, compiles: bool) -> str:
        """Return one line for the user, with advice where the plan does what does not pay."""
        said = f"By the estimate, compiled blocks make a step {self.eager_step_s / self.step_s:.2f} times as fast as blocks as they are"
        if self.too_short and self.step_s < self.eager_step_s:
            saved = (self.steps or 0) * (self.eager_step_s - self.step_s)
            said += f", which saves {format_seconds(saved)} in {self.steps:,} steps; compiling takes about {format_seconds(self.compile_s)}"
        if compiles:
            return f"{said}." if self.pays else f"{said}. Leave compilation out."
        return f"{said}. Blocks run as they are; compile=True compiles them all the same."


def weigh(found: FoundPlan, steps: int | None) -> Compilation | None:
    """Weigh a plan with compiled blocks against the best one without them; None where nothing fits without, or it cannot be told."""
    plan, problem = found.plan, found.problem
    if found.eager is None:
        return None
    try:
        eager_step_s = search(replace(problem, description=found.eager)).time.step_s
    except InfeasibleError:
        return None
    pairs = zip(problem.description.units, plan.units, strict=True)
    kinds = {(unit.class_name, one.activations.recomputation) for unit, one in pairs if unit.class_name in plan.compiled_classes}
    compile_s = len(kinds) * _COMPILE_S["cpu" if problem.hardware.backend is Backend.GLOO else "cuda"]
    assert plan.step_s is not None
    return Compilation(eager_step_s=eager_step_s, step_s=plan.step_s, compile_s=compile_s, steps=steps)
