"""The search space of `osdp`, and the single strategies (DDP, FSDP and others) as small parts of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import refuse_first
from .affine import Affine
from .cost.placement import host_of
from .cost.units import shape_ids
from .decision import Batch, Space, UnitLayout, layouts_for
from .description import GatherSpan, UnitDescription
from .hardware import Hardware
from .offered_wires import with_wires
from .placement import ACTIVATION_OPTION, Activations, Place, activation_choices
from .problem import PlanningProblem, Strategy
from .training_job import EXACT, TrainingJob, divisors


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
    places: tuple[Place, ...] = (Place(),)


def batches(job: TrainingJob, world_size: int) -> Iterator[Batch]:
    """Yield every pair of micro-batch size and accumulation steps that gives the global batch."""
    for size in job.micro_batch_sizes(world_size):
        yield Batch(micro_batch_size=size, accumulation_steps=job.global_batch_size // (world_size * size))


def search_spaces(problem: PlanningProblem, batch: Batch) -> tuple[Space, ...]:
    """Return the search spaces of a strategy; the best plan over all of them is the strategy's best plan.

    Under `osdp` each unit may take any layout, place and treatment of activations, and hold gradients or reduce them.
    A single strategy gives all units the same layout; each combination of the other choices, the same for all blocks,
    is one space. `osdp` has one space, or two if segments hold more memory beside recomputed blocks; the second space
    then contains the first, at a higher cost.

    Raises:
        HardwareError: the job puts states or activations on the host, but no host is known.
        ValueError: the strategy or a choice of the job is not possible here.
    """
    description, hardware, choices = problem.description, problem.hardware, activation_choices(problem.description)
    _refuse_impossible(problem, choices)
    jobs = [problem.job]
    if problem.job.recompute is None and any(segment.held_bytes != Affine() for segment in description.segments):
        jobs.insert(0, replace(problem.job, recompute=False))
    shardings = _shardings(problem.strategy, hardware)
    if asked := problem.job.asked:
        host_of(hardware, asked[0])
    every = [
        allowed
        for job in jobs
        for sharding in shardings
        for allowed in _choices(sharding, replace(problem, job=job), batch)
    ]
    kinds = list(zip(shapes := shape_ids(description.units), choices, strict=True))
    first_alike = [kinds.index(kind) for kind in kinds]  # units of one kind share their layouts
    spaces = []
    for allowed in every:
        layouts = {i: _layouts(description.units[i], choices[i], allowed, problem.job) for i in set(first_alike)}
        spaces.append(tuple(layouts[i] for i in first_alike))
    if problem.job.communication != EXACT:
        spaces = with_wires(problem, shapes, spaces)
    return tuple(
        {tuple(map(id, space)): space for space in spaces}.values()
    )  # equal layouts are the same object, see `_product`


def _refuse_impossible(problem: PlanningProblem, choices: Sequence[Sequence[Activations]]) -> None:
    description, job = problem.description, problem.job
    refuse_first({
        f"{ACTIVATION_OPTION}=True, but no block of this model can have its activations on the host: it recomputes"
        f" them by itself, or they could not be traced; leave {ACTIVATION_OPTION} to the planner.":
            ACTIVATION_OPTION in job.asked and not any(one != one.kept for own in choices for one in own),
        "recompute=True, but no block of this model can be recomputed: it has batch normalisation, whose running"
        " statistics would be updated twice, its own torch.Generator, or a cache that it fills, or its recomputation"
        " could not be traced; leave recompute to the planner.":
            job.recompute and not (description.recomputable or description.recomputed_by_others),
        f"strategy={problem.strategy.value} shards parameters, but {job.optimizer.name} needs them whole; use osdp or"
        " ddp.": problem.shards_whole,
    })  # fmt: skip


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
            return [_Allowed(shard_sizes=(1,), reshard_after_forward=True)]
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
    job, is_free, asked = problem.job, problem.strategy is Strategy.OSDP, problem.job.reduce_every_micro_step
    recomputes = (False, True) if job.recompute is None else (job.recompute,)
    activations, places = job.allowed(recomputes, has_host=problem.hardware.host is not None, alike=not is_free)
    reduces = (True,) if batch.accumulation_steps == 1 else (True, False) if asked is None else (asked,)
    if is_free:
        some = job.recompute is None
        return [replace(sharding, reduces=reduces, activations=activations, saves_operators=some, places=places)]
    fixed = itertools.product(reduces, activations, places)
    return [replace(sharding, reduces=(one,), activations=(kept,), places=(place,)) for one, kept, place in fixed]


def _layouts(
    unit: UnitDescription, choices: tuple[Activations, ...], free: _Allowed, job: TrainingJob
) -> tuple[UnitLayout, ...]:
    """Return the allowed layouts of a unit."""
    able = (one.nearest(choices, every_policy=free.saves_operators) for one in free.activations)
    reduces = free.reduces if unit.trainable_numel else (True,)
    activations = tuple(dict.fromkeys(itertools.chain(*able)))
    closed = replace(free, activations=activations, saves_operators=False, reduces=reduces)
    if job.optimizer.needs_whole and unit.trainable_numel > 0:
        closed = replace(closed, shard_sizes=(1,), stage_sizes=(1,))
    return _product(unit.span, closed)


@functools.lru_cache(maxsize=256)
def _product(span: GatherSpan, free: _Allowed) -> tuple[UnitLayout, ...]:
    """Return all combinations of the allowed decisions.

    Equal arguments give the same object, which comparisons of spaces rely on.
    """
    places = (
        layouts_for(
            span, free.shard_sizes, reshard_after_forward=free.reshard_after_forward, stage_sizes=free.stage_sizes,
            place=place,
        )
        for place in free.places
    )  # fmt: skip
    layouts = (
        replace(layout, reduce_every_micro_step=reduces, activations=kept)
        for layout, reduces, kept in itertools.product(itertools.chain(*places), free.reduces, free.activations)
    )
    return tuple(dict.fromkeys(layouts))
