"""CPU memory in the place of a GPU's, for benchmarks that train on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.cuda_memory import Reading
from hf_osdp.tracing.memory_tracker import MemoryTracker


class CountedMemory:
    """CPU memory that "runs out" where live bytes pass the limit, as CUDA's does."""

    device, total_bytes, workspace_bytes = torch.device("cpu"), 2**26, 0

    def __init__(self) -> None:
        self.attempts = 0

    @contextmanager
    def limited(self, limit_bytes: int | None, *, expandable: bool = True) -> Iterator[None]:
        self.attempts += 1
        self.limit_bytes, self.live = limit_bytes, MemoryTracker(block_bytes=1)
        with self.live:
            yield

    def wait(self) -> None:
        self._check()

    def last_step_begins(self) -> None:
        self._check()
        self.live.peak_bytes = self.live.current_bytes

    def reading(self) -> Reading:
        self._check()
        return Reading(allocated=self.live.peak_bytes, reserved=self.live.peak_bytes)

    def _check(self) -> None:
        if self.limit_bytes is not None and self.live.peak_bytes > self.limit_bytes:
            raise torch.OutOfMemoryError(f"{self.live.peak_bytes} bytes, limit {self.limit_bytes}")
