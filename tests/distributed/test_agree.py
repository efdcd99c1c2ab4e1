"""All ranks run one plan, or all stop with the same error."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch.distributed as dist

from hf_osdp.distributed.consensus import broadcast_plan, on_rank_zero
from hf_osdp.errors import DescriptionError, HardwareError, InfeasibleError, OSDPError, PlanError, PlanMismatchError
from hf_osdp.planner.plan import Plan, UnitDecision
from tests.helpers.distributed import run_ranks

PLAN = Plan(
    world_size=3, strategy="osdp", units=(UnitDecision(fqn="", shard_size=3, reshard_after_forward=False),), micro_batch_size=2,
    accumulation_steps=1, model_fingerprint="abc", peak_bytes=12345, step_s=0.25,
)  # fmt: skip
OTHER = replace(PLAN, micro_batch_size=1)


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
        "received": broadcast_plan(PLAN if rank == 0 else None),
        "own": broadcast_plan(PLAN),
    }
    for name, error in ERRORS.items():
        results[name] = caught(functools.partial(on_rank_zero, functools.partial(fail, error)))
    results["none"] = caught(functools.partial(broadcast_plan, None))
    results["different"] = caught(functools.partial(broadcast_plan, OTHER if rank == 2 else PLAN))
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


def test_every_rank_gets_the_plan():
    assert [found["received"] for found in outcome()] == [PLAN] * 3
    assert [found["own"] for found in outcome()] == [PLAN] * 3


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


def test_without_a_plan_every_rank_is_told():
    assert [found["none"][:2] for found in outcome()] == [(PlanError, "Rank 0 has no plan to broadcast; plan or load one there.")] * 3


def test_different_plans_are_caught_on_every_rank():
    for found in outcome():
        assert found["different"][0] is PlanMismatchError
        assert found["different"][1].startswith("Ranks [2] hold another plan than rank 0")


def test_one_process_needs_no_group():
    assert on_rank_zero(lambda: 3) == 3
    assert broadcast_plan(PLAN) == PLAN
    with pytest.raises(PlanError, match="no plan to broadcast"):
        broadcast_plan(None)
    with pytest.raises(KeyError):
        on_rank_zero(lambda: {}["missing"])
