"""The search equals brute force where random problems seldom are: many meshes, long rows, bytes at the very end."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hf_osdp.planner.affine import Affine
from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.cost.timing import estimate_time
from hf_osdp.planner.description import (
    DType,
    GatherSpan,
    ModelDescription,
    PhaseCost,
)
from hf_osdp.planner.hardware import Backend
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.timeline import SHORT_ROW, BatchCosts, build_timeline
from hf_osdp.planner.space import batches, search_spaces
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep, Precision, TrainingJob
from tests.helpers.descriptions import at_random
from tests.helpers.hardware import toy_hardware
from tests.helpers.problems import problem
from tests.helpers.random_problems import Planned, every_plan, of_many_ranks, some_hardware
from tests.helpers.sampling import slow_but
from tests.oracle.test_claims import check


@pytest.mark.parametrize("seed", slow_but(range(160), daily=(2, 3, 4, 8, 10)))
def test_search_equals_brute_force_where_communicators_take_memory(seed):
    asked = of_many_ranks(seed)
    check(seed, asked, every_plan(asked))


def row_of(seed: int, blocks: int) -> ModelDescription:
    """A root and equal blocks in a row; the root may come before and after."""
    small = at_random(seed, kinds=1, blocks=1)
    root, block = small.units
    units = [
        replace(block, fqn=f"b{i}", parameters=tuple(replace(p, name=f"b{i}.{p.name}") for p in block.parameters))
        for i in range(blocks)
    ]
    segments = [
        part for segment in small.segments
        for part in ([replace(segment, unit=1 + i) for i in range(blocks)] if segment.unit == 1 else [segment])
    ]  # fmt: skip
    return replace(small, units=(root, *units), segments=tuple(segments))


def plans_by_rule(asked: PlanningProblem) -> Iterator[Planned]:
    """Every plan in which backward meets the options of equal units in their order."""
    description, hardware, job = asked.description, asked.hardware, asked.job
    (batch,) = batches(job, hardware.world_size)
    (space,) = search_spaces(asked, batch)
    groups = [group for group in build_timeline(BatchCosts(asked, batch), space).groups if 0 not in group.units]
    assert max(len(group.units) for group in groups) > 1, "the rule has nothing to lay out"
    rows = [itertools.combinations_with_replacement(group.options, len(group.units)) for group in groups]
    for root, *parts in itertools.product(space[0], *rows):
        taken = {
            unit: option.layout
            for group, options in zip(groups, parts, strict=True)
            for unit, option in zip(reversed(group.units), options, strict=True)
        }
        layouts = (root, *(taken[unit] for unit in sorted(taken)))
        memory = estimate_memory(description, layouts, hardware.world_size, job, batch)
        step_s = estimate_time(description, layouts, hardware, job, batch).step_s
        yield Planned(memory.on(hardware), step_s, memory.host_bytes, batch, layouts)


@pytest.mark.parametrize("seed", slow_but(range(40), daily=(7,)))
def test_plan_of_a_long_row_is_optimal_by_the_rule(seed):
    """In rows of more than SHORT_ROW equal units; another order may be faster."""
    dice = random.Random(seed)
    hardware = toy_hardware(
        1, 2, intra=(1e-6, dice.choice([1e7, 1e8])), backend=dice.choice(list(Backend)), margin=0.0
    )
    job = TrainingJob(
        global_batch_size=2 * dice.choice([1, 2]), micro_batch_size=1,
        reduce_every_micro_step=dice.choice([True, False]), precision=Precision.named(dice.choice(["no", "bf16"])),
        optimizer=OptimizerSpec(states=dice.choice([0, 2]), step=dice.choice(list(OptimizerStep))),
    )  # fmt: skip
    # where compute overlaps, the first block has another window
    description = row_of(seed, SHORT_ROW + 2 if hardware.backend.overlaps else SHORT_ROW + 1)
    asked = problem(description, hardware, job)
    check(seed, asked, list(plans_by_rule(asked)))


# Before the level between two moments could exceed the limit, instances 1 and 11 got a slower plan, or none.
@pytest.mark.parametrize("seed", slow_but(range(60), daily=(1, 11)))
def test_search_equals_brute_force_where_only_root_gradients_count(seed):
    """Nothing is saved or temporary, so that the level is highest just before the last reductions."""
    dice = random.Random(seed)
    nodes, per_node = dice.choice([(1, 2), (1, 3), (1, 5)])
    hardware = replace(some_hardware(dice), nodes=nodes, devices_per_node=per_node, host=None)
    narrow, wide = DType.BFLOAT16, DType.FLOAT32
    precision = dice.choice([
        Precision(), Precision.named("bf16"), Precision(compute=wide, reduce=narrow), Precision(reduce=wide),
        Precision(compute=narrow),
    ])  # fmt: skip
    states, step = dice.choice([0, 0, 2]), dice.choice([OptimizerStep.FUSED, OptimizerStep.FOR_LOOP])
    job = TrainingJob(global_batch_size=hardware.world_size * 2, micro_batch_size=1, recompute=False)
    job = replace(job, precision=precision, optimizer=OptimizerSpec(states=states, step=step))
    description = at_random(seed, kinds=1, blocks=1, tied=dice.random() < 0.3)
    dtype, (first, *_) = dice.choice([narrow, wide]), description.segments
    units = list(description.units)
    for index, unit in enumerate(units):
        units[index] = replace(unit, parameters=tuple(replace(p, dtype=dtype) for p in unit.parameters))
        units[index] = replace(units[index], ends_late=index == first.unit and unit.span is GatherSpan.USE)
    nothing = dict(saved_bytes=Affine(), gradient_bytes=Affine(), forward=PhaseCost(), backward=PhaseCost())
    segments = tuple(replace(segment, **nothing) for segment in description.segments)
    description = replace(description, units=tuple(units), segments=segments)
    asked = problem(description, hardware, job)
    check(seed, asked, every_plan(asked))
