"""Two emulated machines, without emulating them: bytes in theory, counters, who takes steps, verdicts, options,
refusals.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.two_machines import emulate
from benchmarks.two_machines.counters import sent_bytes
from benchmarks.two_machines.lineup import ALONE, STOCK
from benchmarks.two_machines.tables import cells_of, verdicts
from benchmarks.two_machines.theory import bytes_sent
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.plan import Plan
from tests.helpers.descriptions import transformer

MODEL = transformer(layers=2, hidden=64, vocabulary=512)
ROOT = sum(unit.numel for unit in MODEL.units[:2]) * 4  # kept gathered whatever is chosen
BLOCKS = sum(unit.numel for unit in MODEL.units[2:]) * 4
EMULATE = Path(emulate.__file__)
DEVICES = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     100       1    0    0    0     0          0         0      200       1    0    0    0     0       0          0
 veth0: 3000000     200    0    0    0     0          0         0 77509000     210    0    0    0     0       0          0
"""  # noqa: E501


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


def test_sent_bytes_are_the_ninth_number_of_the_interface():
    assert (sent_bytes("veth0", DEVICES), sent_bytes("lo", DEVICES)) == (77509000, 200)
    with pytest.raises(ValueError, match="no interface 'eth7'"):
        sent_bytes("eth7", DEVICES)


def found(**changes) -> dict:
    """One emulation of three rounds: DDP would be fastest, but does not fit the tighter limit."""

    def steps(seconds: float, sent: int) -> dict:
        rounds = [
            {"step_s": seconds * drift, "sent_bytes": [sent, sent - 5], "estimated_s": seconds}
            for drift in (0.9, 1, 1.2)
        ]
        return {"layout": "as it is", "theory_bytes": float(sent), "rounds": rounds}

    rows = {
        STOCK: steps(20.0, 1000), "fsdp": steps(14.0, 700), "hsdp": steps(9.0, 400), "ddp": steps(5.0, 600),
        "osdp": steps(9.2, 400),
        ALONE: steps(2.0, 0),
    } | changes  # fmt: skip
    fits = {name: {"entrant": name} for name in rows if name != ALONE}
    cells = [{**fits, "ddp": {"needs": 2**20}}, {**fits, "osdp": {"entrant": "ddp"}}]
    return {"experiment": {"rate": "100mbit", "limits": [2**19, 2**30]}, "rows": rows, "cells": cells}


def test_what_does_not_fit_is_not_beaten_and_beats_nobody():
    tight, wide = cells_of(found())
    assert tight.row("ddp") is None and tight.needs == {"ddp": 2**20}
    assert (tight.behind, wide.behind) == (pytest.approx(9.2 / 9.0), 1.0)
    assert tight.row("osdp").gain == pytest.approx(20 / 9.2)
    assert all(verdict.met for verdict in verdicts([tight, wide]))


@pytest.mark.parametrize(
    ("row", "missed"),
    [
        ({"osdp": {"step_s": 9.6}}, "1.07 times the fastest"),
        ({"hsdp": {"sent_bytes": [408, 400]}}, "at most 2.00% from theory"),
        ({STOCK: {"step_s": 18.0}}, "1.96 times torch's own"),
        ({"fsdp": {"estimated_s": 30.0}, "hsdp": {"estimated_s": 12.0}}, "from estimates on average"),
    ],
    ids=["choice", "bytes", "gain", "time"],
)
def test_every_aim_can_be_missed(row, missed):
    rows = found()["rows"]
    for name, changes in row.items():
        rows[name] = {**rows[name], "rounds": [{**one, **changes} for one in rows[name]["rounds"]]}
    judged = verdicts(list(cells_of(found(**rows))))
    assert [verdict.text for verdict in judged if not verdict.met and missed in verdict.text]


@pytest.mark.parametrize(
    ("refuses", "message"),
    [
        (
            'echo "unshare: Operation not permitted" >&2; exit 1',
            "namespaces are not permitted here (unshare: Operation not permitted)",
        ),
        (
            'case "$*" in *tbf*) echo "Unknown qdisc" >&2; exit 2;; esac',
            "(Unknown qdisc); it needs the modules veth and sch_tbf",
        ),
    ],
    ids=["namespaces", "kernel"],
)
def test_where_it_is_not_permitted_it_says_what_is_missing(refuses, message, tmp_path):
    for tool in emulate.TOOLS:
        (tmp_path / tool).write_text(f"#!/bin/sh\n{refuses if tool == 'unshare' else ''}\n")
        (tmp_path / tool).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, str(EMULATE), "--rate", "100mbit", "--", "x.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (emulate.NOT_PERMITTED, "")
    assert message in done.stderr and done.stderr.count("\n") == 1
