"""Out of memory that is no `torch.OutOfMemoryError` is explained and replanned as that is, and leaves no kernel behind."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_osdp.distributed import restart
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import search
from hf_osdp.planning.out_of_memory import OutOfMemoryHandler, is_of_host, is_out_of_memory
from tests.helpers.descriptions import transformer

DEVICE = {
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "runtime": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"),
    "accelerator": torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
    "nccl calloc": dist.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc 10485760 bytes"
    ),
    "nccl": dist.DistBackendError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "data parallel": RuntimeError("Caught OutOfMemoryError in replica 0 on device 0.\nOriginal Traceback: CUDA out of memory. Tried to"),
    "allocator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
}  # fmt: skip
HOST = {
    "cpu allocator": RuntimeError("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
                                  " allocate 4194304 bytes. Error code 12 (Cannot allocate memory)"),
    "python": MemoryError("Unable to allocate 2.00 GiB for an array"),
}  # fmt: skip
OTHERS = (
    RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError("Expected all tensors to be on the same device"),
    dist.DistBackendError("NCCL error: unhandled system error"), ValueError("CUDA out of memory"), KeyboardInterrupt(), None,
)  # fmt: skip


def handler(on_oom: str = "raise", device: str = "cpu") -> OutOfMemoryHandler:
    hardware = preset("cpu", devices_per_node=4)
    loose = PlanningProblem(description=transformer(), hardware=hardware, job=TrainingJob(global_batch_size=8), memory_limit_bytes=2**33)
    return OutOfMemoryHandler(nn.Linear(1, 1), search(loose).plan, (), problem=loose, on_oom=on_oom, device=torch.device(device))


@pytest.fixture(autouse=True)
def hook_restored(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


@pytest.mark.parametrize("kind", [*DEVICE, *HOST])
def test_every_kind_is_known_and_explained_in_the_same_error(kind):
    error = {**DEVICE, **HOST}[kind]
    assert is_out_of_memory(error) and is_of_host(error) == (kind in HOST)
    before = type(error)(*error.args)
    with pytest.raises(type(error)) as caught, handler().explained():
        raise before
    assert caught.value is before and str(before).startswith("Out of memory on ") and "memory_limit=" in str(before)
    assert "\n" not in str(before)


@pytest.mark.parametrize("error", OTHERS)
def test_other_errors_are_none(error):
    assert not is_out_of_memory(error)


def test_the_code_of_an_accelerator_error_counts():
    class Coded(RuntimeError):
        error_code = 2

    assert is_out_of_memory(Coded("something else")) and not is_out_of_memory(RuntimeError("something else"))


def test_what_the_cpu_allocator_was_asked_for_is_told():
    error = HOST["cpu allocator"]
    handler().handle(error)
    assert "4.0 MiB were asked for" in str(error)


def test_memory_of_the_host_is_no_reason_for_a_plan_of_less_device_memory(monkeypatch):
    monkeypatch.setattr(restart, "restart", lambda *_: pytest.fail("it would start again"))
    error = MemoryError("no")
    handler("replan", device="cuda").handle(error)
    assert str(error).startswith("Out of the host's memory on ") and "there is no other plan" in str(error)


@pytest.mark.parametrize("kind", ["cublas", "accelerator", "nccl"])
def test_every_kind_is_replanned(kind, monkeypatch):
    limits = []
    monkeypatch.setattr(restart, "hindrance", lambda: None)
    monkeypatch.setattr(restart, "restart", lambda limit, message: limits.append(limit))
    handler("replan").handle(type(DEVICE[kind])(*DEVICE[kind].args))
    assert len(limits) == 1
