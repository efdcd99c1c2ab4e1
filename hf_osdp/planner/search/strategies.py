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
from ..problem import Strategy

Space = tuple[tuple[UnitLayout, ...], ...]
"""For each unit, the choices that it may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Layouts that a unit may take; `None` leaves it open whether they are freed after forward."""

    shard_sizes: tuple[int, ...]
    reshard_after_forward: bool | None
    stage_sizes: tuple[int, ...] = (1,)


def search_spaces(
    strategy: Strategy, description: ModelDescription, hardware: Hardware, job: TrainingJob, batch: Batch
) -> tuple[Space, ...]:
    """The spaces whose best plan is the strategy's best plan.

    Under `osdp` each unit takes any layout, recomputes or saves, offloads what it saves or not, holds its gradients or reduces them. A
    single strategy gives every unit the same layout, and is offered with all blocks recomputed and with none, and so on.

    Args:
        strategy: what may be chosen.
        description: the model.
        hardware: devices; a host beside them where states may be moved to it.
        job: what the user has fixed.
        batch: micro-batch size and accumulation.

    Returns:
        The spaces; `osdp` has one, but two on one device with a host: the second has the first in it, at a higher cost.

    Raises:
        HardwareError: states or activations are to lie on a host that is not known.
        ValueError: activations are to be recomputed or offloaded, and none can be; HSDP in a world that has no group size
            between 1 and all; two stages without several nodes of several devices.
    """
    kinds = _kinds(strategy, hardware)
    holds, activations, hosts = _holds(job, batch), _activations(job, hardware), _hosts(job, hardware)
    if strategy is Strategy.OSDP:
        ways = [(holds, activations, hosts)]
        if hardware.world_size == 1 and len(hosts) > 1:  # one process is FSDP2's only where the host is used, which costs buffers
            ways.insert(0, (holds, activations, (False,)))
    else:
        ways = [((h,), (a,), (o,)) for h, a, o in itertools.product(holds, activations, hosts)]
    recomputable, offloadable = description.recomputable, description.offloadable
    if job.offload_activations and not offloadable:
        raise ValueError(
            "offload_activations=True, but no block of this model can have its activations wait on the host: they are recomputed by other"
            " means, or could not be traced; leave it open."
        )
    if job.recompute and not (recomputable or description.recomputed_by_others):
        raise ValueError(
            "recompute=True, but no block of this model can be recomputed: it has batch normalisation, whose running statistics would be"
            " updated twice, or it could not be traced so; leave it open."
        )
    spaces = [
        tuple(_choices(unit, index in recomputable, index in offloadable, kind, *way) for index, unit in enumerate(description.units))
        for kind in kinds
        for way in ways
    ]
    return tuple({tuple(map(id, space)): space for space in spaces}.values())  # equal choices are the same object, see `_product`


def _kinds(strategy: Strategy, hardware: Hardware) -> list[_Kind]:
    """Layouts of a strategy: several where all units take one of them together."""
    kinds = _layouts(strategy, hardware)
    # one device has nothing to free: what is cast to a lower precision is needed in backward
    return [_Kind(shard_sizes=(1,), reshard_after_forward=False)] if hardware.world_size == 1 else kinds


