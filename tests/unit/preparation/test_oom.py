"""Out of memory: which errors say so, what is said of them, which limit is safer, and when a run starts again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_osdp.distributed import restart
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import search
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.preparation.out_of_memory import OutOfMemoryHandler, is_of_host, is_out_of_memory, place_of, safer_limit
from hf_osdp.quantities import format_bytes, format_seconds
from tests.helpers.descriptions import transformer
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.no_memory import Fails, fail

TORCHS = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 13.75 MiB is"
    " free. Of the allocated memory 1.50 GiB is allocated by PyTorch, and 120.00 MiB is reserved"
)
NCCL = "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\nLast error:\n"
DEVICE = {
    "cublas": (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "runtime": (RuntimeError, "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    "accelerator": (torch.AcceleratorError, "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
    "nccl calloc": (dist.DistBackendError, f"{NCCL}Failed to CUDA calloc 10485760 bytes"),
    "nccl": (dist.DistBackendError, f"{NCCL}Cuda failure 2 'out of memory'"),
    "cudnn": (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "data parallel": (
        RuntimeError,
        "Caught OutOfMemoryError in replica 0 on device 0.\nOriginal: CUDA out of memory",
    ),
    "allocator": (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 20.00 MiB."),
}
HOST_SAYS = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4194304 bytes. Error code 12"
HOST = {
    "cpu allocator": (RuntimeError, f"[enforce fail at alloc_cpu.cpp:119] err == 0. {HOST_SAYS}"),
    "python": (MemoryError, "Unable to allocate 2.00 GiB for an array"),
}
OTHERS = (
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("Expected all tensors to be on the same device"),
    dist.DistBackendError("NCCL error: unhandled system error"), ValueError("CUDA out of memory"), KeyboardInterrupt(),
    None,
)  # fmt: skip


@pytest.mark.parametrize(("free", "expected"), [(4 * 2**20, True), (2**30, False)])
def test_cudnn_internal_error_on_full_device_is_out_of_memory(monkeypatch, free, expected):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * 2**30))
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")) is expected


def handler_of(plan: Plan, problem: PlanningProblem | None, on_oom: str = "raise", device: str = "cpu"):
    device = torch.device(device)
    return OutOfMemoryHandler(nn.Linear(1, 1), plan, (), problem=problem, on_oom=on_oom, device=device)


@pytest.fixture(scope="module")
def problem() -> PlanningProblem:
    hardware = preset("cpu", devices_per_node=4)
    sizes = {"job": TrainingJob(global_batch_size=8), "memory_limit_bytes": 2**33}
    loose = PlanningProblem(description=transformer(), hardware=hardware, **sizes)
    return replace(loose, memory_limit_bytes=search(loose).plan.peak_bytes)


@pytest.fixture(scope="module")
def plan(problem) -> Plan:
    return search(problem).plan


@pytest.fixture
def handled(problem, plan):
    """A function from an error to its text after it was handled."""

    def handle(error: BaseException, on_oom: str = "raise", device: str = "cpu") -> str:
        handler = handler_of(plan, problem, on_oom, device)
        handler.handle(error)
        handler.handle(error)  # it is explained once
        return str(error)

    return handle


@pytest.mark.parametrize("kind", [*DEVICE, *HOST])
def test_every_kind_is_known_and_explained_in_the_same_error(kind, problem, plan):
    error_type, text = {**DEVICE, **HOST}[kind]
    error = error_type(text)
    assert is_out_of_memory(error) and is_of_host(error) == (kind in HOST)
    with pytest.raises(error_type) as caught, handler_of(plan, problem).explained():
        raise error
    said = str(error)
    assert caught.value is error and said.startswith("Out of memory on ") and "memory_limit=" in said
    assert "\n" not in said
    assert ("4.0 MiB were requested" in said) == (kind == "cpu allocator")


@pytest.mark.parametrize("error", OTHERS)
def test_other_errors_are_none_and_stay_as_they_are(error, handled):
    assert not is_out_of_memory(error)
    assert error is None or handled(error) == str(type(error)(*error.args))


def test_code_of_an_accelerator_error_counts():
    class Coded(RuntimeError):
        error_code = 2

    assert is_out_of_memory(Coded("something else")) and not is_out_of_memory(RuntimeError("something else"))


@pytest.mark.parametrize("over", [0, 0.08, 0.2])
def test_safer_limit_is_lower_by_excess_over_estimate(problem, plan, over):
    limit = problem.memory_limit_bytes
    safer = safer_limit(problem, plan, int(plan.peak_bytes + over * limit))
    assert safer == pytest.approx(min(limit * (1 - max(over, 0.05)), plan.peak_bytes * 0.95), abs=2)
    assert safer < plan.peak_bytes
    loose = replace(problem, memory_limit_bytes=4 * plan.peak_bytes)  # others use the device too
    assert safer_limit(loose, plan, None) == int(0.95 * plan.peak_bytes)


def test_explained_error_has_estimate_and_blames_no_small_plan(problem, plan, handled):
    said = handled(torch.OutOfMemoryError(TORCHS))
    assert "\n" not in said and said.endswith(f"({TORCHS})")
    assert "1.5 GiB were allocated and 20.0 MiB more requested." in said
    limit = format_bytes(problem.memory_limit_bytes)
    assert f"was estimated to need {format_bytes(plan.peak_bytes)} of a limit of {limit}, " in said
    assert "No plan needs as little as 1 B; use " in said, "a gibibyte is far above the estimate"
    assert "a memory limit of" not in said, "the limit was lowered here, not by the user"
    loose = replace(problem, memory_limit_bytes=4 * plan.peak_bytes)
    handler_of(plan, loose).handle(error := RuntimeError("CUDA out of memory."))
    said = str(error)
    assert "leaves more than half of its limit of" in said and "smaller per_device_train_batch_size" in said
    assert "memory_limit=" not in said and "No plan" not in said


def test_explained_error_names_the_next_plan_with_limit_and_cost(problem, plan, handled):
    allocated = f"Of the allocated memory {plan.peak_bytes} bytes is allocated by PyTorch"
    said = handled(torch.OutOfMemoryError(f"Tried to allocate 512 bytes. {allocated}"))
    limit = safer_limit(problem, plan, plan.peak_bytes + 512)
    safer = search(replace(problem, memory_limit_bytes=limit)).plan
    assert safer.fingerprint != plan.fingerprint and safer.step_s >= plan.step_s
    needs = f"{format_bytes(safer.peak_bytes)} and {format_seconds(safer.step_s)} a step"
    assert f"The next plan, for memory_limit={limit}, needs {needs}" in said
    assert ('With on_oom="replan" the run continues with it.' in said) == (restart.reason_not_to_restart() is None)


def test_explained_errors_without_figures_or_explanation(plan, handled, monkeypatch):
    handler_of(plan, None).handle(error := torch.OutOfMemoryError("out of memory"))
    said = "the allocated bytes are not known. The plan was given; plan again under a lower memory_limit."
    assert said in str(error)
    monkeypatch.setattr(OutOfMemoryHandler, "explain", lambda self, error: 1 / 0)
    assert handled(torch.OutOfMemoryError("as it was")) == "as it was"


@pytest.mark.parametrize("kind", ["allocator", "cublas", "accelerator", "nccl"])
def test_replan_restarts_by_the_safer_limit_or_says_why_not(problem, plan, handled, monkeypatch, kind):
    limits = []
    error_type, text = DEVICE[kind]
    monkeypatch.setattr(restart, "reason_not_to_restart", lambda: None)
    monkeypatch.setattr(restart, "note_limit", limits.append)
    assert "The launcher restarts all ranks with that plan." in handled(error_type(text), "replan")
    assert limits == [safer_limit(problem, plan, None)]
    monkeypatch.setattr(restart, "reason_not_to_restart", lambda: "no restarts left")
    assert "cannot restart: no restarts left." in handled(error_type(text), "replan") and len(limits) == 1


def test_host_memory_is_no_reason_for_less_device_memory(handled, monkeypatch):
    monkeypatch.setattr(restart, "note_limit", lambda *_: pytest.fail("it would start again"))
    said = handled(MemoryError("no"), "replan", "cuda")
    assert said.startswith("Out of host memory on ") and "there is no other plan" in said


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        ("forward", "forward of transformer.h.1"),
        ("backward", "backward"),
        ("recompute", "recomputation of transformer.h.1"),
        ("step", "the optimizer's step"),
        ("between", "code between model and optimizer"),
    ],
)
def test_place_of_an_error_names_moment_and_unit(moment, said, monkeypatch):
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
