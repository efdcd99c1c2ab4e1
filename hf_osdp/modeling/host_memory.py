"""The host's memory for tensors of a device, and copies between the two beside the device's computation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch


def _page_locked(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.device.type != "cpu")


_ALLOCATE: ContextVar[Callable[[torch.Tensor], torch.Tensor | None]] = ContextVar("host memory", default=_page_locked)


@contextmanager
def host_memory(allocate: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Allocate host memory for device tensors with `allocate` inside the context; if it returns None, nothing is
    copied.
    """
    token = _ALLOCATE.set(allocate)
    try:
        yield
    finally:
        _ALLOCATE.reset(token)


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
