"""GPU memory under an enforced limit, as counted by torch's allocator, for benchmarks that train on one GPU."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from hf_osdp.distributed.device import prefer_expandable_segments
from hf_osdp.planner.training_job import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The allocator's peaks in a step, in bytes."""

    allocated: int
    """Peak bytes of tensors in the last step."""
    reserved: int
    """Peak bytes that the allocator reserved on the device."""
    retries: int = 0
    """How often the allocator emptied its cache because the limit was reached, in all steps."""


def allocated_bytes() -> int:
    """Return the bytes of the first GPU's tensors once all work is done.

    Autograd's thread frees a backward's last tensors some time after the call has returned, and then begins the next.
    """
    torch.cuda.synchronize()
    leaf = _leaf()
    leaf.backward(leaf.grad)
    return torch.cuda.memory_allocated()


@functools.cache
def _leaf() -> torch.Tensor:
    leaf = torch.zeros(1, device="cuda", requires_grad=True)
    leaf.grad = torch.zeros_like(leaf)
    return leaf


class Memory(Protocol):
    """A device's memory under a limit. The test replaces CUDA memory by counted CPU memory."""

    device: torch.device
    total_bytes: int
    workspace_bytes: int
    """Bytes that libraries hold in the same allocator, in addition to the step's tensors."""

    def limited(self, limit_bytes: int | None, *, expandable: bool = True) -> AbstractMemory: ...

    def wait(self) -> None: ...

    def last_step_begins(self) -> None: ...

    def reading(self) -> Reading: ...


class AbstractMemory(Protocol):
    """Context in which an allocation above the limit raises `torch.OutOfMemoryError`; `limited` returns it."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> bool | None: ...


class CudaMemory:
    """Memory of the first GPU, counted and limited by torch's allocator."""

    def __init__(self, precision: Precision) -> None:
        prefer_expandable_segments()  # as in training
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        free, self._total = torch.cuda.mem_get_info(self.device)
        self.total_bytes = free  # without the context and other processes
        self.workspace_bytes = self._workspaces(precision)

    @contextmanager
    def limited(self, limit_bytes: int | None, *, expandable: bool = True) -> Iterator[None]:
        """Enforce a limit, with segments that expand or not; free the allocator's cache on exit, also after an
        error.
        """
        self._give_back()
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")
        torch.cuda.reset_accumulated_memory_stats(self.device)
        torch.cuda.set_per_process_memory_fraction(
            1.0 if limit_bytes is None else min(1.0, limit_bytes / self._total), self.device
        )
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
            self._give_back()

    def wait(self) -> None:
        """Wait for all queued work."""
        torch.cuda.synchronize(self.device)

    def last_step_begins(self) -> None:
        """Reset the peaks."""
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.device)

    def reading(self) -> Reading:
        """Return the peaks since `last_step_begins`."""
        self.wait()
        return Reading(
            allocated=torch.cuda.max_memory_allocated(self.device),
            reserved=torch.cuda.max_memory_reserved(self.device),
            retries=torch.cuda.memory_stats(self.device)["num_alloc_retries"],
        )

    def _workspaces(self, precision: Precision) -> int:
        """Return what cuBLAS keeps after a matrix product's forward and backward; backward uses another thread and
        cuBLAS handle.
        """
        dtype = torch.float32 if precision.compute is None else getattr(torch, precision.compute.value)
        layer = torch.nn.Linear(1024, 1024, device=self.device, dtype=dtype)
        layer(torch.zeros(1024, 1024, device=self.device, dtype=dtype, requires_grad=True)).sum().backward()
        del layer
        gc.collect()
        return torch.cuda.memory_allocated(self.device)

    def _give_back(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
