"""Local steps between machines (DiLoCo, arXiv 2311.08105): what a plan says of them."""

from __future__ import annotations

from dataclasses import dataclass

from .wire import WireFormat

OUTER_LEARNING_RATE, OUTER_MOMENTUM = 0.7, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSteps:
    """Machines train apart and synchronise every `steps` optimizer steps. This is another algorithm than data parallel training."""

    steps: int
    machines: int
    learning_rate: float = OUTER_LEARNING_RATE
    """Of the outer step, by SGD with Nesterov's momentum on the mean difference of parameters."""
    momentum: float = OUTER_MOMENTUM
    wire: WireFormat | None = None
    """The format in which differences are sent; None sends them as they are."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.machines < 2:
            raise ValueError(f"Local steps need steps of at least 1 and 2 machines, not {self.steps} and {self.machines}.")
        check_outer(self.learning_rate, self.momentum)

    def describe(self) -> str:
        """Return what the algorithm is: `2 machines synchronise every 50 steps`."""
        sent = "" if self.wire is None else f" in {self.wire.value}"
        return f"{self.machines} machines synchronise every {self.steps} steps{sent}"


def check_outer(learning_rate: float, momentum: float) -> None:
    """Refuse what the outer step cannot use, with a ValueError."""
    for name, value, fits, range_ in (
        ("outer_learning_rate", learning_rate, lambda x: 0 < x < float("inf"), "above 0"),
        ("outer_momentum", momentum, lambda x: 0 <= x < 1, "at least 0 and below 1"),
    ):
        if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
            raise ValueError(f"{name}={value!r} must be a number {range_}.")
