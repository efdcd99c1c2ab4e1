"""Track live tensor storages, operator by operator, on real or fake tensors: bytes on device and host."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from ..modeling.activations import host_memory
from ..modeling.replaced import replaced
from ..modeling.wrapping import SkippableMode
from ..planner.cost.placement import pinned_bytes
from .kernel_scratch import KernelScratch, Processors, kernel_scratch
from .tensors import FunctionMode, call_operator, is_dtensor, storages_in

CUDA_BLOCK_BYTES = 512
"""The CUDA caching allocator rounds each allocation up to this (`kMinBlockSize` in
c10/cuda/CUDACachingAllocator.cpp).
"""


class Place(Enum):
    """Where a storage lies: on the device, or in the host's memory, which may be page-locked."""

    DEVICE, HOST, PINNED = range(3)


@dataclass(slots=True)
class _Storage:
    reference: weakref.ref[torch.UntypedStorage]
    place: Place
    nbytes: int = 0


class MemoryTracker(SkippableMode):
    """Count the bytes of live storages that operators make inside the context; to count fake ones, enter the
    `FakeTensorMode` first.

    Storages that existed before count only if they were passed to `track`; resized ones count with their current size.
    Allocations of other threads are not counted. A fake storage always reports the
    CPU; it counts as host memory if `track` says so, if an operator made it from host memory, or if FSDP2 copied it
    there (see `host_copies`).

    Args:
        block_bytes: each storage on the device is rounded up to a multiple of this: 512 on CUDA, 1 on the CPU.
        device_type: count only storages on this type of device; None counts all except `meta`.
        locks_pages: pinned host memory is rounded as `pinned_bytes` does.
        processors: count what this device's kernels take while they run, where it is known; None counts none.
    """

    def __init__(
        self,
        *,
        block_bytes: int = CUDA_BLOCK_BYTES,
        device_type: str | None = None,
        locks_pages: bool = False,
        processors: Processors | None = None,
    ) -> None:
        super().__init__()
        self._processors = processors
        self._block_bytes, self._device_type, self._locks_pages = block_bytes, device_type, locks_pages
        self._storages: dict[int, _Storage] = {}
        self._target: Place | None = None
        self._fake_mode: object = None
        self.current_bytes = self.peak_bytes = 0
        """Live bytes on the device: now, and the peak since the start or the last `reset_peak`."""
        self._host_bytes = self.host_peak_bytes = 0

    def reset_peak(self) -> None:
        """Reset the peaks to the bytes that are live now."""
        self.peak_bytes, self.host_peak_bytes = self.current_bytes, self._host_bytes

    def track(self, tensors: Iterable[torch.Tensor | None], place: Place = Place.DEVICE) -> None:
        """Count tensors that were made outside, for example parameters and optimizer states; those that already count
        on the device move to the host if `place` says so.
        """
        for tensor, storage in storages_in(list(tensors)):
            if not self._counts(tensor):
                continue
            entry = self._storages.get(storage._cdata)
            if entry is not None and entry.place is Place.DEVICE is not place:
                self._forget(storage._cdata)
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

    def __enter__(self) -> MemoryTracker:
        self._fake_mode = active_fake_mode()
        stock = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> object:  # not an operator, so no mode sees it
            result = stock(storage, size)
            on_device = self._device_type is None or storage.device.type == self._device_type
            if storage._cdata in self._storages or (on_device and storage.device.type != "meta"):
                self._update(storage)
            return result

        self._resizing = ExitStack()
        self._resizing.enter_context(replaced(torch.UntypedStorage, resize_=resize_))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        with self._resizing:
            super().__exit__(*exception)

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if any(map(is_dtensor, types)):
            return NotImplemented  # DTensor then calls operators on local tensors, which are counted here
        with torch._C.DisableTorchFunction():  # so that reading shapes does not go through function modes
            return self._tracked(func, args, kwargs or {})

    def _tracked(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        target = self._target
        if target is None and self._host_bytes:
            read = (self._storages.get(storage._cdata) for _, storage in storages_in((args, kwargs)))
            if any(storage is not None and storage.place is not Place.DEVICE for storage in read):
                target = Place.HOST
        with self._targeting(target):
            result = call_operator(func, args, kwargs)
            self._update_results(result, () if func is torch.ops.aten.lift_fresh.default else (args, kwargs))
        if (scratch := self._scratch(func, args)) is not None:
            self._count_peak(scratch.growth.of_rows(scratch.rows))
        return result

    def _scratch(self, func: OpOverload, args: tuple[Any, ...]) -> KernelScratch | None:
        return None if self._processors is None else kernel_scratch(func, args, self._processors)

    def _update_results(self, result: object, arguments: object) -> None:
        """Count an operator's results, except those in its arguments' memory: views and in-place results."""
        before: set[int] | None = None
        for tensor, storage in storages_in(result):
            if storage._cdata not in self._storages:
                if before is None:
                    before = {given._cdata for _, given in storages_in(arguments)}
                if storage._cdata in before:
                    continue
            if self._counts(tensor):
                self._update(storage)

    def _update(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        entry = self._storages.get(key)
        if entry is None:
            place = self._target or Place.DEVICE
            entry = self._storages[key] = _Storage(weakref.ref(storage, lambda _: self._forget(key)), place)
        before = entry.nbytes
        if entry.place is not Place.DEVICE:
            entry.nbytes = pinned_bytes(nbytes) if entry.place is Place.PINNED and self._locks_pages else nbytes
            self._host_bytes += entry.nbytes - before
            self.host_peak_bytes = max(self.host_peak_bytes, self._host_bytes)
            return
        entry.nbytes = -(-nbytes // self._block_bytes) * self._block_bytes
        self.current_bytes += entry.nbytes - before
        self._count_peak()

    def _count_peak(self, scratch_bytes: int = 0) -> None:
        """Raise the peak to the live bytes and those that a kernel takes."""
        self.peak_bytes = max(self.peak_bytes, self.current_bytes + scratch_bytes)

    def _forget(self, key: int) -> None:
        storage = self._storages.pop(key)
        if storage.place is Place.DEVICE:
            self.current_bytes -= storage.nbytes
        else:
            self._host_bytes -= storage.nbytes

    def _counts(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            if tensor.fake_mode is not self._fake_mode:
                return False  # DTensor infers shapes under its own fake mode
        elif tensor.device.type == "meta":
            return False
        return self._device_type is None or tensor.device.type == self._device_type

    @contextmanager
    def _targeting(self, target: Place | None) -> Iterator[None]:
        before, self._target = self._target, target
        try:
            yield
        finally:
            self._target = before


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
