"""Track live tensor storages on device and host, while both are fake tensors on the CPU."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch._ops import OpOverload

from hf_osdp.modeling.activations import host_memory
from hf_osdp.planner.affine import Affine
from hf_osdp.planner.cost.placement import pinned_bytes
from hf_osdp.tracing.kernel_scratch import KernelScratch, Processors, kernel_scratch
from hf_osdp.tracing.memory_tracker import MemoryTracker, Storage
from hf_osdp.tracing.tensors import FunctionMode, storages_in


class Place(Enum):
    """Where a storage lies: on the device, or in the host's memory, which may be page-locked."""

    DEVICE, HOST, PINNED = range(3)


class HostTracker(MemoryTracker):
    """Count host memory apart: what `track` says, what an operator made from host memory, and what FSDP2 copied there.

    With `locks_pages` pinned memory is rounded as `pinned_bytes` does; with `processors` the peak has what their
    kernels take while they run.
    """

    def __init__(self, *, locks_pages: bool = False, processors: Processors | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._locks_pages, self._processors = locks_pages, processors
        self._target: Place | None = None
        self._places: dict[int, Place] = {}
        """Storages on the host."""
        self._host_bytes = self.host_peak_bytes = 0

    def reset_peak(self) -> None:
        self.peak_bytes = self.current_bytes
        self.host_peak_bytes = self._host_bytes

    def track(self, tensors: Iterable[torch.Tensor | None], place: Place = Place.DEVICE) -> None:
        """Count tensors made outside; those that already count on the device move to the host if `place` says so."""
        for tensor, storage in storages_in(list(tensors)):
            if not self._counts(tensor):
                continue
            key = storage._cdata
            if key in self._storages and key not in self._places and place is not Place.DEVICE:
                self._forget(key)
            with self._targeting(place):
                self._update(storage)

    @contextmanager
    def host_copies(self) -> Iterator[None]:
        """Count FSDP2's copies between host and device, which fake tensors skip as both are on the CPU, and offloaded
        activations.

        The caller of `Tensor.to` decides the direction.
        """

        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            target = _copy_target() if args and isinstance(args[0], torch.device) else None
            if target is None:
                return tensor.to(*args, **kwargs)
            with self._targeting(target):
                return tensor.clone()

        def allocate(like: torch.Tensor) -> torch.Tensor:
            with self._targeting(Place.PINNED):
                return torch.empty_like(like)

        with FunctionMode({torch.Tensor.to: to}), host_memory(allocate):
            yield

    def _tracked(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        target = self._target
        if target is None and self._host_bytes:
            if any(storage._cdata in self._places for _, storage in storages_in((args, kwargs))):
                target = Place.HOST
        with self._targeting(target):
            result = super()._tracked(func, args, kwargs)
        if self._processors is not None and (scratch := kernel_scratch(func, args, self._processors)) is not None:
            self.peak_bytes = max(self.peak_bytes, self.current_bytes + scratch_bytes(scratch))
        return result

    def _update(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        entry = self._storages.get(key)
        place = (self._target if entry is None else self._places.get(key)) or Place.DEVICE
        if place is Place.DEVICE:
            super()._update(storage)
            return
        if entry is None:
            entry = self._storages[key] = Storage(weakref.ref(storage, lambda _: self._forget(key)))
            self._places[key] = place
        before = entry.nbytes
        entry.nbytes = pinned_bytes(nbytes) if place is Place.PINNED and self._locks_pages else nbytes
        self._host_bytes += entry.nbytes - before
        self.host_peak_bytes = max(self.host_peak_bytes, self._host_bytes)

    def _forget(self, key: int) -> None:
        if self._places.pop(key, None) is None:
            super()._forget(key)
        else:
            self._host_bytes -= self._storages.pop(key).nbytes

    @contextmanager
    def _targeting(self, target: Place | None) -> Iterator[None]:
        before, self._target = self._target, target
        try:
            yield
        finally:
            self._target = before


def scratch_bytes(scratch: KernelScratch) -> int:
    """Return the bytes that a kernel takes for its number of rows."""
    return scratch.growth.moment(Affine(), Affine(per_sample=1)).bytes(scratch.rows)


def _copy_target() -> Place | None:
    """Return where FSDP2's copy between host and device lies; None for other callers of `Tensor.to`."""
    caller = sys._getframe(2)
    while caller.f_code.co_name == "__torch_function__" and caller.f_back is not None:
        caller = caller.f_back
    match caller.f_code.co_filename.rpartition("/")[2], caller.f_code.co_name:
        case "_fsdp_param.py", "all_gather_inputs":
            return Place.DEVICE
        case "_fsdp_collectives.py", "foreach_reduce":  # a gradient that is accumulated is copied to unpinned memory
            return Place.HOST if caller.f_locals["to_accumulate_grad"] else Place.PINNED
    return None
