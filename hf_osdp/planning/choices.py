"""What is chosen beside the layout: compiled blocks where they pay, and the fastest of the optimizers that the user allows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..errors import InfeasibleError
from ..planner.description import ModelDescription
from ..planner.hardware import Backend, Hardware
from ..planner.plan import Plan
from ..planner.search.search import search
from ..quantities import format_seconds
from ..tracing.describe import describe
from .config import OSDPConfig
from .facts import RunFacts
from .problem import FoundPlan, Trace, find_plan

_COMPILE_S = {"cuda": 6.0, "cpu": 45.0}
"""Of one kind of block in one way, forward and backward, nothing cached. CUDA: Accelerate's benchmarks/torch.compile takes 2 to 3 s for
forward, of Llama with 1B to 13B parameters; backward is taken to need as much. CPU: measured (docs/compiled.md)."""
_WORTH_CHANGING = 1.01
"""How many times as fast a step must be for another optimizer than one that is named before it."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerChoice:
    """Which of several optimizers runs, and why."""

    name: str
    """As `TrainingArguments.optim` has it."""
    step_s: tuple[tuple[str, float | None], ...]
    """Of each name, first what the arguments have, the seconds of a step by the estimate of its best plan; None where nothing fits."""

    @property
    def line(self) -> str:
        """The choice with its reason, as it is printed."""
        others = [f"{name} {'does not fit' if s is None else format_seconds(s)}" for name, s in self.step_s if name != self.name]
        chosen = dict(self.step_s)[self.name]
        assert chosen is not None
        beside = f" ({', '.join(others)})" if others else ", as training began"
        return f"Optimizer: {self.name}, with which a step takes {format_seconds(chosen)} by the estimate{beside}."


def find_plan_and_optimizer(
    model: nn.Module, config: OSDPConfig, facts: RunFacts, *, hardware: Hardware | None = None, trace: Trace = describe
) -> tuple[FoundPlan, OptimizerChoice | None]:
    """Search as `find_plan`, where several optimizers are allowed with each. Collective.

    The earlier of two is taken where the later is not faster by more than 1 %. Where nothing fits with any, the outcome is that of the
    optimizer that needs least.
    """
    if not facts.optimizer_choices:
        return find_plan(model, config, facts, hardware=hardware, trace=trace), None
    found: dict[str, FoundPlan] = {}
    descriptions: dict[tuple[object, ...], ModelDescription] = {}

    def once(model: nn.Module, **options: Any) -> ModelDescription:
        """Describe the same model only once; batches and losses are told apart as objects."""
        key = tuple(id(value) if callable(value) else value for value in options.values())
        if key not in descriptions:
            descriptions[key] = trace(model, **options)
        return descriptions[key]

    for name, spec in facts.optimizer_choices:
        found[name] = find_plan(model, config, replace(facts, optimizer=spec), hardware=hardware, trace=once)
        if config.profile is None and hardware is None:  # one machine for all, measured once
            config = replace(config, hardware=found[name].builder.hardware, nodes=None)
    times = tuple((name, one.outcome.step_s if isinstance(one.outcome, Plan) else None) for name, one in found.items())
    fastest = min((seconds for _, seconds in times if seconds is not None), default=None)
    if fastest is None:
        return min(found.values(), key=lambda one: getattr(one.outcome, "least_peak_bytes", 0)), None
    name = next(name for name, seconds in times if seconds is not None and seconds <= _WORTH_CHANGING * fastest)
    return found[name], OptimizerChoice(name=name, step_s=times)
