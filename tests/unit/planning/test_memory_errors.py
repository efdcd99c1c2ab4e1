"""Out of memory that is no `torch.OutOfMemoryError` is explained and replanned as that is, and leaves no kernel behind."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_osdp.distributed import restart as again
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import search
from hf_osdp.planning.out_of_memory import OutOfMemoryHandler, is_of_host, is_out_of_memory
from hf_osdp.planning.simulate import fake_process_group
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
    monkeypatch.setattr(again, "start_again", lambda limit: pytest.fail("it would start again"))
    error = MemoryError("no")
    handler("replan", device="cuda").handle(error)
    assert str(error).startswith("Out of the host's memory on ") and "there is no other plan" in str(error)


@pytest.mark.parametrize("kind", ["cublas", "accelerator", "nccl"])
def test_every_kind_is_replanned(kind, monkeypatch):
    limits = []
    monkeypatch.setattr(again, "hindrance", lambda: None)
    monkeypatch.setattr(again, "start_again", lambda limit: limits.append(limit) or "another rank ended before")
    handler("replan").handle(type(DEVICE[kind])(*DEVICE[kind].args))
    assert len(limits) == 1


# ------------------------------------------------------------------------------------------------------ no kernel is left


@pytest.fixture
def device(monkeypatch):
    """A device whose calls are noted, and its `synchronize` may fail or hang."""
    noted: list[str] = []
    monkeypatch.setattr(again, "_QUIET_S", 0.2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(again.os, "execve", lambda *arguments: noted.append("exec"))
    monkeypatch.setattr(again.os, "set_inheritable", lambda *arguments: None)

    def set_up(synchronize, abort=lambda: None) -> list[str]:
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: noted.append("synchronize") or synchronize(noted))
        monkeypatch.setattr(again, "_abort_communicators", lambda: noted.append("abort") or abort())
        return noted

    return set_up


def until_aborted(noted: list[str]) -> None:
    if "abort" not in noted:
        time.sleep(5)


def raises(noted: list[str]) -> None:
    raise torch.AcceleratorError("CUDA error: unspecified launch failure")


def test_kernels_end_before_the_program_is_replaced(device):
    noted = device(lambda noted: None)
    again.replace_this_process({})
    assert noted == ["synchronize", "exec"]


@pytest.mark.parametrize("synchronize", [until_aborted, raises])
def test_kernels_that_wait_for_others_are_aborted(device, synchronize):
    noted = device(synchronize)
    again.replace_this_process({})
    assert noted == ["synchronize", "abort", "synchronize", "exec"]


def test_a_device_that_hangs_takes_its_time_and_no_more(device):
    noted, started = device(lambda noted: time.sleep(5), lambda: time.sleep(5)), time.monotonic()
    again.replace_this_process({})
    assert noted[-1] == "exec" and time.monotonic() - started < 3


def test_communicators_are_aborted_together_and_groups_of_gloo_are_left(monkeypatch):
    calls: list[str] = []

    class Nccl(SimpleNamespace):
        def __getattr__(self, name):
            return lambda: calls.append(name) or "nccl"

    with fake_process_group(2):
        again._abort_communicators()
    assert calls == [], "no group of NCCL"
    group = SimpleNamespace(_get_backend=lambda device: Nccl())
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map={1: 0}))
    monkeypatch.setattr(dist.distributed_c10d._world, "pg_map", [group, group])
    again._abort_communicators()
    assert [name for name in calls if name != "name"] == ["_group_start", "abort", "abort", "_group_end"]
