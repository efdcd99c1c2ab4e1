"""The search space of `osdp`, and the single strategies (DDP, FSDP and others) as small parts of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...errors import HardwareError
from ..affine import Affine
from ..cost.units import shape_ids
from ..decision import Batch, Space, UnitLayout, layouts_for
from ..description import Activations, GatherSpan, ModelDescription, Recomputation, UnitDescription
from ..hardware import Hardware
from ..problem import PlanningProblem, Strategy
from ..training_job import EXACT, TrainingJob, divisors
from .wires import with_wires


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allowed:
    """Allowed values of each decision for a unit; see `UnitLayout`."""

    shard_sizes: tuple[int, ...]
    reshard_after_forward: bool | None
    """None allows both."""
    stage_sizes: tuple[int, ...] = (1,)
    reduces: tuple[bool, ...] = (True,)
    """Values of `reduce_every_micro_step`."""
    activations: tuple[Activations, ...] = (Activations.SAVE,)
    saves_operators: bool = False
    """Whether each unit may use all of its own policies to recompute."""
    on_host: tuple[bool, ...] = (False,)
    states_on_host: tuple[bool, ...] = (False,)


def batches(job: TrainingJob, world_size: int) -> Iterator[Batch]:
    """Yield every pair of micro-batch size and accumulation steps that gives the global batch."""
    for size in job.micro_batch_sizes(world_size):
        yield Batch(micro_batch_size=size, accumulation_steps=job.global_batch_size // (world_size * size))


def search_spaces(problem: PlanningProblem, batch: Batch) -> tuple[Space, ...]:
    """Return the search spaces of a strategy; the best plan over all of them is the strategy's best plan.

    Under `osdp` each unit may take any layout, recompute or save, offload saved activations or keep them, hold
    gradients or reduce them. A single strategy gives all units the same layout; each combination of the other choices,
    the same for all blocks, is one space. `osdp` has one space. It has two on one device with a host, and if segments
    hold more memory beside recomputed blocks; the second space then contains the first, at a higher cost.

    Raises:
        HardwareError: the job puts states or activations on the host, but no host is known.
        ValueError: the strategy or a choice of the job is not possible here.
    """
    description, hardware = problem.description, problem.hardware
    _check_activations(description, problem.job)
    if problem.shards_whole:
        raise ValueError(
            f"strategy={problem.strategy.value} shards parameters, but {problem.job.optimizer.name} needs them whole;"
            " use osdp or ddp."
        )
    jobs = [problem.job]
    if problem.job.recompute is None and any(segment.held_bytes != Affine() for segment in description.segments):
        jobs.insert(0, replace(problem.job, recompute=False))
    shardings = _shardings(problem.strategy, hardware)
    choices = [
        choice
        for job in jobs
        for sharding in shardings
        for choice in _choices(sharding, replace(problem, job=job), batch)
    ]
    offloadable, shapes, policies = description.offloadable, shape_ids(description.units), description.recomputations
    kinds = [(shape, policies[i], i in offloadable) for i, shape in enumerate(shapes)]
    first_alike = [kinds.index(kind) for kind in kinds]  # units of one kind share their layouts
    spaces = []
    for choice in choices:
        layouts = {
            i: _layouts(description.units[i], policies[i], choice, problem.job, offloadable=i in offloadable)
            for i in set(first_alike)
        }
        spaces.append(tuple(layouts[i] for i in first_alike))
    if problem.job.communication != EXACT:
        spaces = with_wires(problem, shapes, spaces)
    return tuple(
        {tuple(map(id, space)): space for space in spaces}.values()
    )  # equal layouts are the same object, see `_product`


def _check_activations(description: ModelDescription, job: TrainingJob) -> None:
    if job.offload_activations and not description.offloadable:
        raise ValueError(
            "offload_activations=True, but no block of this model can offload its activations: the model recomputes"
            " them by itself, or they"
            " could not be traced; leave offload_activations to the planner."
        )
    if job.recompute and not (description.recomputable or description.recomputed_by_others):
        raise ValueError(
            "recompute=True, but no block of this model can be recomputed: it has batch normalisation, whose running"
            " statistics would be"
            " updated twice, or its own torch.Generator, or its recomputation could not be traced; leave recompute to"
            " the planner."
        )


def _shardings(strategy: Strategy, hardware: Hardware) -> list[_Allowed]:
    """Return the shardings of a strategy; if there are several, all units take the same one."""
    world_size, per_node = hardware.world_size, hardware.devices_per_node
    whole = (world_size,)
    stages = (per_node,) if 1 < per_node < world_size else ()
    match strategy:
        case Strategy.TWO_STAGE if not stages:
            raise ValueError(
                f"strategy=two_stage needs several nodes of several devices, not {hardware.nodes} of {per_node}; use"
                " fsdp, or start more."
            )
        case Strategy.HSDP if not divisors(world_size)[1:-1]:
            raise ValueError(
                f"strategy=hsdp needs a group size between 1 and {world_size}, the number of devices, that divides it,"
                " and there is"
                " none; use fsdp or ddp."
            )
        case _ if world_size == 1:  # one device frees nothing: backward needs parameters cast to lower precision
            return [_Allowed(shard_sizes=(1,), reshard_after_forward=False)]
        case Strategy.OSDP:
            return [_Allowed(shard_sizes=divisors(world_size), reshard_after_forward=None, stage_sizes=(1, *stages))]
        case Strategy.FSDP:
            return [_Allowed(shard_sizes=whole, reshard_after_forward=True)]
        case Strategy.DDP:
            return [_Allowed(shard_sizes=(1,), reshard_after_forward=reshard) for reshard in (True, False)]
        case Strategy.ZERO2:
            return [_Allowed(shard_sizes=whole, reshard_after_forward=False)]
        case Strategy.TWO_STAGE:
            return [_Allowed(shard_sizes=whole, reshard_after_forward=True, stage_sizes=stages)]
        case Strategy.HSDP:
            return [_Allowed(shard_sizes=(size,), reshard_after_forward=True) for size in divisors(world_size)[1:-1]]
    raise AssertionError(strategy)


def _choices(sharding: _Allowed, problem: PlanningProblem, batch: Batch) -> list[_Allowed]:
    """Return the allowed decisions beside the sharding: one value if units decide alone (`osdp`), else one per
    common choice.
    """
    job, hardware, several = problem.job, problem.hardware, batch.accumulation_steps > 1
    recomputes = (False, True) if job.recompute is None else (job.recompute,)
    offloads = _with_host("offload_activations", job.offload_activations, hardware)
    free = replace(
        sharding,
        reduces=(True,)
        if not several
        else (True, False)
        if job.reduce_every_micro_step is None
        else (job.reduce_every_micro_step,),
        activations=tuple(
            Activations(recomputation=Recomputation() if again else None, offloads=away)
            for away in offloads
            for again in recomputes
        ),
        saves_operators=job.recompute is None and problem.strategy is Strategy.OSDP,
        on_host=_with_host("host_offload", job.host_offload, hardware),
        states_on_host=_with_host("offload_optimizer", job.offload_optimizer, hardware),
    )
    if problem.strategy is not Strategy.OSDP:
        fixed = itertools.product(free.reduces, free.activations, free.on_host, free.states_on_host)
        return [
            replace(free, reduces=(reduce,), activations=(kept,), on_host=(host,), states_on_host=(states,))
            for reduce, kept, host, states in fixed
            if not (host and states)
        ]
    if (
        hardware.world_size == 1 and len(free.on_host) > 1
    ):  # one process uses FSDP2, which takes buffers, only with the host
        return [replace(free, on_host=(False,)), free]
    return [free]


def _with_host(name: str, asked: bool | None, hardware: Hardware) -> tuple[bool, ...]:
    """Return the allowed values of a setting that uses the host."""
    if hardware.host is None:
        if asked:
            raise HardwareError(
                f"{name}=True, but the host of {hardware.device.name} is not known; measure it by hf-osdp profile, or"
                f" leave {name} open."
            )
        return (False,)
    return (False, True) if asked is None else (asked,)


def _layouts(
    unit: UnitDescription, policies: tuple[Recomputation, ...], free: _Allowed, job: TrainingJob, *, offloadable: bool
) -> tuple[UnitLayout, ...]:
    """Return the allowed layouts of a unit."""
    able = []
    for choice in free.activations:
        away = choice.offloads and offloadable
        again = policies[: None if free.saves_operators and not away else 1] if choice.recomputes else ()
        able += [Activations(recomputation=policy, offloads=away) for policy in again or (None,)]
    # A unit called several times cannot hold gradients: FSDP2 would reduce the held sum in one call, and the new
    # gradient in another.
    always = not unit.trainable_numel or unit.span is GatherSpan.CALLS
    reduces = (True,) if always else free.reduces
    activations = tuple(dict.fromkeys(able))
    closed = replace(free, activations=activations, saves_operators=False, reduces=reduces)
    if job.optimizer.needs_whole and unit.trainable_numel > 0:
        closed = replace(closed, shard_sizes=(1,), stage_sizes=(1,))
    return _product(unit.span, closed)


@functools.lru_cache(maxsize=256)
def _product(span: GatherSpan, free: _Allowed) -> tuple[UnitLayout, ...]:
    """Return all combinations of the allowed decisions.

    Equal arguments give the same object, which comparisons of spaces rely on.
    """
    layouts = layouts_for(
        span, free.shard_sizes, reshard_after_forward=free.reshard_after_forward, stage_sizes=free.stage_sizes
    )
    places = itertools.product(free.on_host, free.states_on_host)
    distinct = dict.fromkeys((host, states and not host) for host, states in places)
    return tuple(
        replace(layout, reduce_every_micro_step=reduces, activations=kept, on_host=host, states_on_host=states)
        for layout, reduces, kept, (host, states) in itertools.product(
            layouts, free.reduces, free.activations, distinct
        )
    )
