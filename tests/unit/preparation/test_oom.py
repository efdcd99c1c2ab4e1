"""Out of memory: which errors say so, what is said of them, which limit is safer, and when a run starts again."""

from __future__ import annotations

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
from hf_osdp.preparation.out_of_memory import (
    OutOfMemoryHandler,
    is_of_host,
    is_out_of_memory,
    out_of_memory_explained,
    safer_limit,
)
from tests.helpers.descriptions import transformer

NCCL = "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\nLast error:\n"
HOST_SAYS = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4194304 bytes. Error code 12"
ERRORS = {
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "runtime": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    "accelerator": torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
    "nccl calloc": dist.DistBackendError(f"{NCCL}Failed to CUDA calloc 10485760 bytes"),
    "nccl": dist.DistBackendError(f"{NCCL}Cuda failure 2 'out of memory'"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "data parallel": RuntimeError("Caught OutOfMemoryError in replica 0.\nOriginal: CUDA out of memory"),
    "allocator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    "host: allocator": RuntimeError(f"[enforce fail at alloc_cpu.cpp:119] err == 0. {HOST_SAYS}"),
    "host: python": MemoryError("Unable to allocate 2.00 GiB for an array"),
}
OTHERS = (
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("Expected all tensors to be on the same device"),
    dist.DistBackendError("NCCL error: unhandled system error"), ValueError("CUDA out of memory"), KeyboardInterrupt(),
)  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    hardware, job = preset("cpu", devices_per_node=4), TrainingJob(global_batch_size=8)
    limit = 2**33
    for _ in range(2):  # the second is as tight as the first one's peak
        problem = PlanningProblem(description=transformer(), hardware=hardware, job=job, memory_limit_bytes=limit)
        found = search(problem).plan
        limit = found.peak_bytes
    return found


def handled(plan: Plan, error: BaseException, *, on_oom: str = "raise", device: str = "cpu") -> str:
    """The error's text after it was handled."""
    options = {"hardware": preset("cpu", devices_per_node=4), "on_oom": on_oom, "device": torch.device(device)}
    handler = OutOfMemoryHandler(nn.Linear(1, 1), plan, (), **options)
    with pytest.raises(type(error)) as caught, out_of_memory_explained(lambda: handler):
        raise error
    handler.handle(error)  # it is explained once
    assert caught.value is error
    return str(error)


@pytest.mark.parametrize("kind", ERRORS)
def test_every_kind_is_known_and_explained_in_the_same_error(kind, plan):
    error = ERRORS[kind]
    assert is_out_of_memory(error) and is_of_host(error) == kind.startswith("host")
    said = handled(plan, error)
    assert said.startswith("Out of memory on ") and "memory_limit=" in said and "\n" not in said
    assert ("4.0 MiB were requested" in said) == (kind == "host: allocator")


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: type(error).__name__)
def test_other_errors_are_none_and_stay_as_they_are(error, plan):
    assert not is_out_of_memory(error) and not is_out_of_memory(None)
    assert handled(plan, error) == str(type(error)(*error.args))


@pytest.mark.parametrize("over", [0, 0.08, 0.2])
def test_safer_limit_is_lower_by_excess_over_estimate(plan, over):
    limit = plan.memory_limit_bytes
    safer = safer_limit(limit, plan, int(plan.peak_bytes + over * limit))
    assert safer == pytest.approx(min(limit * (1 - max(over, 0.05)), plan.peak_bytes * 0.95), abs=2)
    assert safer < plan.peak_bytes
    assert safer_limit(4 * plan.peak_bytes, plan, None) == int(0.95 * plan.peak_bytes)


def test_replan_restarts_by_the_safer_limit_or_says_why_not(plan, monkeypatch):
    limits = []
    monkeypatch.setattr(restart, "reason_not_to_restart", lambda: None)
    monkeypatch.setattr(restart, "note_limit", limits.append)
    full = "CUDA error: out of memory"
    assert "The launcher restarts all ranks with it." in handled(plan, RuntimeError(full), on_oom="replan")
    assert limits == [safer_limit(plan.memory_limit_bytes, plan, None)]
    host = handled(plan, MemoryError("no"), on_oom="replan", device="cuda")
    assert host.startswith("Out of host memory on ") and "there is no other plan" in host and len(limits) == 1
    monkeypatch.setattr(restart, "reason_not_to_restart", lambda: "no restarts left")
    said = handled(plan, RuntimeError(full), on_oom="replan")
    assert "cannot restart: no restarts left." in said and len(limits) == 1
