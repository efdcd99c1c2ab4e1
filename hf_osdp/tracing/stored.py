"""Tensors that modules store in themselves while they run, as RecurrentGemma stores its last state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def release_of_stored(module: nn.Module) -> Callable[[], None]:
    """A function that gives every attribute that holds tensors, in a module and those inside it, what it holds now."""
    before = {key: values.get(key[1]) for key, values in _attributes(module)}

    def release() -> None:
        for key, values in list(_attributes(module)):
            if _holds_tensors(values[key[1]]) and values[key[1]] is not before.get(key):
                values[key[1]] = before.get(key)

    return release


def _attributes(module: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], dict[str, Any]]]:
    """Each attribute's owner and name, and where its value is; parameters and modules left out."""
    for inner in module.modules():
        for values in (inner.__dict__, inner._buffers):
            yield from (((inner, name), values) for name in values if name not in ("_parameters", "_buffers", "_modules"))


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor)
