"""The search space, and the single strategies that people pick by hand as small parts of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...errors import HardwareError
from ..affine import Affine
from ..cost.units import shape_ids
from ..decision import Batch, UnitLayout, layouts_for
from ..description import Activations, GatherSpan, ModelDescription, Recomputation, UnitDescription
from ..hardware import Hardware
from ..job import OptimizerStep, TrainingJob, divisors
from ..problem import PlanningProblem, Strategy
from .wire_choice import WireChoice

Space = tuple[tuple[UnitLayout, ...], ...]
"""For each unit, the layouts that it may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """What may be decided for a unit."""

    shard_sizes: tuple[int, ...]
    reshard_after_forward: bool | None
    """None leaves it open."""
    stage_sizes: tuple[int, ...] = (1,)
    reduces: tuple[bool, ...] = (True,)
    """Reduce gradients in every micro-step, or hold whole ones."""
    activations: tuple[Activations, ...] = (Activations.SAVE,)
    """Where `saves_operators`, each unit's own ways to recompute come in place of a full recomputation."""
    saves_operators: bool = False
    on_host: tuple[bool, ...] = (False,)
    states_on_host: tuple[bool, ...] = (False,)
    steps_in_backward: tuple[bool, ...] = (False,)


def batches(job: TrainingJob, world_size: int) -> Iterator[Batch]:
    """Yield every way to run the global batch: micro-batch size and accumulation."""
    for size in job.micro_batch_sizes(world_size):
        yield Batch(micro_batch_size=size, accumulation_steps=job.global_batch_size // (job.all_ranks(world_size) * size))


def search_spaces(problem: PlanningProblem, batch: Batch) -> tuple[Space, ...]:
    """Return the spaces whose best plan is the strategy's best plan.

    Under `osdp` each unit takes any layout, recomputes or saves, offloads what it saves or not, holds its gradients or reduces them. A
    single strategy gives every unit the same layout, and is offered with all blocks recomputed and with none, and so on.

    Returns:
        The spaces; `osdp` has one, but two on one device with a host, or where segments hold more beside blocks that are recomputed: the
        second has the first in it, at a higher cost.

    Raises:
        HardwareError: states or activations are to lie on a host that is not known.
        ValueError: activations are to be recomputed or offloaded, and none can be; HSDP in a world that has no group size
            between 1 and all; two stages without several nodes of several devices; a strategy that shards what is trained, with an
            optimizer that needs whole parameters.
    """
    description, hardware = problem.description, problem.hardware
    _check_activations(description, problem.job)
    if problem.shards_whole:
        raise ValueError(
            f"strategy={problem.strategy.value} shards what is trained, and {problem.job.optimizer.name} needs it whole; use osdp or ddp."
        )
    choices = [choice for sharding in _shardings(problem.strategy, hardware) for choice in _choices(sharding, problem, batch)]
    if problem.job.recompute is None and any(segment.held_bytes != Affine() for segment in description.segments):
        saving = replace(problem, job=replace(problem.job, recompute=False))
        choices = [c for sharding in _shardings(problem.strategy, hardware) for c in _choices(sharding, saving, batch)] + choices
    ways, offloadable = description.recomputations, description.offloadable
    shapes = shape_ids(description.units)
    alone = [shapes.count(shape) == 1 for shape in shapes]
    whole = [problem.job.optimizer.needs_whole and unit.trainable_numel > 0 for unit in description.units]
    spaces = [
        tuple(_layouts(unit, ways[i], i in offloadable, choice, alone=alone[i], whole=whole[i]) for i, unit in enumerate(description.units))
        for choice in choices
    ]
    if problem.job.communication is not None:
        choice_of = WireChoice(problem, shapes)
        spaces = [tuple(choice_of(i, layouts) for i, layouts in enumerate(space)) for space in spaces]
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
            " updated twice, a torch.Generator of its own, or it could not be traced so; leave it open."
        )


def _shardings(strategy: Strategy, hardware: Hardware) -> list[_Open]:
    """Return the shardings of a strategy: several where all units take one of them together."""
    world_size, per_node = hardware.world_size, hardware.devices_per_node
    whole = (world_size,)
    stages = (per_node,) if 1 < per_node < world_size else ()
    match strategy:
        case Strategy.TWO_STAGE if not stages:
            raise ValueError(
                f"strategy=two_stage needs several nodes of several devices, not {hardware.nodes} of {per_node}; use fsdp, or start more."
            )
        case Strategy.HSDP if not divisors(world_size)[1:-1]:
            raise ValueError(
                f"strategy=hsdp needs a group size between 1 and {world_size}, the number of devices, that divides it, and there is"
                " none; use fsdp or ddp."
            )
        case _ if world_size == 1:  # one device has nothing to free: what is cast to a lower precision is needed in backward
            return [_Open(shard_sizes=(1,), reshard_after_forward=False)]
        case Strategy.OSDP:
            return [_Open(shard_sizes=divisors(world_size), reshard_after_forward=None, stage_sizes=(1, *stages))]
        case Strategy.FSDP:
            return [_Open(shard_sizes=whole, reshard_after_forward=True)]
        case Strategy.DDP:
            return [_Open(shard_sizes=(1,), reshard_after_forward=reshard) for reshard in (True, False)]
        case Strategy.ZERO2:
            return [_Open(shard_sizes=whole, reshard_after_forward=False)]
        case Strategy.TWO_STAGE:
            return [_Open(shard_sizes=whole, reshard_after_forward=True, stage_sizes=stages)]
        case Strategy.HSDP:
            return [_Open(shard_sizes=(size,), reshard_after_forward=True) for size in divisors(world_size)[1:-1]]
    raise AssertionError(strategy)


