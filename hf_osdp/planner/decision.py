"""Decisions of a plan: the layout of each unit, and the batch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from .description import GatherSpan, shown_name
from .placement import ON_DEVICE, Place, Placed
from .wire import Message as Message
from .wire import Wires


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayout(Wires, Placed):
    """All decisions for one unit, which is sharded over `shard_size` ranks and replicated over the rest of the
    world.
    """

    shard_size: int
    """Ranks that share one copy: 1 replicates, the world size shards over all ranks, a size between is HSDP."""
    reshard_after_forward: bool
    """Free the gathered parameters after forward and gather them again in backward (ZeRO-3), or keep them (ZeRO-2).
    A replica gathers nothing: False."""
    stage_size: int = 1
    """Ranks per node if all-gathers and reduce-scatters run in two stages, between and inside nodes; 1 is a single
    stage.
    """
    reduce_every_micro_step: bool = True
    """Reduce-scatter gradients in each micro-step and hold shards, or hold whole gradients and reduce their sum in the
    last micro-step. The all-reduce between replicas always runs in the last micro-step; for a replica this is True."""

    def __post_init__(self) -> None:
        if self.shard_size < 1:
            raise ValueError(f"shard_size={self.shard_size} must be at least 1.")
        if self.stage_size != 1 and not (
            1 < self.stage_size < self.shard_size and self.shard_size % self.stage_size == 0
        ):
            raise ValueError(
                f"stage_size={self.stage_size} must be 1, or divide shard_size={self.shard_size} and be less."
            )
        self.check_formats(self.shard_size)
        self.check_place()
        if self.is_replica:  # neither has a meaning, and equal layouts are to be equal
            object.__setattr__(self, "reshard_after_forward", False)
            object.__setattr__(self, "reduce_every_micro_step", True)

    @property
    def is_replica(self) -> bool:
        """Whether the unit has plain parameters outside FSDP2: every rank has all of them on its device."""
        return self.shard_size == 1 and not self.away

    @property
    def two_stage(self) -> bool:
        """Whether all-gathers and reduce-scatters run in two stages."""
        return self.stage_size > 1

    def describe(self, world_size: int) -> str:
        """Return short text for tables: `replicate`, `shard 2 x replicate 4, keep`, `shard 16 in 2 stages (2 x 8)`."""
        text = "replicate" if self.shard_size == 1 else f"shard {self.shard_size}"
        if 1 < self.shard_size < world_size:
            text += f" x replicate {world_size // self.shard_size}"
        if self.two_stage:
            text += f" in 2 stages ({self.shard_size // self.stage_size} x {self.stage_size})"
        parts = [
            text,
            "" if self.reshard_after_forward or self.is_replica else "keep",
            "" if self.reduce_every_micro_step else "hold gradients",
            *self.describe_place(),
            *(f"{name} in {form.value}" for name, form in self.formats.items()),
        ]
        return ", ".join(filter(None, parts))


LAYOUT_FIELDS = tuple(field.name for field in fields(UnitLayout))

Space = tuple[tuple[UnitLayout, ...], ...]
"""The layouts that each unit may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitDecision(UnitLayout):
    """The layout of one named unit."""

    fqn: str

    def __post_init__(self) -> None:
        try:
            UnitLayout.__post_init__(self)
        except ValueError as error:
            raise ValueError(f"Unit {self.label!r}: {error}") from None

    @classmethod
    def of(cls, fqn: str, layout: UnitLayout) -> UnitDecision:
        """Return a layout with its unit's name."""
        return cls(fqn=fqn, **{name: getattr(layout, name) for name in LAYOUT_FIELDS})

    @property
    def layout(self) -> UnitLayout:
        """The layout without the name."""
        return UnitLayout(**{name: getattr(self, name) for name in LAYOUT_FIELDS})

    @property
    def label(self) -> str:
        """Name for tables and messages."""
        return shown_name(self.fqn)

    @property
    def module_names(self) -> tuple[str, ...]:
        """Names of the unit's modules, which `+` joins in `fqn`."""
        return tuple(self.fqn.split("+"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The batch side of a plan."""

    micro_batch_size: int
    """Samples of one micro-batch on one rank."""
    accumulation_steps: int
    """Micro-batches of a rank before each optimizer step."""

    def holds_gradients(self, layout: UnitLayout) -> bool:
        """Return whether a unit's whole (unsharded) gradients are held between micro-steps."""
        return self.accumulation_steps > 1 and not layout.reduce_every_micro_step

    def reduce_scatters(self, layout: UnitLayout) -> int:
        """Return the number of a unit's reduce-scatters in one optimizer step."""
        return self.accumulation_steps if layout.reduce_every_micro_step else 1


def layouts_for(
    span: GatherSpan,
    shard_sizes: Sequence[int],
    *,
    reshard_after_forward: bool | None = None,
    stage_sizes: Sequence[int] = (1,),
    place: Place = ON_DEVICE,
) -> tuple[UnitLayout, ...]:
    """Return the possible layouts of a unit in one place.

    `reshard_after_forward=None` allows both values; two stages need several whole nodes.
    """
    asked = (True, False) if reshard_after_forward is None else (reshard_after_forward,)
    reshards = dict.fromkeys(map(span.reshards, asked))
    sizes = [
        (size, stage)
        for size in shard_sizes
        for stage in stage_sizes
        if stage == 1 or (size > stage and size % stage == 0)
    ]
    layouts = (
        UnitLayout(shard_size=size, reshard_after_forward=free, stage_size=stage, **place._asdict())
        for size, stage in sizes
        for free in reshards
    )
    return tuple(dict.fromkeys(layouts))


Mesh = tuple[int, int]
"""Shard size and stage size of one device mesh; stage size 1 without stages."""
REPLICAS: Mesh = (1, 1)
WHOLE_WORLD: Mesh = (0, 1)
"""Replicas, and units of FSDP2 over all ranks, use the group of all ranks. Their collectives come in orders of their
own, so that replicas get a group of their own where a plan has both."""


@functools.lru_cache(maxsize=4096)
def meshes_of(shard_size: int, stage_size: int, world_size: int) -> frozenset[Mesh]:
    """Return the meshes of a layout that need their own process groups.

    `Meshes.prepare` (distributed/mesh.py) forms a mesh for each shard size g of W ranks, and for stages of s ranks
    within g:

        g = W, g = 1 on a host  none: the axis over all ranks is the default process group, one rank alone needs none
        1 < g < W               2 groups: one axis over the g ranks that share a copy, one over the W / g replicas
        stages of s             those of g = s, and where g < W 3 more: replicas, nodes and ranks of a node
    """
    sizes = {size for size in (shard_size, stage_size) if 1 < size < world_size}
    staged = {(shard_size, stage_size)} if 1 < stage_size < shard_size < world_size else set()
    return frozenset({(size, 1) for size in sizes} | staged)


def groups_of(layout: UnitLayout, world_size: int) -> frozenset[Mesh]:
    """Return what decides the process groups of a layout: its meshes, and how it uses the group of all ranks; one rank
    has none.
    """
    if world_size == 1:
        return frozenset()
    if layout.is_replica:
        return frozenset({REPLICAS})
    uses_all = {WHOLE_WORLD} if layout.shard_size in (1, world_size) else ()
    return meshes_of(layout.shard_size, layout.stage_size, world_size).union(uses_all)


def groups_in(meshes: Iterable[Mesh]) -> int:
    """Return the number of communicators of these meshes, without the one of all ranks."""
    meshes, shared = set(meshes), {REPLICAS, WHOLE_WORLD}
    return (shared <= meshes) + sum(2 if stage_size == 1 else 3 for _, stage_size in meshes - shared)


def communicators_of(layouts: Iterable[UnitLayout], world_size: int) -> int:
    """Return the number of NCCL communicators on each rank, the one of all ranks included; groups of one rank have
    none.
    """
    meshes = {mesh for layout in layouts for mesh in groups_of(layout, world_size)}
    return 0 if world_size == 1 else 1 + groups_in(meshes)
