"""Activations that wait on the host: what a module's forward saves leaves the device when forward ends, and comes back for backward.

Copies run on a stream of their own. Out they go as soon as they are saved, beside the rest of the module's forward, at whose end
compute waits for them and their memory is free. Back they come all together when the module's backward begins, those saved last
first; what asks for one waits for that one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class OwnTensors:
    """Tells the tensors that one call of a module saves for itself from those that others hold as well.

    Others hold its parameters and buffers, and its inputs: masks, position embeddings, an encoder's states go to every block. Only
    the first input that needs a gradient, the hidden states, is the block's own to keep or to let go.

    Args:
        module: whose forward begins; its parameters are gathered.
        args, kwargs: of the call.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = tensors_of((args, kwargs))
        first = hidden_states(inputs)
        held = [*module.parameters(), *module.buffers(), *inputs]
        self._device = next((tensor.device for tensor in (first, *held) if tensor is not None), None)
        self._others = {_key(tensor) for tensor in held if not hasattr(tensor, "placements")}  # a unit inside is sharded now
        if first is not None:
            self._others.discard(_key(first))

    def __contains__(self, tensor: torch.Tensor) -> bool:
        base = tensor._base if tensor._is_view() else tensor
        if isinstance(base, nn.Parameter) or tensor.device != self._device or not _is_its_storage(tensor):
            return False
        return tensor.numel() > 0 and _key(tensor) not in self._others


def offload(module: nn.Module) -> None:
    """Have what a module saves for backward wait on the host, in place; of one that is recomputed its input. Names stay as they are."""
    if not is_offloaded(module):
        module.forward = _Offloaded(module, module.forward)


def is_offloaded(module: nn.Module) -> bool:
    """Whether `offload` was called on the module."""
    return isinstance(module.__dict__.get("forward"), _Offloaded)


class _Offloaded:
    """A forward whose saved tensors wait on the host."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        update_wrapper(self, forward)
        self._module, self.inner = module, forward
        self.sent_bytes = 0
        """Of the last call."""
        self._returning: list[torch.cuda.Event] = []
        """Ends of copies back to the device."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_returning": []}  # events are of this process

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        self._wait_for_the_host_s_memory()
        call = _Call(OwnTensors(self._module, args, kwargs), self._returning)
        with saved_tensors_hooks(call.pack, call.unpack):
            output = self.inner(*args, **kwargs)
        self.sent_bytes = call.leave(tensors_of(output))
        return output

    def _wait_for_the_host_s_memory(self) -> None:
        """Let the CPU run ahead no further than to where the last backward has read what it is to overwrite.

        Page-locked memory is given out again when the copies from it have ended; till then, each further micro-step that the CPU
        issues would take as much once more.
        """
        if torch._C._current_graph_task_id() != -1:
            return  # backward, which runs the module again
        while self._returning:
            self._returning.pop().synchronize()


