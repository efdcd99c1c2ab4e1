"""Tensors that say they are on another device than the CPU, for code that tells devices apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

ELSEWHERE = torch.device("meta")


class There(torch.Tensor):
    """On the CPU in truth; so is what operators make of it."""

    @property
    def device(self) -> torch.device:
        """Another than the CPU."""
        return ELSEWHERE


@contextmanager
def two_devices() -> Iterator[None]:
    """Within, `Tensor.to(ELSEWHERE)` makes such tensors and `Tensor.to` of another device makes plain ones of them."""
    stock = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        place = args[0] if args and isinstance(args[0], (str, torch.device)) else None
        if place is None:
            return stock(tensor, *args, **kwargs)
        moved = stock(tensor.as_subclass(torch.Tensor), "cpu", *args[1:], **{**kwargs, "copy": True})
        return moved.as_subclass(There) if torch.device(place) == ELSEWHERE else moved

    torch.Tensor.to = to
    try:
        yield
    finally:
        del torch.Tensor.to
