"""Other forwards for the modules of a model, and what FSDP2 does to their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module run `forward` inside the context; after it the module is as it was."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = own


def cast_floating(value: Any, dtype: torch.dtype | None) -> Any:
    """Floating-point tensors in the compute dtype, as FSDP2 casts each unit's inputs; None leaves them."""
    if dtype is None:
        return value
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
