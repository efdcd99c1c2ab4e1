"""Live bytes of the device and of the host apart, on fake tensors that all claim to be on the CPU."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..modeling.activation_offload import host_memory
from ..planner.cost.units import pinned_bytes
from .allocation_log import AllocationLog
from .ledger import Ledger
from .live_bytes import CUDA_BLOCK_BYTES, plain_tensors, storage_of, tensors_in


class HostLedger(Ledger):
    """A `Ledger` of the device that keeps what lives on the host by itself.

    No fake tensor can be on another device than the CPU in a CPU-only build, so that a tensor's device does not tell the two apart.
    Its history does: what was given to `track_on_host`, what operators make of such tensors, and FSDP2's copies to the host are
    there; FSDP2's copies to the device are not. Those copies, which are none between equal devices, are made while
    `copies` is entered.

    Args:
        block_bytes: as for `Ledger`, of the device.
        locks_pages: the host's parameters and gradients lie in page-locked memory, as `pinned_bytes` counts it.
        log: of the device's allocations.
    """

    def __init__(self, *, block_bytes: int = CUDA_BLOCK_BYTES, locks_pages: bool = False, log: AllocationLog | None = None) -> None:
        super().__init__(block_bytes=block_bytes, log=log)
        self._locks_pages = locks_pages
        self._host_sizes: dict[int, int] = {}
        self._host_references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._page_locked: set[int] = set()
        self._host_bytes = self._host_peak_bytes = 0
        self._to_host: bool | None = None
        """Where new storages go for certain; None leaves it to what they are made of."""
        self._pinned = self._from_host = False

    @property
    def host_peak_bytes(self) -> int:
        """The most bytes that were alive on the host at once since the start or the last `reset_peak`."""
        return self._host_peak_bytes

    def reset_peak(self) -> None:
        """Forget both peaks."""
        super().reset_peak()
        self._host_peak_bytes = self._host_bytes

    def track_on_host(self, tensors: Iterable[torch.Tensor], *, pinned: bool = False) -> None:
        """Count tensors as the host's from now on, whether they counted as the device's before or not at all.

        Args:
            tensors: tensors of any kind.
            pinned: they lie in page-locked memory, where the ledger has any.
        """
        for tensor in tensors:
            for local in plain_tensors(tensor):
                storage = storage_of(local)
                if storage is None:
                    continue
                if storage._cdata in self._sizes:
                    self._forget(storage._cdata)
                with self._destination(to_host=True, pinned=pinned):
                    self._note(local, storage)

    @contextmanager
    def copies(self) -> Iterator[None]:
        """FSDP2's copies between host and device are made, by a `Tensor.to` that knows who calls; and memory for activations that wait
        on the host is the host's."""
        stock = torch.Tensor.to

        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not (args and isinstance(args[0], torch.device)):
                return stock(tensor, *args, **kwargs)
            caller = sys._getframe(1)
            match caller.f_code.co_filename.rpartition("/")[2], caller.f_code.co_name:
                case "_fsdp_param.py", "all_gather_inputs":
                    to_host, pinned = False, False
                case "_fsdp_collectives.py", "foreach_reduce":
                    # what is added to a gradient that is there comes over in ordinary memory
                    to_host, pinned = True, not caller.f_locals["to_accumulate_grad"]
                case _:
                    return stock(tensor, *args, **kwargs)
            with self._destination(to_host=to_host, pinned=pinned):
                return tensor.clone()

        def on_host(like: torch.Tensor) -> torch.Tensor:
            with self._destination(to_host=True, pinned=True):
                return torch.empty_like(like)

        torch.Tensor.to = to
        try:
            with host_memory(on_host):
                yield
        finally:
            del torch.Tensor.to  # what it inherits is seen again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._from_host = self._to_host is None and any(self._is_on_host(tensor) for tensor in tensors_in((args, kwargs or {})))
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._from_host = False

    def _note_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        known = key in self._host_sizes
        goes = self._from_host if self._to_host is None else self._to_host
        if not known and (key in self._sizes or not goes):
            super()._note_storage(storage)
            return
        if not known:
            self._host_references[key] = weakref.ref(storage, lambda _: self._forget_on_host(key))
            if self._pinned and self._locks_pages:
                self._page_locked.add(key)
        size = pinned_bytes(storage.nbytes()) if key in self._page_locked else storage.nbytes()
        self._host_bytes += size - self._host_sizes.get(key, 0)
        self._host_sizes[key] = size
        self._host_peak_bytes = max(self._host_peak_bytes, self._host_bytes)

    def _forget_on_host(self, key: int) -> None:
        self._host_bytes -= self._host_sizes.pop(key)
        self._page_locked.discard(key)
        del self._host_references[key]

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        storages = (storage_of(local) for local in plain_tensors(tensor))
        return any(storage is not None and storage._cdata in self._host_sizes for storage in storages)

    @contextmanager
    def _destination(self, *, to_host: bool, pinned: bool) -> Iterator[None]:
        self._to_host, self._pinned = to_host, pinned
        try:
            yield
        finally:
            self._to_host, self._pinned = None, False
