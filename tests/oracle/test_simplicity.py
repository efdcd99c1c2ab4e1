"""Under `simplicity`, the plan has the least sum of step time and prices of all plans of the fastest one's layouts
at its batch.
"""

from dataclasses import replace

import pytest

from hf_osdp.planner.cost.units import shape_ids
from hf_osdp.planner.decision import meshes_of
from hf_osdp.planner.search.search import search
from tests.helpers.problems import problem
from tests.oracle.test_brute_force import every_layouts, instance, of_many_ranks


def structures_of(description) -> list:
    return list(zip(shape_ids(description.units), description.recomputations, strict=True))


def parts(description, layouts, world_size: int) -> int:
    """Layouts of units of equal structure, meshes, and the host."""
    return (
        len(set(zip(structures_of(description), layouts, strict=True)))
        + len({mesh for one in layouts for mesh in meshes_of(one.shard_size, one.stage_size, world_size)})
        + any(one.uses_host for one in layouts)
    )


def check(description, hardware, job, dice) -> bool:
    """Hold searches against all plans; return whether some plan was simpler than the fastest."""
    plans, structures, simpler = list(every_layouts(description, hardware, job)), structures_of(description), False
    for limit in {dice.choice(plans)[1] for _ in range(3)}:
        asked = problem(description, hardware, job, hardware.limit_for(limit))
        fastest = search(asked)
        own = set(zip(structures, (unit.layout for unit in fastest.plan.units), strict=True))
        its_batch = replace(job, micro_batch_size=fastest.plan.micro_batch_size)
        at_its_batch = list(every_layouts(description, hardware, its_batch))
        for simplicity in (0.001, 0.1):
            price_s = simplicity * fastest.time.step_s
            result = search(replace(asked, simplicity=simplicity))
            layouts = [unit.layout for unit in result.plan.units]
            best = min(
                step_s + price_s * parts(description, one, hardware.world_size)
                for one, peak, step_s in at_its_batch
                if peak <= limit and own.issuperset(zip(structures, one, strict=True))
            )
            found = result.time.step_s + price_s * parts(description, layouts, hardware.world_size)
            assert found == pytest.approx(best, rel=1e-6)
            assert result.plan.proven_optimal and result.plan.peak_bytes <= limit
            assert (result.plan == fastest.plan) is (not result.plan.simplified)
            simpler |= bool(result.plan.simplified)
    return simpler


TENS = [pytest.param(instance, range(first, first + 10), marks=pytest.mark.slow) for first in range(0, 120, 10)]
MESHES = [pytest.param(of_many_ranks, range(first, first + 10), marks=pytest.mark.slow) for first in range(0, 60, 10)]


@pytest.mark.parametrize(("make", "seeds"), [(instance, (3,)), (of_many_ranks, (3,)), *TENS, *MESHES])
def test_plan_under_simplicity_is_the_best_of_the_fastest_ones_layouts(make, seeds):
    instances = [one for one in map(make, seeds) if next(every_layouts(*one[:3]), None) is not None]
    simpler = [check(*one) for one in instances]
    assert any(simpler) or make is of_many_ranks
