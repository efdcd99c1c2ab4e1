"""What a plan says of one unit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..reading import problem_of_text
from .cost.units import Choice
from .description import Activations


class ShardMode(str, Enum):
    """How a unit's parameters lie on the devices (the paper's DP, ZDP and group sharding)."""

    REPLICATE = "replicate"
    GROUP_SHARD = "group_shard"
    SHARD = "shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitDecision:
    """Layout of one unit: sharded over `shard_size` ranks, replicated over the rest of the world."""

    fqn: str
    shard_size: int
    """Ranks that share one copy: 1 replicates, the world size shards over all, between is HSDP."""
    reshard_after_forward: bool
    """Free the gathered parameters after forward and gather them again in backward (ZeRO-3), or keep them (ZeRO-2)."""
    stage_size: int = 1
    """Ranks of a node where all-gathers and reduce-scatters run in two stages, between nodes and inside; 1 runs them in one."""
    reduce_every_micro_step: bool = True
    """Reduce-scatter gradients in each micro-step, holding shards, or hold whole gradients and reduce their sum in the last.

    The all-reduce between replicas comes in the last micro-step either way.
    """
    activations: Activations = Activations.SAVE
    on_host: bool = False
    """Parameters, gradients and optimizer states live in the host's memory, and the host takes the optimizer step."""

    def __post_init__(self) -> None:
        if problem := problem_of_text(self.fqn):
            raise ValueError(f"fqn={self.fqn[:40]!r} is no module's name: it {problem}.")
        if self.shard_size < 1:
            raise ValueError(f"Unit {self.fqn or '(root)'!r}: shard_size={self.shard_size} must be at least 1.")
        if self.stage_size != 1 and not (1 < self.stage_size < self.shard_size and self.shard_size % self.stage_size == 0):
            raise ValueError(
                f"Unit {self.fqn or '(root)'!r}: stage_size={self.stage_size} must be 1, or divide shard_size={self.shard_size}"
                " and be less."
            )

    @classmethod
    def of(cls, fqn: str, choice: Choice) -> UnitDecision:
        """What was chosen for the unit of this name."""
        return cls(
            fqn=fqn,
            shard_size=choice.shard_size,
            reshard_after_forward=not choice.keep,
            stage_size=choice.stage_size,
            reduce_every_micro_step=not choice.hold_gradients,
            activations=choice.activations,
            on_host=choice.on_host,
        )

    @property
    def module_names(self) -> tuple[str, ...]:
        """Modules of the unit: its name holds theirs, joined by `+`."""
        return tuple(self.fqn.split("+"))

    @property
    def two_stage(self) -> bool:
        """Whether all-gathers and reduce-scatters run in two stages."""
        return self.stage_size > 1

    def mode(self, world_size: int) -> ShardMode:
        """The layout's name in a world of `world_size` ranks."""
        if self.shard_size == 1:
            return ShardMode.REPLICATE
        return ShardMode.SHARD if self.shard_size == world_size else ShardMode.GROUP_SHARD

    def describe(self, world_size: int) -> str:
        """Short text for tables: `replicate`, `shard 8`, `shard 2 x replicate 4, keep`, `shard 16 in 2 stages (2 x 8)`."""
        match self.mode(world_size):
            case ShardMode.REPLICATE:
                text = "replicate"
            case ShardMode.SHARD:
                text = f"shard {world_size}"
            case ShardMode.GROUP_SHARD:
                text = f"shard {self.shard_size} x replicate {world_size // self.shard_size}"
        if self.two_stage:
            text = f"{text} in 2 stages ({self.shard_size // self.stage_size} x {self.stage_size})"
        more = {
            "keep": not self.reshard_after_forward,
            "hold gradients": not self.reduce_every_micro_step,
            "recompute": self.activations.recomputes,
            "offload activations": self.activations.offloads,
            "on host": self.on_host,
        }
        return ", ".join([text, *(word for word, said in more.items() if said)])
