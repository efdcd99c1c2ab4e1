"""The search space, and the single strategies that people pick by hand as small parts of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...errors import HardwareError
from ..decision import Batch, UnitLayout, layouts_for
from ..description import Activations, GatherSpan, ModelDescription, UnitDescription
from ..hardware import Hardware
from ..job import TrainingJob, divisors
from ..problem import PlanningProblem, Strategy

Space = tuple[tuple[UnitLayout, ...], ...]
"""For each unit, the layouts that it may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shardings:
    """Layouts that all units may take."""

    shard_sizes: tuple[int, ...]
    reshard_after_forward: bool | None
    """None leaves it open."""
    stage_sizes: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """What may be decided for a unit beside its layout."""

    reduces: tuple[bool, ...]
    """Reduce gradients in every micro-step, or hold whole ones."""
    activations: tuple[Activations, ...]
    on_host: tuple[bool, ...]


def batches(job: TrainingJob, world_size: int) -> Iterator[Batch]:
    """Yield every way to run the global batch: micro-batch size and accumulation."""
    for size in job.micro_batch_sizes(world_size):
        yield Batch(micro_batch_size=size, accumulation_steps=job.global_batch_size // (world_size * size))


def search_spaces(problem: PlanningProblem, batch: Batch) -> tuple[Space, ...]:
    """Return the spaces whose best plan is the strategy's best plan.

    Under `osdp` each unit takes any layout, recomputes or saves, offloads what it saves or not, holds its gradients or reduces them. A
    single strategy gives every unit the same layout, and is offered with all blocks recomputed and with none, and so on.

    Returns:
        The spaces; `osdp` has one, but two on one device with a host: the second has the first in it, at a higher cost.

    Raises:
        HardwareError: states or activations are to lie on a host that is not known.
        ValueError: activations are to be recomputed or offloaded, and none can be; HSDP in a world that has no group size
            between 1 and all; two stages without several nodes of several devices.
    """
    description, hardware, job = problem.description, problem.hardware, problem.job
    shardings, free = _shardings(problem.strategy, hardware), _open(job, hardware, batch)
    _check_activations(description, job)
    if problem.strategy is Strategy.OSDP:
        ways = [free]
        if hardware.world_size == 1 and len(free.on_host) > 1:  # one process is FSDP2's only where the host is used, which costs buffers
            ways.insert(0, replace(free, on_host=(False,)))
    else:
        fixed = itertools.product(free.reduces, free.activations, free.on_host)
        ways = [_Open(reduces=(reduces,), activations=(kept,), on_host=(host,)) for reduces, kept, host in fixed]
    recomputable, offloadable = description.recomputable, description.offloadable
    spaces = [
        tuple(_layouts(unit, i in recomputable, i in offloadable, sharding, way) for i, unit in enumerate(description.units))
        for sharding in shardings
        for way in ways
    ]
    return tuple({tuple(map(id, space)): space for space in spaces}.values())  # equal layouts are the same object, see `_product`


def _check_activations(description: ModelDescription, job: TrainingJob) -> None:
    if job.offload_activations and not description.offloadable:
        raise ValueError(
            "offload_activations=True, but no block of this model can have its activations wait on the host: they are recomputed by other"
            " means, or could not be traced; leave it open."
        )
    if job.recompute and not (description.recomputable or description.recomputed_by_others):
        raise ValueError(
            "recompute=True, but no block of this model can be recomputed: it has batch normalisation, whose running statistics would be"
            " updated twice, or it could not be traced so; leave it open."
        )


def _shardings(strategy: Strategy, hardware: Hardware) -> list[_Shardings]:
    """Return the layouts of a strategy: several where all units take one of them together."""
    shardings = _of_strategy(strategy, hardware)
    # one device has nothing to free: what is cast to a lower precision is needed in backward
    return [_Shardings(shard_sizes=(1,), reshard_after_forward=False)] if hardware.world_size == 1 else shardings


def _of_strategy(strategy: Strategy, hardware: Hardware) -> list[_Shardings]:
    world_size, per_node = hardware.world_size, hardware.devices_per_node
    whole = (world_size,)
    stages = (per_node,) if 1 < per_node < world_size else ()
    match strategy:
        case Strategy.OSDP:
            return [_Shardings(shard_sizes=divisors(world_size), reshard_after_forward=None, stage_sizes=(1, *stages))]
        case Strategy.FSDP:
            return [_Shardings(shard_sizes=whole, reshard_after_forward=True)]
        case Strategy.DDP:
            return [_Shardings(shard_sizes=(1,), reshard_after_forward=reshard) for reshard in (True, False)]
        case Strategy.ZERO2:
            return [_Shardings(shard_sizes=whole, reshard_after_forward=False)]
        case Strategy.TWO_STAGE:
            if not stages:
                raise ValueError(
                    f"strategy=two_stage needs several nodes of several devices, not {hardware.nodes} of {per_node}; use fsdp, or"
                    " start more."
                )
            return [_Shardings(shard_sizes=whole, reshard_after_forward=True, stage_sizes=stages)]
        case Strategy.HSDP:
            if not (sizes := divisors(world_size)[1:-1]):
                raise ValueError(
                    f"strategy=hsdp needs a group size between 1 and {world_size}, the number of devices, that divides it, and there is"
                    " none; use fsdp or ddp."
                )
            return [_Shardings(shard_sizes=(size,), reshard_after_forward=True) for size in sizes]
    raise AssertionError(strategy)


def _open(job: TrainingJob, hardware: Hardware, batch: Batch) -> _Open:
    """Return what the job leaves open beside layouts."""
    reduces = (True, False) if job.reduce_every_micro_step is None else (job.reduce_every_micro_step,)
    recomputes = (False, True) if job.recompute is None else (job.recompute,)
    offloads = _with_host("offload_activations", job.offload_activations, hardware)
    return _Open(
        reduces=reduces if batch.accumulation_steps > 1 else (True,),
        activations=tuple(Activations.of(recomputes=again, offloads=away) for away in offloads for again in recomputes),
        on_host=_with_host("host_offload", job.host_offload, hardware),
    )


def _with_host(name: str, asked: bool | None, hardware: Hardware) -> tuple[bool, ...]:
    """Return what may be chosen where the host is of use."""
    if hardware.host is None:
        if asked:
            raise HardwareError(f"{name}=True, but no host is known beside {hardware.device.name}; measure it, or leave it open.")
        return (False,)
    return (False, True) if asked is None else (asked,)


def _layouts(unit: UnitDescription, recomputable: bool, offloadable: bool, sharding: _Shardings, free: _Open) -> tuple[UnitLayout, ...]:
    """Return the layouts of one unit."""
    able = (Activations.of(recomputes=a.recomputes and recomputable, offloads=a.offloads and offloadable) for a in free.activations)
    free = replace(free, activations=tuple(dict.fromkeys(able)))
    if not unit.trainable_numel or unit.span is GatherSpan.CALLS:
        # FSDP2 would reduce what is held in one call, and in another what this micro-step adds to it
        free = replace(free, reduces=(True,))
    return _product(unit.span, sharding, free)


@functools.lru_cache(maxsize=256)
def _product(span: GatherSpan, sharding: _Shardings, free: _Open) -> tuple[UnitLayout, ...]:
    """Return every layout with every other decision; the same object for the same question, as a model asks it of each block."""
    reshards, stages = sharding.reshard_after_forward, sharding.stage_sizes
    layouts = layouts_for(span, sharding.shard_sizes, reshard_after_forward=reshards, stage_sizes=stages)
    return tuple(
        replace(layout, reduce_every_micro_step=reduces, activations=kept, on_host=host)
        for layout, reduces, kept, host in itertools.product(layouts, free.reduces, free.activations, free.on_host)
    )
