"""Treat the activations of a block as a plan says. Offloaded ones, the tensors that a module's forward saves, are
copied to the host on a separate stream, and back for backward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import update_wrapper
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ..planner.placement import Activations
from .replaced import setting
from .wrapping import Recomputed, recompute


def change_forward(module: nn.Module, activations: Activations) -> None:
    """Recompute or offload a block's activations, unless that was done; names of parameters and modules do not
    change.
    """
    if isinstance(module.__dict__.get("forward"), (Recomputed, Offloaded)):
        return
    if activations.recomputation is not None:
        recompute(module, activations.recomputation)
    if activations.offloads:
        offload(module)


class OwnTensors:
    """The tensors that only one call of a module keeps alive, without its parameters, buffers and inputs.

    The first input that needs a gradient, the hidden states, is included. Create it while parameters are gathered.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = tensors_of((args, kwargs))
        first = next((tensor for tensor in inputs if tensor.requires_grad), None)
        held = [*module.parameters(), *module.buffers(), *inputs]
        self._device = next((tensor.device for tensor in (first, *held) if tensor is not None), None)
        self._others = {
            _key(tensor) for tensor in held if not hasattr(tensor, "placements")
        }  # a nested unit is still sharded
        if first is not None:
            self._others.discard(_key(first))

    def __contains__(self, tensor: torch.Tensor) -> bool:
        base = tensor._base if tensor._is_view() else tensor
        if isinstance(base, nn.Parameter) or tensor.device != self._device or tensor.layout is not torch.strided:
            return False
        if is_traceable_wrapper_subclass(tensor) or tensor.is_conj() or tensor.is_neg():
            return False  # more than storage, size and strides
        return tensor.numel() > 0 and _key(tensor) not in self._others


def offload(module: nn.Module) -> None:
    """Offload in place the tensors that a module saves for backward; only its input if it is recomputed.

    Names do not change.
    """
    module.forward = Offloaded(module, module.forward)


class Offloaded:
    """Forward whose saved tensors are on the host until backward."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        update_wrapper(self, forward)
        self._module, self.inner = module, forward
        self.sent_bytes = 0  # of the last call
        self._fetches: list[torch.cuda.Event] = []  # ends of copies back to the device

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fetches": []}  # events belong to this process

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        if torch._C._current_graph_task_id() == -1:  # not in backward, which runs a recomputed module again
            # Wait for the last backward's copies to the device, because the page-locked memory that they read is
            # reused now.
            while self._fetches:
                self._fetches.pop().synchronize()
        call = _Call(OwnTensors(self._module, args, kwargs), self._fetches)
        with saved_tensors_hooks(call.pack, call.unpack):
            output = self.inner(*args, **kwargs)
        self.sent_bytes = call.end_forward(tensors_of(output))
        return output


class _OffloadedStorage:
    """A flat storage on the device, on the host, or being copied."""

    copied: torch.cuda.Event | None = None
    """The end of the last copy; None if copies do not overlap compute."""
    _compute: torch.cuda.Stream | None = None
    """The stream that allocated the device's copy."""
    _awaited = True
    """Whether compute waits for the last copy."""
    _changed_before_free = fetched = False

    def __init__(self, tensor: torch.Tensor) -> None:
        whole = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        self.device: torch.Tensor | None = whole
        self.host = host_tensor(whole)
        self.size, self.dtype, self._home, self._version = whole.numel(), whole.dtype, whole.device, tensor._version
        self._copy(self.host, whole)

    @property
    def changed(self) -> bool:
        """Whether it was changed in place since its copy to the host began."""
        return self._changed_before_free or (
            self.device is not None and not self.fetched and self.device._version != self._version
        )

    def free(self) -> None:
        self._changed_before_free = self.changed
        self.wait()
        self.device = None

    def fetch(self) -> None:
        self.device, self.fetched = torch.empty(self.size, dtype=self.dtype, device=self._home), True
        self._copy(self.device, self.host)

    def wait(self) -> None:
        if self.copied is not None:
            torch.cuda.current_stream(self._home).wait_event(self.copied)
            self._awaited = True

    def __del__(self) -> None:
        if not self._awaited and self._compute is not None and self.copied is not None:
            self._compute.wait_event(self.copied)  # never used, because forward failed or backward ended early

    def _copy(self, to: torch.Tensor | None, source: torch.Tensor | None) -> None:
        if to is None or source is None:
            return
        if (ended := copy_beside(to, source)) is not None:
            self.copied, self._awaited, self._compute = ended, False, torch.cuda.current_stream(self._home)


