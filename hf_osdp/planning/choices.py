"""Choices in addition to the layout: whether to compile blocks, and which of the optimizers that the user allows to run."""

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
"""Seconds to compile forward and backward of a block class with one kind of recomputation, nothing cached. CUDA: 2 to 3 s for forward of
Llama with 1B to 13B parameters (Accelerate's benchmarks/torch.compile), the same assumed for backward. CPU: measured (docs/compiled.md)."""
_MIN_SPEEDUP = 1.01
"""How many times as fast a step must be with a later optimizer for it to replace an earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """Estimated cost and gain of compiled blocks in a run."""

    eager_step_s: float
    """Step time of the best plan with eager blocks."""
    step_s: float
    compile_s: float
    steps: int | None
    """Optimizer steps of the run; None if unknown."""

    @property
    def too_short(self) -> bool:
        """Whether the run has too few steps to make up for the compile time."""
        return self.steps is not None and self.steps * (self.eager_step_s - self.step_s) < self.compile_s

    @property
    def pays(self) -> bool:
        return self.step_s < self.eager_step_s and not self.too_short

    def line(self, *, compiles: bool) -> str:
        """Return one line for the user, with advice if the plan compiles without a gain."""
        text = f"By the estimate, compiled blocks make a step {self.eager_step_s / self.step_s:.2f} times as fast as eager blocks"
        if self.too_short and self.step_s < self.eager_step_s:
            saved = (self.steps or 0) * (self.eager_step_s - self.step_s)
            text += f", which saves {format_seconds(saved)} in {self.steps:,} steps; compiling takes about {format_seconds(self.compile_s)}"
        if compiles:
            return f"{text}." if self.pays else f"{text}. Leave compilation out."
        return f"{text}. Blocks run eager; compile=True compiles them anyway."


def weigh(found: FoundPlan, steps: int | None) -> Compilation | None:
    """Compare a plan with compiled blocks with the best plan without; return None if no eager plan fits or can be estimated."""
    plan, problem = found.plan, found.problem
    if found.eager is None:
        return None
    try:
        eager_step_s = search(replace(problem, description=found.eager)).time.step_s
    except InfeasibleError:
        return None
    pairs = zip(problem.description.units, plan.units, strict=True)
    kinds = {(unit.class_name, decision.activations.recomputation) for unit, decision in pairs if unit.class_name in plan.compiled_classes}
    compile_s = len(kinds) * _COMPILE_S["cpu" if problem.hardware.backend is Backend.GLOO else "cuda"]
    assert plan.step_s is not None
    return Compilation(eager_step_s=eager_step_s, step_s=plan.step_s, compile_s=compile_s, steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerChoice:
    """Which of several optimizers runs, and why."""

    name: str
    """A value of `TrainingArguments.optim`."""
    step_s: tuple[tuple[str, float | None], ...]
    """Estimated seconds of a step of each optimizer's best plan, first that of the training arguments; None if no plan fits."""

    @property
    def line(self) -> str:
        """The choice and its reason in one line for the user."""
        others = [f"{name} {'does not fit' if s is None else format_seconds(s)}" for name, s in self.step_s if name != self.name]
        chosen = dict(self.step_s)[self.name]
        assert chosen is not None
        reason = f" ({', '.join(others)})" if others else ", as training began"
        return f"Optimizer: {self.name}, with which a step takes {format_seconds(chosen)} by the estimate{reason}."


def find_plan_and_optimizer(
    model: nn.Module, config: OSDPConfig, facts: RunFacts, *, hardware: Hardware | None = None, trace: Trace = describe
) -> tuple[FoundPlan, OptimizerChoice | None]:
    """Search as `find_plan` does, with each of the allowed optimizers. Collective.

    A later optimizer is chosen only if it is more than 1 % faster than an earlier one. If no plan fits with any optimizer, return the
    outcome of the optimizer that needs least memory.
    """
    if not facts.optimizer_choices:
        return find_plan(model, config, facts, hardware=hardware, trace=trace), None
    found: dict[str, FoundPlan] = {}
    descriptions: dict[tuple[object, ...], ModelDescription] = {}

    def trace_once(model: nn.Module, **options: Any) -> ModelDescription:
        """Describe the same model only once; batches and losses are compared by identity."""
        key = tuple(id(value) if callable(value) else value for value in options.values())
        if key not in descriptions:
            descriptions[key] = trace(model, **options)
        return descriptions[key]

    for name, spec in facts.optimizer_choices:
        found[name] = find_plan(model, config, replace(facts, optimizer=spec), hardware=hardware, trace=trace_once)
        if config.profile is None and hardware is None:  # the machine is measured once for all optimizers
            config = replace(config, hardware=found[name].builder.hardware, nodes=None)
    times = tuple((name, each.outcome.step_s if isinstance(each.outcome, Plan) else None) for name, each in found.items())
    fastest = min((seconds for _, seconds in times if seconds is not None), default=None)
    if fastest is None:
        return min(found.values(), key=lambda each: getattr(each.outcome, "least_peak_bytes", 0)), None
    name = next(name for name, seconds in times if seconds is not None and seconds <= _MIN_SPEEDUP * fastest)
    return found[name], OptimizerChoice(name=name, step_s=times)
