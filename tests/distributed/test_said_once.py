"""Errors that every rank meets are printed by one; an error of one rank is printed by that rank."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import time

import pytest

from hf_osdp.distributed import said_once
from hf_osdp.distributed.launcher import launched_rank
from hf_osdp.distributed.process_group import check_ranks
from hf_osdp.errors import PlanError
from tests.helpers.distributed import run_ranks


def printed(alike: bool, own: bool) -> str:
    """What this rank prints of an uncaught error."""
    said_once._RANK_ZERO_FIRST_S = 1.0
    check_ranks()
    said_once.say_uncaught_once()
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        try:
            raise (PlanError if own else RuntimeError)("the plan\nis damaged" if alike else f"rank {launched_rank()}")
        except (PlanError, RuntimeError):
            sys.excepthook(*sys.exc_info())
    return text.getvalue()


@pytest.mark.parametrize(
    ("alike", "own", "expected"),
    [
        (True, True, ["PlanError: the plan is damaged\n", ""]),
        (False, True, ["PlanError: rank 0\n", "PlanError: rank 1\n"]),
    ],
)
def test_ranks_print_errors_of_this_package_once(alike, own, expected):
    assert run_ranks(printed, 2, alike, own, init=False) == expected


def test_ranks_print_other_errors_with_their_traceback():
    assert all("Traceback" in text for text in run_ranks(printed, 2, True, False, init=False))


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