def _choices(sharding: _Open, problem: PlanningProblem, batch: Batch) -> list[_Open]:
    """Return what the job leaves open beside the sharding, for each unit alone or for all units together."""
    job, hardware = problem.job, problem.hardware
    reduces = (True, False) if job.reduce_every_micro_step is None else (job.reduce_every_micro_step,)
    recomputes = (False, True) if job.recompute is None else (job.recompute,)
    offloads = _with_host("offload_activations", job.offload_activations, hardware)
    free = replace(
        sharding,
        reduces=reduces if batch.accumulation_steps > 1 else (True,),
        activations=tuple(
            Activations(recomputation=Recomputation() if again else None, offloads=away) for away in offloads for again in recomputes
        ),
        saves_operators=job.recompute is None and problem.strategy is Strategy.OSDP,
        on_host=_with_host("host_offload", job.host_offload, hardware),
        states_on_host=_with_host("offload_optimizer", job.offload_optimizer, hardware),
        steps_in_backward=_steps_in_backward(job, batch),
    )
    if problem.strategy is not Strategy.OSDP:
        places = [(host, states) for host in free.on_host for states in free.states_on_host if not (host and states)]
        fixed = itertools.product(free.reduces, free.activations, places)
        return [
            replace(free, reduces=(reduce,), activations=(kept,), on_host=(host,), states_on_host=(states,))
            for reduce, kept, (host, states) in fixed
        ]
    if hardware.world_size == 1 and len(free.on_host) > 1:  # one process is FSDP2's only where the host is used, which costs buffers
        return [replace(free, on_host=(False,)), free]
    return [free]


def _steps_in_backward(job: TrainingJob, batch: Batch) -> tuple[bool, ...]:
    """Return what may be chosen: a step that needs scratch memory may need it at a worse moment, one of fused kernels is never worse.

    Of units that are like others, whose parameters are small beside an embedding's or a head's, `_layouts` leaves it out.
    """
    if not job.step_in_backward or batch.accumulation_steps > 1:
        return (False,)
    return (True,) if job.optimizer.step is OptimizerStep.FUSED else (True, False)


def _with_host(name: str, asked: bool | None, hardware: Hardware) -> tuple[bool, ...]:
    """Return what may be chosen where the host is of use."""
    if hardware.host is None:
        if asked:
            raise HardwareError(f"{name}=True, but no host is known beside {hardware.device.name}; measure it, or leave it open.")
        return (False,)
    return (False, True) if asked is None else (asked,)


def _layouts(
    unit: UnitDescription, ways: tuple[Recomputation, ...], offloadable: bool, free: _Open, *, alone: bool, whole: bool
) -> tuple[UnitLayout, ...]:
    """Return the layouts of one unit that may be recomputed in these ways; `alone`: no other one has its shapes; `whole`: not sharded."""
    able = []
    for choice in free.activations:
        away = choice.offloads and offloadable
        again = ways[: None if free.saves_operators and not away else 1] if choice.recomputes else ()
        able += [Activations(recomputation=way, offloads=away) for way in again or (None,)]
    # A unit called several times cannot hold gradients: FSDP2 would reduce the held sum in one call, and the new gradient in another.
    always = not unit.trainable_numel or unit.span is GatherSpan.CALLS
    if whole:
        free = replace(free, shard_sizes=(1,), stage_sizes=(1,))
    return _product(
        unit.span,
        replace(
            free,
            activations=tuple(dict.fromkeys(able)),
            saves_operators=False,
            reduces=(True,) if always else free.reduces,
            steps_in_backward=(False,) if always else free.steps_in_backward[: None if alone else 1],
        ),
    )


@functools.lru_cache(maxsize=256)
def _product(span: GatherSpan, free: _Open) -> tuple[UnitLayout, ...]:
    """Return every layout with every other decision; the same object for the same question, as a model asks it of each block."""
    layouts = layouts_for(span, free.shard_sizes, reshard_after_forward=free.reshard_after_forward, stage_sizes=free.stage_sizes)
    decided = itertools.product(layouts, free.reduces, free.activations, _places(free))
    return tuple(replace(layout, reduce_every_micro_step=reduces, activations=kept, **place) for layout, reduces, kept, place in decided)


def _places(free: _Open) -> list[dict[str, Any]]:
    """Return where parameters and optimizer states may lie, and when the optimizer steps them."""
    return [
        {"on_host": host, "states_on_host": states and not host, "step_in_backward": early}
        for host in free.on_host
        for states in (free.states_on_host if not host else (False,))
        for early in (free.steps_in_backward if not host and not states else (False,))
    ]
