"""A GPU's memory under a limit that is enforced, as torch's allocator counts it. For benchmarks that train on one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from hf_osdp.distributed.device import prefer_expandable_segments
from hf_osdp.planner.job import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the allocator says after a step, in bytes."""

    allocated: int
    """Most that tensors had at once in the last step."""
    reserved: int
    """Most that was taken from the device, cut into blocks."""


class Memory(Protocol):
    """A device's memory under a limit. The test puts counted CPU memory in the place of CUDA's."""

    device: torch.device
    total_bytes: int
    workspace_bytes: int
    """What libraries keep in the same allocator, beside the step's tensors."""

    def limited(self, limit_bytes: int | None) -> AbstractMemory: ...

    def wait(self) -> None: ...

    def last_step_begins(self) -> None: ...

    def reading(self) -> Reading: ...


class AbstractMemory(Protocol):
    """What `limited` gives: a context in which more than the limit raises `torch.OutOfMemoryError`."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> bool | None: ...


class CudaMemory:
    """The first GPU's memory, as torch's allocator counts and limits it."""

    def __init__(self, precision: Precision) -> None:
        prefer_expandable_segments()  # as in training
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        free, self._total = torch.cuda.mem_get_info(self.device)
        self.total_bytes = free  # what the context and other processes leave
        self.workspace_bytes = self._workspaces(precision)

    @contextmanager
    def limited(self, limit_bytes: int | None) -> Iterator[None]:
        """Enforce a limit; on leaving, the cache is given back whatever happened."""
        self._give_back()
        torch.cuda.set_per_process_memory_fraction(1.0 if limit_bytes is None else min(1.0, limit_bytes / self._total), self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
            self._give_back()

    def wait(self) -> None:
        """For all that was queued."""
        torch.cuda.synchronize(self.device)

    def last_step_begins(self) -> None:
        """Peaks count from here."""
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.device)

    def reading(self) -> Reading:
        """Peaks since then."""
        self.wait()
        return Reading(
            allocated=torch.cuda.max_memory_allocated(self.device), reserved=torch.cuda.max_memory_reserved(self.device)
        )  # fmt: skip

    def _workspaces(self, precision: Precision) -> int:
        """What cuBLAS keeps after a product forward and backward; backward runs on a thread with a handle of its own."""
        dtype = torch.float32 if precision.compute is None else getattr(torch, precision.compute.value)
        layer = torch.nn.Linear(1024, 1024, device=self.device, dtype=dtype)
        layer(torch.zeros(1024, 1024, device=self.device, dtype=dtype, requires_grad=True)).sum().backward()
        del layer
        gc.collect()
        return torch.cuda.memory_allocated(self.device)

    def _give_back(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