class _SavedView(NamedTuple):
    storage: _OffloadedStorage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Call:
    """The storages that one call of a module offloads. Saved views own them, so that they are freed with the graph."""

    def __init__(self, own: OwnTensors, fetches: list[torch.cuda.Event]) -> None:
        self._own: OwnTensors | None = own
        self._fetches = fetches
        self._sent: dict[tuple[Any, ...], _OffloadedStorage] = {}
        self._freed: list[weakref.ref[_OffloadedStorage]] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _SavedView:
        """Offload a saved tensor; return it unchanged if others keep it alive."""
        if self._own is None or tensor not in self._own:
            return tensor
        # an in-place change makes it another tensor, and another dtype means another layout
        key = (_key(tensor), tensor._version, tensor.dtype)
        if key not in self._sent:
            self._sent[key] = _OffloadedStorage(tensor)
        return _SavedView(self._sent[key], tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def end_forward(self, outputs: list[torch.Tensor]) -> int:
        """Free the device's copies, except those of outputs, which the caller keeps; return the offloaded bytes."""
        held = {_key(tensor) for tensor in outputs}
        sent = 0
        for (key, *_), storage in self._sent.items():
            if key in held:
                storage.host = None
                continue
            sent += storage.size * storage.dtype.itemsize
            storage.free()
            self._freed.append(weakref.ref(storage))
        self._sent, self._own = {}, None
        return sent

    def unpack(self, packed: torch.Tensor | _SavedView) -> torch.Tensor:
        """Return the saved tensor; the first call fetches all storages.

        Raise RuntimeError if it was changed in place since.
        """
        if isinstance(packed, torch.Tensor):
            return packed
        if packed.storage.changed:
            raise RuntimeError(
                "One of the variables needed for gradient computation has been modified by an inplace operation: a"
                " tensor of shape"
                f" {tuple(packed.size)} that is offloaded to the host. Change a copy of it, or keep this block's"
                " activations on the device."
            )
        for storage in (reference() for reference in reversed(self._freed)):
            if storage is not None:
                storage.fetch()
                if storage.copied is not None:
                    self._fetches.append(storage.copied)
        self._freed.clear()
        packed.storage.wait()
        return cast(torch.Tensor, packed.storage.device).as_strided(packed.size, packed.stride, packed.offset)


def _page_locked(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.device.type != "cpu")


_ALLOCATE: ContextVar[Callable[[torch.Tensor], torch.Tensor | None]] = ContextVar("host memory", default=_page_locked)


def host_memory(allocate: Callable[[torch.Tensor], torch.Tensor | None]) -> AbstractContextManager[None]:
    """Allocate host memory for device tensors with `allocate` inside the context; if it returns None, nothing is
    copied.
    """
    return setting(_ALLOCATE, allocate)


def host_tensor(like: torch.Tensor) -> torch.Tensor | None:
    """Return page-locked host memory for a device tensor; None in a trace, which has no host."""
    return _ALLOCATE.get()(like)


def copy_beside(to: torch.Tensor, source: torch.Tensor, *, two_ways: bool = False) -> torch.cuda.Event | None:
    """Copy between a device and the host on a separate stream, after all that the compute stream has queued.

    With `two_ways`, copies to the host have a stream of their own. Return the end of the copy; None for the CPU, which
    needs no stream.
    """
    out = to.device.type == "cpu"
    stream = _copy_stream(source.device if out else to.device, two_ways and out)
    if stream is None:
        to.copy_(source)
        return None
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        to.copy_(source, non_blocking=True)
        return stream.record_event()


@functools.lru_cache
def _copy_stream(device: torch.device, out: bool) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def tensors_of(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
