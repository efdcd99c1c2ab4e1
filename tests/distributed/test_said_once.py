"""Errors that every rank meets are printed by one; an error of one rank is printed by that rank."""

from __future__ import annotations

import contextlib
import io
import sys

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
