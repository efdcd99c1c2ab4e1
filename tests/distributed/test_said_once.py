"""Errors that every rank meets are printed by rank 0 first; an error of one rank is printed by that rank."""

from __future__ import annotations

import logging
import sys
import time

import pytest

from hf_osdp.distributed import said_once
from hf_osdp.errors import PlanError
from tests.helpers.distributed import run_ranks


@pytest.mark.parametrize(("rank", "local_rank", "waits_s"), [(0, 0, []), (1, 1, [10.0]), (8, 0, [5.0])])
def test_ranks_print_errors_of_this_package_after_rank_zero(monkeypatch, capsys, rank, local_rank, waits_s):
    for name, value in {"WORLD_SIZE": 16, "RANK": rank, "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, str(value))
    waited_s: list[float] = []
    monkeypatch.setattr(said_once.time, "sleep", waited_s.append)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    said_once.say_uncaught_once()
    for error in (PlanError("the plan\nis damaged"), RuntimeError("not ours")):
        try:
            raise error
        except Exception:
            sys.excepthook(*sys.exc_info())
    ours, *others = capsys.readouterr().err.splitlines()
    assert ours == "PlanError: the plan is damaged" and waited_s == waits_s
    assert others[0].startswith("Traceback") and others[-1] == "RuntimeError: not ours"


def told() -> list[str]:
    """What this rank logs of a plan that takes longer than it may take in silence, and of a quick one."""
    said_once._LONG_S, records = 0.1, []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    said_once._log.addHandler(handler)
    for seconds in (0.3, 0.0):
        with said_once.say_while_planning():
            time.sleep(seconds)
    return records


def test_rank_zero_alone_says_once_that_it_plans_for_long():
    first, other = run_ranks(told, 2, init=False)
    assert len(first) == 1 and "The others wait for its plan" in first[0] and other == []
