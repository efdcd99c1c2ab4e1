"""Track live tensor storages, operator by operator, on real or fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from ..modeling.replaced import replaced
from ..modeling.wrapping import SkippableMode
from .tensors import call_operator, is_dtensor, storages_in

CUDA_BLOCK_BYTES = 512
"""The CUDA caching allocator rounds each allocation up to this (`kMinBlockSize` in
c10/cuda/CUDACachingAllocator.cpp).
"""


@dataclass(slots=True)
class Storage:
    reference: weakref.ref[torch.UntypedStorage]
    nbytes: int = 0


class MemoryTracker(SkippableMode):
    """Count the bytes of live storages that operators make inside the context; to count fake ones, enter the
    `FakeTensorMode` first.

    Storages that existed before count only if they were passed to `track`; resized ones count with their current size.
    Allocations of other threads are not counted.

    Args:
        block_bytes: each storage on the device is rounded up to a multiple of this: 512 on CUDA, 1 on the CPU.
        device_type: count only storages on this type of device; None counts all except `meta`.
    """

    def __init__(
        self,
        *,
        block_bytes: int = CUDA_BLOCK_BYTES,
        device_type: str | None = None,
    ) -> None:
        super().__init__()
        self._block_bytes, self._device_type = block_bytes, device_type
        self._storages: dict[int, Storage] = {}
        self._fake_mode: object = None
        self.current_bytes = self.peak_bytes = 0
        """Live bytes on the device: now, and the peak since the start."""

    def track(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Count tensors that were made outside, for example parameters and optimizer states."""
        for tensor, storage in storages_in(list(tensors)):
            if self._counts(tensor):
                self._update(storage)

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
        result = call_operator(func, args, kwargs)
        given = () if func is torch.ops.aten.lift_fresh.default else (args, kwargs)
        # results in the arguments' memory are views, or were changed in place
        before = {one._cdata for _, one in storages_in(given) if one._cdata not in self._storages}
        for tensor, storage in storages_in(result):
            if storage._cdata not in before and self._counts(tensor):
                self._update(storage)
        return result

    def _update(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        entry = self._storages.get(key)
        if entry is None:
            entry = self._storages[key] = Storage(weakref.ref(storage, lambda _: self._forget(key)))
        before, entry.nbytes = entry.nbytes, -(-storage.nbytes() // self._block_bytes) * self._block_bytes
        self.current_bytes += entry.nbytes - before
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def _forget(self, key: int) -> None:
        self.current_bytes -= self._storages.pop(key).nbytes

    def _counts(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            if tensor.fake_mode is not self._fake_mode:
                return False  # DTensor infers shapes under its own fake mode
        elif tensor.device.type == "meta":
            return False
        return self._device_type is None or tensor.device.type == self._device_type
