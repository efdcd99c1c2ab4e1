"""Under `simplicity`, the plan has the least sum of step time and prices of all plans of the fastest one's layouts
at its batch.
"""

import random
from dataclasses import replace

import pytest

from hf_osdp.planner.cost.units import shape_ids
from hf_osdp.planner.decision import meshes_of
from hf_osdp.planner.problem import PlanningProblem, Strategy
from hf_osdp.planner.search.search import search
from tests.helpers.random_problems import every_plan, of_many_ranks, wide
from tests.helpers.sampling import slow_but


def structures_of(asked: PlanningProblem) -> list:
    return list(zip(shape_ids(asked.description.units), asked.description.recomputations, strict=True))


def parts(asked: PlanningProblem, layouts) -> int:
    """Layouts of units of equal structure, meshes, and the host."""
    world_size = asked.hardware.world_size
    return (
        len(set(zip(structures_of(asked), layouts, strict=True)))
        + len({mesh for one in layouts for mesh in meshes_of(one.shard_size, one.stage_size, world_size)})
        + any(one.uses_host for one in layouts)
    )


def check(asked: PlanningProblem, dice: random.Random) -> bool:
    """Hold searches against all plans; return whether some plan was simpler than the fastest."""
    plans, structures, simpler = every_plan(asked), structures_of(asked), False
    for limit in {dice.choice(plans).peak for _ in range(3)} if plans else ():
        limited = replace(asked, memory_limit_bytes=asked.hardware.limit_for(limit))
        fastest = search(limited)
        own = set(zip(structures, (unit.layout for unit in fastest.plan.units), strict=True))
        alike = [
            (one.step_s, parts(asked, one.layouts)) for one in plans
            if one.batch == fastest.plan.batch and one.peak <= limit
            and own.issuperset(zip(structures, one.layouts, strict=True))
        ]  # fmt: skip
        for simplicity in (0.001, 0.1):
            price_s = simplicity * fastest.time.step_s
            result = search(replace(limited, simplicity=simplicity))
            found = result.time.step_s + price_s * parts(asked, [unit.layout for unit in result.plan.units])
            assert found == pytest.approx(min(step_s + price_s * count for step_s, count in alike), rel=1e-6)
            assert result.plan.gap == fastest.plan.gap and result.plan.peak_bytes <= limit
            assert (result.plan == fastest.plan) is (not result.plan.simplified)
            simpler |= bool(result.plan.simplified)
    return simpler


TENS = [(make, range(first, first + 10)) for make in (wide, of_many_ranks) for first in range(0, 120, 10)]
DAILY = [(wide, range(40, 44)), (of_many_ranks, range(3, 4))]


@pytest.mark.parametrize(("make", "seeds"), slow_but([*DAILY, *TENS], daily=DAILY))
def test_plan_under_simplicity_is_the_best_of_the_fastest_ones_layouts(make, seeds):
    problems = [(make(seed), random.Random(seed)) for seed in seeds]
    simpler = [check(asked, dice) for asked, dice in problems if asked.strategy is Strategy.OSDP]
    assert any(simpler) or (make, seeds) != DAILY[0]