def _layouts(strategy: Strategy, hardware: Hardware) -> list[_Kind]:
    world_size, per_node = hardware.world_size, hardware.devices_per_node
    whole = (world_size,)
    stages = (per_node,) if 1 < per_node < world_size else ()
    match strategy:
        case Strategy.OSDP:
            return [_Kind(shard_sizes=divisors(world_size), reshard_after_forward=None, stage_sizes=(1, *stages))]
        case Strategy.FSDP:
            return [_Kind(shard_sizes=whole, reshard_after_forward=True)]
        case Strategy.DDP:
            return [_Kind(shard_sizes=(1,), reshard_after_forward=True), _Kind(shard_sizes=(1,), reshard_after_forward=False)]
        case Strategy.ZERO2:
            return [_Kind(shard_sizes=whole, reshard_after_forward=False)]
        case Strategy.TWO_STAGE:
            if not stages:
                raise ValueError(
                    f"strategy=two_stage needs several nodes of several devices, not {hardware.nodes} of {per_node}; use fsdp, or"
                    " start more."
                )
            return [_Kind(shard_sizes=whole, reshard_after_forward=True, stage_sizes=stages)]
        case Strategy.HSDP:
            if not (sizes := divisors(world_size)[1:-1]):
                raise ValueError(
                    f"strategy=hsdp needs a group size between 1 and {world_size}, the number of devices, that divides it, and there is"
                    " none; use fsdp or ddp."
                )
            return [_Kind(shard_sizes=(size,), reshard_after_forward=True) for size in sizes]
    raise AssertionError(strategy)


def _holds(job: TrainingJob, batch: Batch) -> tuple[bool, ...]:
    """Whether whole gradients are held between micro-steps."""
    if batch.accumulation_steps == 1:
        return (False,)
    return (False, True) if job.reduce_every_micro_step is None else (not job.reduce_every_micro_step,)


def _activations(job: TrainingJob, hardware: Hardware) -> tuple[Activations, ...]:
    """What may happen to the saved activations of units that can be recomputed."""
    recomputes = (False, True) if job.recompute is None else (job.recompute,)
    offloads = _with_host("offload_activations", job.offload_activations, hardware)
    return tuple(Activations.of(recomputes=again, offloads=away) for away in offloads for again in recomputes)


def _hosts(job: TrainingJob, hardware: Hardware) -> tuple[bool, ...]:
    """Whether states live on the host."""
    return _with_host("host_offload", job.host_offload, hardware)


def _with_host(name: str, asked: bool | None, hardware: Hardware) -> tuple[bool, ...]:
    """What may be chosen where the host is of use."""
    if hardware.host is None:
        if asked:
            raise HardwareError(f"{name}=True, but no host is known beside {hardware.device.name}; measure it, or leave it open.")
        return (False,)
    return (False, True) if asked is None else (asked,)


def _choices(
    unit: UnitDescription,
    recomputable: bool,
    offloadable: bool,
    kind: _Kind,
    holds: tuple[bool, ...],
    activations: tuple[Activations, ...],
    hosts: tuple[bool, ...],
) -> tuple[UnitLayout, ...]:
    """The choices of one unit."""
    able = (Activations.of(recomputes=a.recomputes and recomputable, offloads=a.offloads and offloadable) for a in activations)
    activations = tuple(dict.fromkeys(able))
    if not unit.trainable_numel or unit.span is GatherSpan.CALLS:
        holds = (False,)  # FSDP2 would reduce what is held in one call, and in another what this micro-step adds to it
    return _product(unit.span, kind, holds, activations, hosts)


@functools.lru_cache(maxsize=256)
def _product(
    span: GatherSpan, kind: _Kind, holds: tuple[bool, ...], activations: tuple[Activations, ...], hosts: tuple[bool, ...]
) -> tuple[UnitLayout, ...]:
    """Every layout with every other decision; the same object for the same question, as a model asks it of each block."""
    layouts = layouts_for(span, kind.shard_sizes, reshard_after_forward=kind.reshard_after_forward, stage_sizes=kind.stage_sizes)
    return tuple(
        replace(layout, reduce_every_micro_step=not hold, activations=kept, on_host=host)
        for layout, hold, kept, host in itertools.product(layouts, holds, activations, hosts)
    )


def batches(job: TrainingJob, world_size: int) -> Iterator[Batch]:
    """Every way to run the global batch: micro-batch size and accumulation."""
    for size in job.micro_batch_sizes(world_size):
        yield Batch(micro_batch_size=size, accumulation_steps=job.global_batch_size // (world_size * size))
