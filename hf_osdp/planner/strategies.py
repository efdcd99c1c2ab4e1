"""The search space, and the single strategies that people pick by hand as small parts of it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from .costs import Batch, Choice, choices_for
from .description import ModelDescription
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
        """Read a name.

        Raises:
            ValueError: the name is not known.
        """
        try:
            return cls(name)
        except ValueError:
            raise ValueError(f"strategy={name!r} is not known; use one of {', '.join(s.value for s in cls)}.") from None


def divisors(number: int) -> tuple[int, ...]:
    """All divisors in ascending order."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)


Space = tuple[tuple[Choice, ...], ...]
"""For each unit, the choices that it may take."""


def search_spaces(
    strategy: Strategy, description: ModelDescription, world_size: int, devices_per_node: int | None = None
) -> tuple[Space, ...]:
    """The spaces whose best plan is the strategy's best plan.

    Args:
        strategy: what may be chosen.
        description: the model.
        world_size: ranks.
        devices_per_node: ranks of a node; None takes all to be on one.

    Returns:
        One space, but for HSDP one for each group size, and for DDP one for each answer to whether copies are kept.

    Raises:
        ValueError: HSDP in a world that has no group size between 1 and all; two stages without several nodes of several devices.
    """
    whole = (world_size,)
    per_node = devices_per_node or world_size
    stages = (per_node,) if 1 < per_node < world_size else ()
    flat = (1,)
    match strategy:
        case Strategy.OSDP:
            kinds = [(divisors(world_size), None, flat + stages)]
        case Strategy.FSDP:
            kinds = [(whole, False, flat)]
        case Strategy.DDP:
            kinds = [((1,), False, flat), ((1,), True, flat)]
        case Strategy.ZERO2:
            kinds = [(whole, True, flat)]
        case Strategy.TWO_STAGE:
            kinds = [(whole, False, stages)]
            if not stages:
                raise ValueError(
                    f"strategy=two_stage needs several nodes of several devices, not {world_size // per_node} of {per_node}; use fsdp, or"
                    " start more."
                )
        case Strategy.HSDP:
            kinds = [((size,), False, flat) for size in divisors(world_size)[1:-1]]
            if not kinds:
                raise ValueError(f"strategy=hsdp needs a group size between 1 and {world_size} that divides it; use fsdp or ddp.")
    if world_size == 1:
        kinds = [((1,), True, flat)]  # there is nothing to free: what is cast to a lower precision is needed in backward
    return tuple(
        tuple(choices_for(unit, sizes, keep=keep, stage_sizes=stage_sizes) for unit in description.units)
        for sizes, keep, stage_sizes in kinds
    )


def batches(job: TrainingJob, world_size: int) -> Iterator[Batch]:
    """Every way to run the global batch: micro-batch size, accumulation, when gradients are reduced."""
    for size in job.micro_batch_sizes(world_size):
        steps = job.global_batch_size // (world_size * size)
        both = (True, False) if job.reduce_every_micro_step is None else (job.reduce_every_micro_step,)
        for every in both if steps > 1 else (True,):
            yield Batch(micro_batch_size=size, accumulation_steps=steps, reduce_every_micro_step=every)
