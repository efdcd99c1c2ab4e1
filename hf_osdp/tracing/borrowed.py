"""What a loss brings into a trace from outside: real tensors, as those of a reference model, and devices."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from .fake_copy import DEVICE, fake_like
from .known_values import KnownValues
from .live_bytes import is_dtensor


class Borrowed(TorchDispatchMode):
    """Puts fake tensors in the place of real ones, wherever they are. They were there before the trace and count nowhere.

    Enter it last, so that the modes below see fake tensors alone.

    Args:
        mode: the mode that the fake tensors belong to.
        known: gets the values of small ones.
    """

    def __init__(self, mode: FakeTensorMode, known: KnownValues) -> None:
        super().__init__()
        self._mode, self._known = mode, known
        self._fakes = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_dtensor, types)):
            return NotImplemented
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = DEVICE
        if func is not torch.ops.aten.lift_fresh.default:  # which brings in what was made just now
            args, kwargs = tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        return func(*args, **kwargs)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor not in self._fakes:
            with _disable_current_modes():  # or it would count
                made = fake_like(tensor, self._mode, None)
            self._known.know(made, tensor)
            self._fakes[tensor] = made
        return self._fakes[tensor]
