"""The planning problem: all inputs of a search."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from ..errors import shown
from ..quantities import parse_bytes
from .description import ModelDescription
from .hardware import Hardware
from .training_job import TrainingJob


class Strategy(str, Enum):
    """The layouts that units may take."""

    OSDP = "osdp"
    """Each unit has its own layout, chosen by the search."""
    FSDP = "fsdp"
    """Every unit sharded over all ranks and freed after forward (ZeRO-3)."""
    DDP = "ddp"
    """Every unit replicated; FSDP2's copy for compute is kept for all units or freed for all, whichever is better."""
    ZERO2 = "zero2"
    """Every unit sharded over all ranks and kept after forward."""
    HSDP = "hsdp"
    """Every unit sharded over groups of one size and freed after forward; the size is the best possible one."""
    TWO_STAGE = "two_stage"
    """Every unit sharded over all ranks of several nodes and freed after forward, with collectives in two stages (the
    paper's communication with groups)."""

    @classmethod
    def parse(cls, name: str | Strategy) -> Strategy:
        """Return the strategy of a name; ValueError if the name is not known."""
        try:
            return cls(name)
        except ValueError:
            raise ValueError(
                f"strategy={name!r} is not known; use one of {', '.join(s.value for s in cls)}."
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProblem:
    """A model, the devices that train it, the training job, the memory limit and the strategy.

    Raises:
        ValueError: the strategy is not known, or the limit is not a number of bytes from 1 to `MOST_BYTES`.
    """

    description: ModelDescription
    hardware: Hardware
    job: TrainingJob
    memory_limit_bytes: int
    """Bytes that a rank may use: for tensors, memory reserved by the device, communicators and the margin."""
    strategy: Strategy = Strategy.OSDP
    """`osdp` searches each unit's layout; another strategy is planned at its best batch. A name is accepted."""
    simplicity: float = 0.0
    """Price of each part of a plan (`Option.parts`), as a share of a step's time; 0 takes the fastest plan."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", Strategy.parse(self.strategy))
        object.__setattr__(self, "memory_limit_bytes", parse_bytes(self.memory_limit_bytes, name="memory_limit_bytes"))
        check_simplicity(self.simplicity)
        precision = self.job.precision.on(self.hardware.world_size)
        object.__setattr__(self, "job", replace(self.job, precision=precision))

    @property
    def room_bytes(self) -> int:
        """Bytes that a plan may use: the limit less the margin."""
        return self.hardware.room_bytes(self.memory_limit_bytes)

    @property
    def shards_whole(self) -> bool:
        """Whether the strategy shards parameters that the optimizer needs whole."""
        return (
            self.job.optimizer.needs_whole
            and self.hardware.world_size > 1
            and self.strategy not in (Strategy.OSDP, Strategy.DDP)
        )


def check_simplicity(value: object) -> None:
    """Raise a ValueError unless the value is a number of at least 0 and below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(
            f"simplicity={shown(value)} must be the share of a step's time that one layout less may cost, at least 0"
            " and below 1, such as 0.001."
        )
