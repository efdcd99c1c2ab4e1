"""How many bytes of tensors are alive, operator by operator, on real or fake tensors."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from .allocation_log import AllocationLog
from .operators import call_operator

CUDA_BLOCK_BYTES = 512
"""The CUDA caching allocator rounds each allocation up to this (`kMinBlockSize` in c10/cuda/CUDACachingAllocator.cpp)."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensor storages that operators make inside the context.

    Storages that existed before count only if they were given to `track`; views never count twice. A `DTensor` counts by
    its local tensor. Storages that are resized, as FSDP2 does with unsharded parameters, count at their present size.
    Scratch memory that a kernel allocates and frees inside itself is not seen, nor are allocations of other threads.
    To count fake tensors, enter the `FakeTensorMode` first.

    Args:
        block_bytes: each storage is rounded up to a multiple of this: 512 as on CUDA, 1 for the CPU.
        device_type: count only storages on this type of device; None counts all but `meta`.
        log: where each allocation and free is written down.

    Raises:
        ValueError: `block_bytes` is less than 1.
    """

    def __init__(self, *, block_bytes: int = CUDA_BLOCK_BYTES, device_type: str | None = None, log: AllocationLog | None = None) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes={block_bytes} must be at least 1; use 1 for no rounding.")
        super().__init__()
        self._block_bytes = block_bytes
        self._device_type = device_type
        self.log = log
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._current_bytes = 0
        self._peak_bytes = 0
        self._fake_mode: Any = None
        self._restore: list[Callable[[], None]] = []

    @property
    def current_bytes(self) -> int:
        """Bytes that are alive now."""
        return self._current_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive at once since the start or the last `reset_peak`."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Forget the peak: it starts again from what is alive now."""
        self._peak_bytes = self._current_bytes

    def track(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Count tensors that were made outside, for example parameters and optimizer states.

        Args:
            tensors: tensors of any kind; None entries are skipped, storages already counted stay counted once.
        """
        for tensor in tensors:
            for local in plain_tensors(tensor) if tensor is not None else ():
                self._note(local)

    def __enter__(self) -> LiveBytes:
        if not self._restore:
            self._fake_mode = active_fake_mode()
        self._restore.append(self._watch_resizes())
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._restore.pop()()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_dtensor, types)):
            return NotImplemented  # let it unfold into operators on local tensors, which come here again
        kwargs = kwargs or {}
        result = call_operator(func, args, kwargs)
        before: set[int] | None = None
        for tensor in tensors_in(result):
            for local in plain_tensors(tensor):
                storage = storage_of(local)
                if storage is None:
                    continue
                if storage._cdata not in self._sizes:
                    if before is None:  # torch.tensor allocates out of sight, then lifts
                        lifted = func is torch.ops.aten.lift_fresh.default
                        before = set() if lifted else _storage_keys((args, kwargs))
                    if storage._cdata in before:
                        continue  # a view of what was there before, or written in place
                self._note(local, storage)
        return result

    def _note(self, tensor: torch.Tensor, storage: torch.UntypedStorage | None = None) -> None:
        """Count a plain tensor's storage at its present size."""
        storage = storage_of(tensor) if storage is None else storage
        if storage is None or not self._counts(tensor):
            return
        self._note_storage(storage)

    def _note_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = -(-storage.nbytes() // self._block_bytes) * self._block_bytes
        if key not in self._references:
            self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        if self.log is not None and size != self._sizes.get(key, 0):
            self.log.resize(key, storage.nbytes())
        self._current_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self._peak_bytes = max(self._peak_bytes, self._current_bytes)

    def _forget(self, key: int) -> None:
        self._current_bytes -= self._sizes.pop(key)
        del self._references[key]
        if self.log is not None:
            self.log.drop(key)

    def _counts(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            if tensor.fake_mode is not self._fake_mode:
                return False  # DTensor finds out shapes under a fake mode of its own
        elif tensor.device.type == "meta":
            return False
        return self._device_type is None or tensor.device.type == self._device_type

    def _watch_resizes(self) -> Callable[[], None]:
        """Patch `UntypedStorage.resize_`, which is no operator; the function returned undoes it."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            on_device = self._device_type is None or storage.device.type == self._device_type
            if storage._cdata in self._sizes or (on_device and storage.device.type != "meta"):
                self._note_storage(storage)
            return result

        def restore() -> None:
            torch.UntypedStorage.resize_ = original

        torch.UntypedStorage.resize_ = resize_
        return restore


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """Tensors in an operator's arguments or result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def plain_tensors(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The tensor itself, or those inside a wrapper such as `DTensor`."""
    if is_dtensor(type(tensor)):
        yield from plain_tensors(tensor._local_tensor)
    elif is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor


def is_dtensor(cls: type) -> bool:
    tensor = sys.modules.get("torch.distributed.tensor")  # there are none where it was never imported, and planning does without
    return tensor is not None and issubclass(cls, tensor.DTensor)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage; sparse tensors have none of their own."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _storage_keys(value: Any) -> set[int]:
    storages = (storage_of(local) for tensor in tensors_in(value) for local in plain_tensors(tensor))
    return {storage._cdata for storage in storages if storage is not None}
