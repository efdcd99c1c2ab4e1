"""The planning problem: what a search is asked."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..quantities import whole_bytes
from .description import ModelDescription
from .hardware import Hardware
from .job import TrainingJob


class Strategy(str, Enum):
    """What may be chosen for each unit."""

    OSDP = "osdp"
    """Everything: each unit its own group size, kept or freed after forward."""
    FSDP = "fsdp"
    """Every unit sharded over all ranks and freed after forward (ZeRO-3)."""
    DDP = "ddp"
    """Every unit replicated; the copy that FSDP2 computes with is kept for all units or freed for all, whichever is better."""
    ZERO2 = "zero2"
    """Every unit sharded over all ranks and kept after forward."""
    HSDP = "hsdp"
    """Every unit sharded over groups of one size, freed after forward; the size is the best of those possible."""
    TWO_STAGE = "two_stage"
    """Every unit sharded over all ranks of several nodes and freed after forward, with collectives in two stages (the paper's
    communication with groups)."""

    @classmethod
    def parse(cls, name: str | Strategy) -> Strategy:
        """Read a name; ValueError where it is not known."""
        try:
            return cls(name)
        except ValueError:
            raise ValueError(f"strategy={name!r} is not known; use one of {', '.join(s.value for s in cls)}.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProblem:
    """A model, the devices that train it, the training job, and the memory limit: all that a search needs.

    Raises:
        ValueError: the strategy is not known, or the limit is not a number of bytes from 1 to 2**60.
    """

    description: ModelDescription
    hardware: Hardware
    job: TrainingJob
    memory_limit_bytes: int
    """Bytes that a rank may use, for tensors, whatever the device reserves, communicators and the margin."""
    strategy: Strategy = Strategy.OSDP
    """`osdp` searches every unit's layout; the others give that strategy at its best batch. A name is accepted."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", Strategy.parse(self.strategy))
        object.__setattr__(self, "memory_limit_bytes", whole_bytes(self.memory_limit_bytes))

    @property
    def room_bytes(self) -> int:
        """What a plan may fill: the limit less the margin."""
        return self.hardware.room_bytes(self.memory_limit_bytes)

    @property
    def shards_whole(self) -> bool:
        """Whether the strategy shards parameters that the optimizer needs whole."""
        return self.job.optimizer.needs_whole and self.hardware.world_size > 1 and self.strategy not in (Strategy.OSDP, Strategy.DDP)
