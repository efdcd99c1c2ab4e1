"""All ranks run one plan, or all stop with the same error."""

from __future__ import annotations

import functools

import pytest
import torch.distributed as dist

from hf_osdp.distributed.consensus import on_rank_zero
from hf_osdp.errors import DescriptionError, HardwareError, InfeasibleError, OSDPError, PlanError, Remedy


class OwnPlanError(PlanError):
    """A subclass that other ranks may not know."""


REMEDIES = (Remedy("10 devices", "--num-nodes 10"), Remedy("less"))
INFEASIBLE = {"memory_limit_bytes": 5, "least_peak_bytes": 9, "remedies": REMEDIES}
RAISED = (
    (InfeasibleError("No plan fits.", **INFEASIBLE), InfeasibleError, "No plan fits. Use 10 devices; or less."),
    (PlanError("bad plan"), PlanError, "bad plan"),
    (DescriptionError("no block"), DescriptionError, "no block"),
    (HardwareError("no link"), HardwareError, "no link"),
    (ValueError("bad\n value"), ValueError, "bad value"),
    (OwnPlanError("odd plan"), PlanError, "odd plan"),
    (KeyError("wte"), OSDPError, "Rank 0 failed with KeyError: 'wte'"),
)


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.on_ranks(3, shared=True)
def test_on_rank_zero_calls_there_and_gives_all_the_result():
    calls: list[int] = []
    assert on_rank_zero(lambda: calls.append(1) or {"a": (1, 2)}) == {"a": (1, 2)}
    assert calls == [1] * (dist.get_rank() == 0)


@pytest.mark.on_ranks(3, shared=True)
def test_on_rank_zero_raises_its_error_on_every_rank():
    for error, expected, message in RAISED:
        with pytest.raises(expected) as caught:
            on_rank_zero(functools.partial(fail, error))
        assert (type(caught.value), str(caught.value)) == (expected, message)
        assert type(caught.value.__cause__) is (type(error) if dist.get_rank() == 0 else type(None)), (
            "rank 0 keeps the traceback"
        )
        if expected is InfeasibleError:
            assert vars(caught.value) == {**INFEASIBLE, "finding": "No plan fits."}
            assert caught.value.on_command_line == "No plan fits. Use --num-nodes 10; or less."


@pytest.mark.on_ranks(3, shared=True)
def test_on_rank_zero_ends_all_for_interrupts_and_unpicklable_results():
    with pytest.raises(OSDPError):
        on_rank_zero(lambda: lambda: "a local function cannot be pickled")
    with pytest.raises(KeyboardInterrupt if dist.get_rank() == 0 else OSDPError):
        on_rank_zero(functools.partial(fail, KeyboardInterrupt("stop")))
    assert on_rank_zero(lambda: "yes") == "yes", "still in step"


def test_on_rank_zero_needs_no_group_in_one_process():
    assert on_rank_zero(lambda: 3) == 3
    with pytest.raises(KeyError):
        on_rank_zero(lambda: {}["missing"])
