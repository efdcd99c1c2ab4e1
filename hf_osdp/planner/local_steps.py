"""Settings of local steps between machines (DiLoCo, arXiv 2311.08105)."""

from __future__ import annotations

from dataclasses import dataclass

from .wire import WireFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSteps:
    """Machines train independently and synchronise every `steps` optimizer steps. This algorithm differs from data parallel training."""

    steps: int
    machines: int
    outer_learning_rate: float = 0.7
    """Learning rate of the outer step: SGD with Nesterov momentum on the mean difference of parameters."""
    outer_momentum: float = 0.9
    wire: WireFormat | None = None
    """Format in which differences are sent; None sends exact values."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.machines < 2:
            raise ValueError(f"Local steps need steps >= 1 and machines >= 2, not steps={self.steps} and machines={self.machines}.")
        rate, momentum = self.outer_learning_rate, self.outer_momentum
        if not all(isinstance(value, int | float) for value in (rate, momentum)) or not (0 < rate < float("inf") and 0 <= momentum < 1):
            raise ValueError(f"outer_learning_rate={rate!r} must be above 0, and outer_momentum={momentum!r} at least 0 and below 1.")

    def __str__(self) -> str:
        """Return short text for tables: `2 machines synchronise every 50 steps`."""
        return f"{self.machines} machines synchronise every {self.steps} steps{f' in {self.wire.value}' if self.wire else ''}"
