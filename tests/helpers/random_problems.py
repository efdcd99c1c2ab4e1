"""Small random problems with every kind of choice that a planner may have, and all of their plans."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

from hf_osdp.planner.affine import Affine
from hf_osdp.planner.cost.memory import bytes_needed
from hf_osdp.planner.cost.timing import UnitTimer
from hf_osdp.planner.decision import Batch, Space, UnitLayout
from hf_osdp.planner.description import DType, GatherSpan, ModelDescription, PhaseCost, Segment, UnitDescription
from hf_osdp.planner.hardware import Backend, Hardware, HostSpec
from hf_osdp.planner.optimizers import ADAFACTOR, LOW_BIT
from hf_osdp.planner.problem import PlanningProblem, Strategy
from hf_osdp.planner.space import batches, search_spaces
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep, Precision, TrainingJob
from hf_osdp.planner.wire import WireFormat
from tests.helpers.descriptions import at_random, linear_envelope, with_frozen
from tests.helpers.hardware import host_of, toy_hardware
from tests.helpers.problems import problem

MOST_PLANS = 4_000
"""Over all batches and spaces of a problem."""
WORLDS = [(1, 1), *[(1, 2), (2, 1), (1, 3), (1, 4), (2, 2)] * 2, (1, 6), (2, 3)]
PRECISIONS = [
    Precision(), Precision(), Precision.named("bf16"), Precision.named("bf16"), Precision(compute=DType.BFLOAT16),
    Precision(reduce=DType.BFLOAT16), Precision(compute=DType.FLOAT32, reduce=DType.FLOAT32),
]  # fmt: skip
FEWER_CHOICES: list[dict[str, Any]] = [
    {"offload_activations": False}, {"host_offload": False}, {"offload_optimizer": False},
    {"reduce_every_micro_step": True}, {"recompute": False}, {"communication": "exact"}, {"micro_batch_size": 1},
]  # fmt: skip


class Planned(NamedTuple):
    """A plan: what it needs, and what it takes."""

    peak: int
    """On a device, in bytes."""
    step_s: float
    host: int
    batch: Batch
    layouts: tuple[UnitLayout, ...]


def wide(seed: int) -> PlanningProblem:
    """Return a problem of at most `MOST_PLANS` plans without a limit. Each kind of model, machine and job that changes
    memory or time is in the draw: choices are taken away at random until there are few enough plans.
    """
    dice = random.Random(f"wide {seed}")
    hardware = some_hardware(dice)
    recomputable = dice.random() < 0.5
    job = _job(dice, hardware, offloads=recomputable)
    options = dict(
        kinds=dice.choice([1, 1, 2, 3]), tied=dice.random() < 0.4, late=dice.random() < 0.2,
        stacks=dice.random() < 0.15, recomputable=recomputable,
    )  # fmt: skip
    changes, most, strategy = dice.randrange(2**30), dice.randint(1, 4), Strategy.OSDP
    if dice.random() < 0.1:
        strategy = dice.choice([Strategy.FSDP, Strategy.DDP, Strategy.ZERO2])
    fewer = [*FEWER_CHOICES]
    dice.shuffle(fewer)
    for blocks in range(most, 0, -1):
        made = at_random(seed, blocks=blocks, **{**options, "kinds": min(options["kinds"], blocks)})
        description = _changed(made, random.Random(changes))
        if job.optimizer.matrices:
            shapes = sorted({p.shape for unit in description.units for p in unit.trainable if len(p.shape) == 2})
            job = replace(job, optimizer=replace(job.optimizer, matrices=tuple(shapes[::2])))
        if strategy is not Strategy.OSDP and job.optimizer.needs_whole:
            job = replace(job, optimizer=OptimizerSpec())
        asked = problem(description, hardware, job, strategy=strategy)
        if count(asked) <= MOST_PLANS:
            return asked
    for change in fewer:
        allowed = {name: value for name, value in change.items() if getattr(job, name) in (None, *WireFormat)}
        asked = replace(asked, job=replace(job := replace(job, **allowed)))
        if count(asked) <= MOST_PLANS:
            return asked
    small = replace(hardware, nodes=1, devices_per_node=min(2, hardware.world_size))
    job = replace(job, global_batch_size=small.world_size * (2 if job.global_batch_size > hardware.world_size else 1))
    return replace(asked, hardware=small, job=job)


def some_hardware(dice: random.Random) -> Hardware:
    nodes, per_node = dice.choice(WORLDS)
    hardware = toy_hardware(
        nodes, per_node, intra=(dice.choice([0.0, 1e-6]), dice.choice([1e7, 1e8])), backend=dice.choice(list(Backend)),
        host=some_host(dice) if dice.random() < 0.4 else None, margin=dice.choice([None, 0.0, 0.0, 0.1]),
    )  # fmt: skip
    device = replace(
        hardware.device, reserved_bytes=dice.choice([0, 0, 5000]), operator_s=dice.choice([0.0, 1e-7, 1e-6]),
        communicator_bytes=dice.choice([0, 0, 0, 1, 300, 2000, 20_000]),
        flops_per_s=dict.fromkeys(DType, dice.choice([1e9, 1e10])),
    )  # fmt: skip
    return replace(hardware, device=device)


def some_host(dice: random.Random) -> HostSpec:
    """Sometimes too small for all states."""
    memory, back, update = dice.choice([20_000, 10**9, 10**9]), dice.choice([1e7, 1e8]), dice.choice([1e7, 1e9])
    return host_of(memory, to_device=back, to_host=1e7, update=update)


def of_many_ranks(seed: int) -> PlanningProblem:
    """A problem whose ranks take many meshes, whose communicators take memory."""
    dice = random.Random(seed)
    nodes, per_node = dice.choice([(1, 6), (1, 8), (2, 4), (4, 2), (2, 8), (1, 12)])
    hardware = replace(some_hardware(dice), nodes=nodes, devices_per_node=per_node, host=None)
    reserved = dict(reserved_bytes=dice.choice([0, 5000]), communicator_bytes=dice.choice([1, 300, 2000, 20_000]))
    hardware = replace(hardware, device=replace(hardware.device, **reserved))
    optimizer = OptimizerSpec(states=2, step=OptimizerStep.FOREACH)
    job = TrainingJob(global_batch_size=hardware.world_size, recompute=False, optimizer=optimizer)
    return problem(at_random(seed, kinds=2, blocks=2, tied=dice.random() < 0.5), hardware, job)


def _job(dice: random.Random, hardware: Hardware, *, offloads: bool) -> TrainingJob:
    kind, step, host = dice.random(), dice.choice(list(OptimizerStep)), hardware.host is not None
    optimizer = OptimizerSpec(states=dice.choice([0, 1, 2]), step=step)
    if kind < 0.1:
        optimizer = ADAFACTOR
    elif kind < 0.2:
        optimizer = replace(dice.choice(list(LOW_BIT.values())), step=step)
    elif kind < 0.3:
        optimizer = replace(optimizer, matrices=((1, 1),), loop_scratch=0.0)  # later those of the model
    ranks, states = hardware.world_size, dice.random()
    return TrainingJob(
        global_batch_size=ranks * dice.choice([1, 2, 2, 4, 6]), micro_batch_size=dice.choice([None, None, 1]),
        precision=dice.choice(PRECISIONS), optimizer=optimizer, holds_outputs=dice.random() < 0.2,
        clips_gradients=dice.random() < 0.3, reduce_every_micro_step=dice.choice([None, None, True, False]),
        recompute=dice.choice([None, None, None, False, True]) if offloads else dice.choice([None, False]),
        communication=dice.choice(list(WireFormat)) if dice.random() < 0.15 else "exact",
        host_offload=(True if states < 0.1 else None if states < 0.5 else False) if host else None,
        offload_optimizer=(False if states < 0.5 else True if states < 0.6 else None) if host else None,
        offload_activations=dice.choice([None, None, False, True]) if host and offloads else None,
    )  # fmt: skip


def _changed(description: ModelDescription, dice: random.Random) -> ModelDescription:
    """Return the model with some units frozen, in another dtype or never run, larger or without a root, and with all
    that segments may keep and hold.
    """
    if dice.random() < 0.15 and len(description.units) > 2:
        description = without_root(description)
    units = []
    for unit in description.units:
        if unit.span is GatherSpan.STEP and dice.random() < 0.5:  # a last norm, which hardly costs to replicate
            few = (dice.randint(1, 6), dice.randint(1, 4))
            unit = replace(unit, parameters=tuple(replace(p, shape=(*p.shape[:-2], *few)) for p in unit.parameters))
        if dice.random() < 0.15:
            unit = with_frozen(unit)
        if dice.random() < 0.2:
            dtype = dice.choice([DType.BFLOAT16, DType.FLOAT32])
            unit = replace(unit, parameters=tuple(replace(p, dtype=dtype) for p in unit.parameters))
        if dice.random() < 0.1:  # some parameters keep the dtype in which others are cast
            first, *others = unit.parameters
            unit = replace(unit, parameters=(replace(first, keeps_dtype=True), *others))
        units.append(unit)
    last, segments = len(units), description.segments
    if dice.random() < 0.1:  # such as a tower that this task does not use
        idle = replace(units[-1], fqn="idle", module_names=("idle",), shared=(), ends_late=False)
        names = tuple(replace(p, name=f"idle.{p.name}") for p in idle.parameters)
        units.append(replace(idle, parameters=names, span=dice.choice(list(GatherSpan))))
        assert last == len(units) - 1
    if dice.random() < 0.5:  # a loss of many logits
        *others, head = segments
        more = dict(peak_bytes=linear_envelope(constant=dice.randint(0, 9000), per_sample=dice.randint(0, 9000)))
        loss = dice.choice(["forward", "backward"])
        segments = (*others, replace(head, **{loss: replace(getattr(head, loss), **more)}))
    if dice.random() < 0.5:
        segments = tuple(segment.each(lambda costs: _keeping(costs, dice)) for segment in segments)
    description = replace(
        description, units=tuple(units), segments=segments, buffer_bytes=dice.choice([0, 13]),
        other_bytes=dice.choice([0, 0, 7000]), input_bytes=Affine(per_sample=dice.choice([0, 17])),
        output_bytes=Affine(per_sample=dice.choice([0, 19, 1000])),
    )  # fmt: skip
    return enlarged(description) if dice.random() < 0.3 else description


def _keeping(costs: Segment, dice: random.Random) -> Segment:
    """Return the segment keeping something until the next step, with a backward that goes on after its last gradient,
    and takes half where autograd adds gradients.
    """
    more = {name: Affine(per_sample=dice.choice([0, 0, 300, 3000])) for name in ("kept_bytes", "arrival_bytes")}
    adding = costs.backward.peak_bytes.scaled(0.5, constants=True)
    return replace(costs, backward=replace(costs.backward, adding_bytes=adding), **more)


def without_root(description: ModelDescription) -> ModelDescription:
    """Return the model without its root: where nothing else is shared, no unit is gathered for the whole step."""
    assert description.units[0].span is GatherSpan.STEP
    segments = tuple(
        s.each(lambda costs: replace(costs, unit=costs.unit - 1)) for s in description.segments if s.unit != 0
    )
    return replace(description, units=description.units[1:], segments=segments)


def enlarged(description: ModelDescription, factor: int = 64) -> ModelDescription:
    """The model with each dimension of parameters `factor` times as long, and all bytes by its square: numbers of the
    size of real models, which the solver sees in coarse units.
    """

    def larger(costs: Segment | PhaseCost):
        named = {field.name: getattr(costs, field.name) for field in fields(costs) if field.name.endswith("_bytes")}
        return replace(costs, **{name: one and one.scaled(factor**2, constants=True) for name, one in named.items()})

    def whole(segment: Segment) -> Segment:
        return replace(larger(segment), forward=larger(segment.forward), backward=larger(segment.backward))

    def unit(one: UnitDescription) -> UnitDescription:
        return replace(
            one, parameters=tuple(replace(p, shape=tuple(n * factor for n in p.shape)) for p in one.parameters)
        )

    return replace(
        description, units=tuple(map(unit, description.units)),
        segments=tuple(segment.each(whole) for segment in description.segments),
    )  # fmt: skip


def spaces(asked: PlanningProblem) -> Iterator[tuple[Batch, Space]]:
    """Yield the spaces of each batch; under `osdp` the widest alone, which contains the others."""
    for batch in batches(asked.job, asked.hardware.world_size):
        found = search_spaces(asked, batch)
        yield from ((batch, space) for space in (found[-1:] if asked.strategy is Strategy.OSDP else found))


def count(asked: PlanningProblem) -> int:
    """Return the number of all plans."""
    return sum(math.prod(map(len, space)) for _, space in spaces(asked))


def plans_of(asked: PlanningProblem, batch: Batch, space: Space) -> Iterator[Planned]:
    """Yield every plan of a space that the host has room for."""
    description, hardware = asked.description, asked.hardware
    timer = UnitTimer(description, hardware, asked.job, batch)
    most = math.inf if hardware.host is None else hardware.host.memory_bytes
    for layouts in itertools.product(*space):
        needed = bytes_needed(description, layouts, hardware, asked.job, batch)
        if needed.host <= most:
            times = [timer(index, one) for index, one in enumerate(layouts)]
            step_s = max(math.fsum(one.total_s for one in times), math.fsum(one.issued_s for one in times))
            yield Planned(needed.device, step_s, needed.host, batch, layouts)


def every_plan(asked: PlanningProblem) -> list[Planned]:
    """Return every plan of a problem, whatever the limit."""
    return [plan for batch, space in spaces(asked) for plan in plans_of(asked, batch, space)]
