"""Choose among the optimizers that the user allows: each gets its own best plan, and the fastest of these runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..planner.description import ModelDescription
from ..planner.hardware import Hardware
from ..planner.plan import Plan
from ..quantities import format_seconds
from ..tracing.describe import describe
from .config import OSDPConfig
from .facts import RunFacts
from .problem import FoundPlan, Trace, find_plan

_WORTH_CHANGING = 1.01
"""How many times as fast a step must be for another optimizer than one that is named before it."""


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