@dataclass(eq=False)  # weak references to a dataclass with slots take Python 3.11
class _Luggage:
    """One storage, flat: on the device, on the host, or on its way."""

    device: torch.Tensor | None
    host: torch.Tensor | None
    """None where there is no host, in a trace."""
    size: int
    dtype: torch.dtype
    home: torch.device
    version: int
    """How often the storage had been changed in place when it was sent."""
    lost: bool = False
    """It was changed before it left."""
    fetched: bool = False
    arrived: torch.cuda.Event | None = None
    """The end of the last copy; None where copies do not run beside compute."""
    compute: torch.cuda.Stream | None = None
    """The stream whose memory the device's copy is in."""
    awaited: bool = True
    """Compute waits for the last copy, so that the device's memory can be used for something else after it."""

    @classmethod
    def send(cls, tensor: torch.Tensor) -> _Luggage:
        """A tensor's storage, on its way to the host."""
        whole = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        luggage = cls(
            device=whole, host=_HOST_MEMORY.get()(whole), size=whole.numel(), dtype=whole.dtype, home=whole.device, version=tensor._version
        )
        luggage._copy(luggage.host, whole)
        return luggage

    @property
    def changed(self) -> bool:
        """It was changed in place since it was sent, perhaps while the copy ran."""
        return self.lost or (self.device is not None and not self.fetched and self.device._version != self.version)

    def leave(self) -> None:
        """Free the device's copy."""
        self.lost = self.changed
        self.wait()
        self.device = None

    def fetch(self) -> None:
        """Start to bring it back."""
        self.device, self.fetched = torch.empty(self.size, dtype=self.dtype, device=self.home), True
        self._copy(self.device, self.host)

    def wait(self) -> None:
        """Let compute go on when the last copy is done."""
        if self.arrived is not None:
            torch.cuda.current_stream(self.home).wait_event(self.arrived)
            self.awaited = True

    def __del__(self) -> None:
        if not self.awaited:  # nobody asked for it: forward failed, or backward ended early
            self.compute.wait_event(self.arrived)

    def _copy(self, to: torch.Tensor | None, source: torch.Tensor | None) -> None:
        if to is None or source is None:
            return
        stream = _copy_stream(self.home)
        if stream is None:
            to.copy_(source)
            return
        self.compute = torch.cuda.current_stream(self.home)
        stream.wait_stream(self.compute)
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            self.arrived, self.awaited = stream.record_event(), False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ticket:
    """A saved tensor as a view of its storage."""

    luggage: _Luggage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Call:
    """What one call of a module has sent away; tickets own it, so that it goes when autograd has no more use for it."""

    def __init__(self, own: OwnTensors, returning: list[torch.cuda.Event]) -> None:
        self._own, self._returning = own, returning
        self._sent: dict[tuple[Any, ...], _Luggage] = {}
        self._away: list[weakref.ref[_Luggage]] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Ticket:
        """A saved tensor → a ticket for it, or itself where it stays."""
        if tensor not in self._own:
            return tensor
        # once changed in place, it is another tensor, and in another dtype it has another layout
        key = (_key(tensor), tensor._version, tensor.dtype)
        if key not in self._sent:
            self._sent[key] = _Luggage.send(tensor)
        return _Ticket(luggage=self._sent[key], size=tensor.size(), stride=tensor.stride(), offset=tensor.storage_offset())

    def leave(self, outputs: list[torch.Tensor]) -> int:
        """Forward is over: free the device's copies, but of outputs, which others hold.

        Returns:
            Bytes that were sent for it.
        """
        held = {_key(tensor) for tensor in outputs}
        sent = 0
        for (storage, *_), luggage in self._sent.items():
            if storage in held:
                luggage.host = None
                continue
            sent += luggage.size * luggage.dtype.itemsize
            luggage.leave()
            self._away.append(weakref.ref(luggage))
        self._sent, self._own = {}, None
        return sent

    def unpack(self, packed: torch.Tensor | _Ticket) -> torch.Tensor:
        """The tensor as it was saved; the first one has all of the call's fetched.

        Raises:
            RuntimeError: it was changed in place after it was saved, as autograd raises it by itself.
        """
        if isinstance(packed, torch.Tensor):
            return packed
        if packed.luggage.changed:
            raise RuntimeError(
                "One of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape"
                f" {tuple(packed.size)} that was to wait on the host. Change a copy of it, or save this block's activations on the device."
            )
        for luggage in (reference() for reference in reversed(self._away)):
            if luggage is not None:
                luggage.fetch()
                if luggage.arrived is not None:
                    self._returning.append(luggage.arrived)
        self._away.clear()
        packed.luggage.wait()
        return packed.luggage.device.as_strided(packed.size, packed.stride, packed.offset)


def _page_locked(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.device.type != "cpu")


_HOST_MEMORY: ContextVar[Callable[[torch.Tensor], torch.Tensor | None]] = ContextVar("host memory", default=_page_locked)


@contextmanager
def host_memory(allocate: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Take memory on the host from elsewhere, for flat tensors like the given ones; None where nothing is to be copied."""
    token = _HOST_MEMORY.set(allocate)
    try:
        yield
    finally:
        _HOST_MEMORY.reset(token)


@functools.lru_cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream for copies to and from a device; None for the CPU, whose memory the host's is."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _is_its_storage(tensor: torch.Tensor) -> bool:
    """Whether storage, size and strides are all that there is to a tensor: subclasses hold others, lazy views conjugate or negate."""
    return tensor.layout is torch.strided and not (is_traceable_wrapper_subclass(tensor) or tensor.is_conj() or tensor.is_neg())


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def hidden_states(inputs: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Of a block's inputs the one that only it has: the first that needs a gradient."""
    return next((tensor for tensor in inputs if tensor.requires_grad), None)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Tensors anywhere in arguments or outputs."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
