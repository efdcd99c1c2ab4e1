"""Out of memory: which errors say so, what is said of them, which limit is safer, and when a run starts again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_osdp.distributed import restart
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import search
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.preparation.out_of_memory import OutOfMemoryHandler, is_of_host, is_out_of_memory, safer_limit
from tests.helpers.descriptions import transformer

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
def handler_of(problem, plan):
    """A function from options to what handles errors."""

    def make(on_oom: str = "raise", device: str = "cpu") -> OutOfMemoryHandler:
        options = {"hardware": problem.hardware, "on_oom": on_oom, "device": torch.device(device)}
        return OutOfMemoryHandler(nn.Linear(1, 1), plan, (), **options)

    return make


def handled(handler: OutOfMemoryHandler, error: BaseException) -> str:
    """The error's text after it was handled."""
    handler.handle(error)
    handler.handle(error)  # it is explained once
    return str(error)


@pytest.mark.parametrize("kind", [*DEVICE, *HOST])
def test_every_kind_is_known_and_explained_in_the_same_error(kind, handler_of):
    error_type, text = {**DEVICE, **HOST}[kind]
    error = error_type(text)
    assert is_out_of_memory(error) and is_of_host(error) == (kind in HOST)
    with pytest.raises(error_type) as caught, handler_of().explained():
        raise error
    said = str(error)
    assert caught.value is error and said.startswith("Out of memory on ") and "memory_limit=" in said
    assert "\n" not in said
    assert ("4.0 MiB were requested" in said) == (kind == "cpu allocator")


@pytest.mark.parametrize("error", OTHERS)
def test_other_errors_are_none_and_stay_as_they_are(error, handler_of):
    assert not is_out_of_memory(error)
    assert error is None or handled(handler_of(), error) == str(type(error)(*error.args))


@pytest.mark.parametrize("over", [0, 0.08, 0.2])
def test_safer_limit_is_lower_by_excess_over_estimate(problem, plan, over):
    limit = problem.memory_limit_bytes
    safer = safer_limit(limit, plan, int(plan.peak_bytes + over * limit))
    assert safer == pytest.approx(min(limit * (1 - max(over, 0.05)), plan.peak_bytes * 0.95), abs=2)
    assert safer < plan.peak_bytes
    assert safer_limit(4 * plan.peak_bytes, plan, None) == int(0.95 * plan.peak_bytes)


def test_replan_restarts_by_the_safer_limit_or_says_why_not(problem, plan, handler_of, monkeypatch):
    limits = []
    monkeypatch.setattr(restart, "reason_not_to_restart", lambda: None)
    monkeypatch.setattr(restart, "note_limit", limits.append)
    error_type, text = DEVICE["nccl"]
    assert "The launcher restarts all ranks with it." in handled(handler_of("replan"), error_type(text))
    assert limits == [safer_limit(problem.memory_limit_bytes, plan, None)]
    monkeypatch.setattr(restart, "reason_not_to_restart", lambda: "no restarts left")
    assert "cannot restart: no restarts left." in handled(handler_of("replan"), error_type(text)) and len(limits) == 1


def test_host_memory_is_no_reason_for_less_device_memory(handler_of, monkeypatch):
    monkeypatch.setattr(restart, "note_limit", lambda *_: pytest.fail("it would start again"))
    said = handled(handler_of("replan", "cuda"), MemoryError("no"))
    assert said.startswith("Out of host memory on ") and "there is no other plan" in said
