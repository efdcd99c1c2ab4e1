"""All ranks run one plan, or all stop with the same error."""

from __future__ import annotations

import functools

import pytest
import torch.distributed as dist

from hf_osdp.distributed.consensus import on_rank_zero
from hf_osdp.errors import DescriptionError, HardwareError, InfeasibleError, OSDPError, PlanError
from tests.helpers.distributed import run_ranks


class OwnPlanError(PlanError):
    """A subclass that other ranks may not know."""


ERRORS = {
    "infeasible": InfeasibleError("no plan fits", memory_limit_bytes=5, least_peak_bytes=9, remedies=("use 10 devices", "shorten")),
    "plan": PlanError("bad plan"),
    "description": DescriptionError("no block"),
    "hardware": HardwareError("no link"),
    "value": ValueError("bad\n value"),
    "subclass": OwnPlanError("odd plan"),
    "foreign": KeyError("wte"),
    "unpicklable": None,
    "interrupt": KeyboardInterrupt("stop"),
}


def run_cases():
    rank = dist.get_rank()
    calls = []
    results = {
        "result": on_rank_zero(lambda: calls.append(rank) or {"a": (1, 2)}),
        "calls": calls,
    }
    for name, error in ERRORS.items():
        results[name] = caught(functools.partial(on_rank_zero, functools.partial(fail, error)))
    results["still in step"] = on_rank_zero(lambda: "yes")
    return results


def fail(error):
    if error is None:
        return lambda: "a local function cannot be pickled"
    raise error


def caught(fn):
    try:
        return fn()
    except BaseException as error:
        return type(error), str(error), dict(vars(error)), type(error.__cause__)


@functools.cache
def outcome():
    return run_ranks(run_cases, 3)


def test_only_rank_0_runs_the_function():
    assert [found["result"] for found in outcome()] == [{"a": (1, 2)}] * 3
    assert [found["calls"] for found in outcome()] == [[0], [], []]


@pytest.mark.parametrize(
    "name, expected, message",
    [
        ("infeasible", InfeasibleError, "no plan fits"),
        ("plan", PlanError, "bad plan"),
        ("description", DescriptionError, "no block"),
        ("hardware", HardwareError, "no link"),
        ("value", ValueError, "bad value"),
        ("subclass", PlanError, "odd plan"),
        ("foreign", OSDPError, "Rank 0 failed with KeyError: 'wte'"),
    ],
)
def test_an_error_on_rank_0_is_raised_on_every_rank(name, expected, message):
    for rank, found in enumerate(outcome()):
        assert found[name][:2] == (expected, message)
        assert found[name][3] is (type(ERRORS[name]) if rank == 0 else type(None)), "rank 0 keeps the traceback"


def test_infeasible_keeps_its_attributes():
    for found in outcome():
        assert found["infeasible"][2] == {"memory_limit_bytes": 5, "least_peak_bytes": 9, "remedies": ("use 10 devices", "shorten")}


def test_what_cannot_travel_and_interrupts_end_every_rank():
    for rank, found in enumerate(outcome()):
        assert found["unpicklable"][0] is OSDPError
        assert found["interrupt"][0] is (KeyboardInterrupt if rank == 0 else OSDPError)
        assert found["still in step"] == "yes"


def test_one_process_needs_no_group():
    assert on_rank_zero(lambda: 3) == 3
    with pytest.raises(KeyError):
        on_rank_zero(lambda: {}["missing"])
