"""What is said when memory runs out, which limit is safer, and when a program can start again."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_osdp.distributed import restart
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.plan import Plan, UnitDecision
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import search
from hf_osdp.planning.out_of_memory import OutOfMemoryHandler, place_of, safer_plan
from hf_osdp.quantities import format_bytes
from tests.helpers.descriptions import transformer
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.no_memory import Fails, fail

TORCHS = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 13.75 MiB is free. Including"
    " non-PyTorch memory, this process has 79.13 GiB memory in use. Of the allocated memory 1.50 GiB is allocated by PyTorch, and"
    " 120.00 MiB is reserved"
)
HARDWARE = preset("cpu", devices_per_node=4)


@pytest.fixture
def problem() -> PlanningProblem:
    loose = PlanningProblem(description=transformer(), hardware=HARDWARE, job=TrainingJob(global_batch_size=8), memory_limit_bytes=2**33)
    return replace(loose, memory_limit_bytes=search(loose).plan.peak_bytes)


@pytest.fixture(autouse=True)
def hook_restored(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


def plan_without_units() -> Plan:
    return Plan(
        world_size=1, strategy="osdp", units=(UnitDecision(fqn="", shard_size=1, reshard_after_forward=False),), micro_batch_size=1,
        accumulation_steps=1, model_fingerprint="abc",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- the safer plan


@pytest.mark.parametrize("over", [0, 0.08, 0.2])
def test_the_limit_falls_by_what_was_needed_above_the_estimate(problem, over):
    plan = search(problem).plan
    limit = problem.memory_limit_bytes
    safer = safer_plan(problem, plan, int(plan.peak_bytes + over * limit))
    assert safer.limit_bytes == pytest.approx(min(limit * (1 - max(over, 0.05)), plan.peak_bytes * 0.95), abs=2)
    assert safer.plan.peak_bytes <= safer.limit_bytes < plan.peak_bytes and safer.plan.fingerprint != plan.fingerprint
    assert safer.plan.step_s >= plan.step_s


def test_a_limit_that_does_not_bind_falls_below_the_plan(problem):
    """A device that others use too: the plan is far below the limit, and there was no room all the same."""
    plan = search(problem).plan
    loose = replace(problem, memory_limit_bytes=4 * plan.peak_bytes)
    assert safer_plan(loose, plan, None).limit_bytes == int(0.95 * plan.peak_bytes)


def test_where_nothing_fits_there_are_remedies(problem):
    safer = safer_plan(problem, search(problem).plan, 3 * problem.memory_limit_bytes)
    assert safer.plan is None and any("memory limit" in remedy for remedy in safer.remedies)


# ------------------------------------------------------------------------------------------------------------ the message


def raised(text: str) -> torch.OutOfMemoryError:
    try:
        raise torch.OutOfMemoryError(text)
    except torch.OutOfMemoryError as error:
        return error


def handler(problem: PlanningProblem | None, on_oom: str = "raise", device: str = "cpu") -> tuple[OutOfMemoryHandler, Plan]:
    plan = plan_without_units() if problem is None else search(problem).plan
    return OutOfMemoryHandler(nn.Linear(1, 1), plan, (), problem=problem, on_oom=on_oom, device=torch.device(device)), plan


def test_explained_error_has_estimate_measurement_and_next_plan(problem):
    handling, plan = handler(problem)
    error = raised(TORCHS)
    with pytest.raises(torch.OutOfMemoryError) as caught, handling.explained():
        raise error
    said = str(caught.value)
    assert "\n" not in said and said.endswith(f"({TORCHS})")
    assert "1.5 GiB were allocated and 20.0 MiB more asked for." in said
    assert (
        f"the plan was estimated to need {format_bytes(plan.peak_bytes)} of a limit of {format_bytes(problem.memory_limit_bytes)}, " in said
    )
    handling.handle(error)
    assert str(error) == said, "it is explained once"
    assert "No plan needs as little as 1 B; use " in said, "a gibibyte is far above the estimate"


def test_explained_error_names_the_next_plan_with_limit_and_cost(problem):
    handling, plan = handler(problem)
    error = raised(
        f"CUDA out of memory. Tried to allocate 512 bytes. Of the allocated memory {plan.peak_bytes} bytes is allocated by PyTorch"
    )
    handling.handle(error)
    safer = safer_plan(problem, plan, plan.peak_bytes + 512)
    assert f"The next plan, for memory_limit={safer.limit_bytes}, needs " in str(error)
    assert ('With on_oom="replan" the run goes on by it.' in str(error)) == (restart.hindrance() is None)


def test_explained_error_of_a_given_plan_without_figures():
    error = raised("out of memory")
    handler(None)[0].handle(error)
    assert "what was allocated is not known. The plan was given; plan again under a lower memory_limit." in str(error)


def test_uncaught_error_is_explained_as_long_as_the_handler_lives(problem, monkeypatch):
    shown: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(str(error)))
    handling, _ = handler(problem)
    sys.excepthook(torch.OutOfMemoryError, raised("first"), None)
    del handling
    gc.collect()
    sys.excepthook(torch.OutOfMemoryError, raised("second"), None)
    assert shown[0].startswith("Out of memory on ") and shown[1] == "second"


def test_handler_leaves_other_errors_and_what_it_cannot_explain(problem, monkeypatch):
    handling, _ = handler(problem)
    other = KeyError("other")
    handling.handle(other)
    assert other.args == ("other",)
    monkeypatch.setattr(OutOfMemoryHandler, "explain", lambda self, error: 1 / 0)
    error = raised("as it was")
    handling.handle(error)
    assert str(error) == "as it was"


def test_replan_restarts_by_the_safer_limit_or_says_why_not(problem, monkeypatch):
    (handling, plan), limits = handler(problem, "replan"), []
    monkeypatch.setattr(restart, "hindrance", lambda: None)
    monkeypatch.setattr(restart, "restart", lambda limit, message: limits.append(limit))
    error = raised("Tried to allocate 1.00 KiB.")
    handling.handle(error)
    assert limits == [safer_plan(problem, plan, None).limit_bytes]
    assert "The launcher starts all ranks again, by that plan." in str(error)
    monkeypatch.setattr(restart, "hindrance", lambda: "it did so 3 times")
    error = raised("Tried to allocate 1.00 KiB.")
    handling.handle(error)
    assert "cannot start again: it did so 3 times." in str(error) and len(limits) == 1


# -------------------------------------------------------------------------------------------------------- where in a step


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        ("forward", "forward of transformer.h.1"),
        ("backward", "backward"),
        ("recompute", "recomputation of transformer.h.1"),
        ("step", "the optimizer's step"),
        ("between", "what lies between model and optimizer"),
    ],
)
def test_the_place_of_an_error(moment, said, monkeypatch):
    model = tiny_model("gpt2", layers=2)
    if moment == "recompute":
        model.gradient_checkpointing_enable()
    inner = model.transformer.h[1].mlp
    passes = []
    match moment:
        case "forward":
            inner.register_forward_pre_hook(fail)
        case "backward":
            inner.register_forward_hook(lambda module, args, output: Fails.apply(output))
        case "recompute":
            inner.register_forward_pre_hook(lambda *args: passes.append(1) or (fail() if len(passes) == 2 else None))
        case "step":
            monkeypatch.setattr(torch.optim.AdamW, "_init_group", fail)
        case "between":
            monkeypatch.setattr(nn.utils, "clip_grad_norm_", fail)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        optimizer = torch.optim.AdamW(model.parameters())
        tiny_loss(model, tiny_batch(0)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert place_of(caught.value, model, find_units(model)) == said
