"""Two emulated machines, without emulating them: bytes in theory, counters, who takes steps, verdicts, options,
refusals.
"""

from __future__ import annotations

import pytest

from benchmarks.two_machines.theory import bytes_sent
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.plan import Plan
from tests.helpers.descriptions import transformer

MODEL = transformer(layers=2, hidden=64, vocabulary=512)
ROOT = sum(unit.numel for unit in MODEL.units[:2]) * 4  # kept gathered whatever is chosen
BLOCKS = sum(unit.numel for unit in MODEL.units[2:]) * 4


def plan_of(shard_size: int, *, world: int = 4, steps: int = 1, **choice) -> Plan:
    choices = [UnitLayout(**{"shard_size": shard_size, "reshard_after_forward": True, **choice})] * len(MODEL.units)
    return Plan.of(MODEL, choices, Batch(micro_batch_size=1, accumulation_steps=steps), world_size=world)


@pytest.mark.parametrize(
    ("plan", "root", "blocks"),
    [
        (plan_of(4), 0.75 + 1.5, 2 * 0.75 + 1.5),
        (plan_of(4, reshard_after_forward=False), 0.75 + 1.5, 0.75 + 1.5),
        (plan_of(4, stage_size=2), 0.5 + 1.0, 2 * 0.5 + 1.0),
        (plan_of(2), 1.0, 1.0),
        (plan_of(1), 1.5, 1.5),
        (plan_of(6, world=6, reshard_after_forward=False), 5 / 2, 5 / 2),
        (plan_of(6, world=6, reshard_after_forward=False, stage_size=2), 2.0, 2.0),
        (plan_of(2, world=6), 4 / 3, 4 / 3),
    ],
    ids=[
        "full shard",
        "zero2",
        "two stages",
        "hsdp",
        "ddp",
        "three nodes",
        "three nodes, two stages",
        "three nodes, hsdp",
    ],
)
def test_bytes_of_nodes_of_two_are_those_of_the_table(plan, root, blocks):
    padded = 1e-3 if plan.world_size == 4 else 0.02
    assert bytes_sent(plan, MODEL, 2) == pytest.approx(root * ROOT + blocks * BLOCKS, rel=padded)


def test_groups_inside_a_node_send_nothing_and_micro_steps_gather_again():
    assert bytes_sent(plan_of(4), MODEL, 4) == 0
    once, held, reduced = (
        bytes_sent(plan_of(4, steps=steps, reduce_every_micro_step=reduces), MODEL, 2)
        for steps, reduces in ((1, True), (3, False), (3, True))
    )
    gathers = 0.75 * (ROOT + 2 * BLOCKS)
    assert (held - once, reduced - once) == (2 * gathers, 2 * gathers + 2 * 1.5 * (ROOT + BLOCKS))
