"""Whole states that Accelerate and the Trainer load, where units live on the host: torch's functions refuse tensors of two devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as stock
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn.modules.module import _IncompatibleKeys

from ..runtime.host_offload import host_parameters
from ..runtime.state import load_full_optimizer_state_dict, load_full_state_dict


@contextmanager
def loads_to_two_devices() -> Iterator[None]:
    """Within, torch's functions that load whole states do so with units on the host, too; all else they do as before.

    Accelerate imports these functions where it calls them, and has no argument for others.
    """
    set_model, set_optimizer = stock.set_model_state_dict, stock.set_optimizer_state_dict

    def set_model_state_dict(model: nn.Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None) -> Any:
        if not _whole_on_host(model, options):
            return set_model(model, model_state_dict, options=options)
        load_full_state_dict(model, model_state_dict, strict=options.strict)
        return _IncompatibleKeys([], [])

    def set_optimizer_state_dict(
        model: nn.Module, optimizers: Any, optim_state_dict: Mapping[str, Any] | None, *, options: StateDictOptions | None = None
    ) -> None:
        if not _whole_on_host(model, options) or not isinstance(optimizers, torch.optim.Optimizer):
            set_optimizer(model, optimizers, optim_state_dict, options=options)
            return
        load_full_optimizer_state_dict(model, optimizers, optim_state_dict or {})

    stock.set_model_state_dict, stock.set_optimizer_state_dict = set_model_state_dict, set_optimizer_state_dict
    try:
        yield
    finally:
        stock.set_model_state_dict, stock.set_optimizer_state_dict = set_model, set_optimizer


def _whole_on_host(model: nn.Module, options: StateDictOptions | None) -> bool:
    return options is not None and options.full_state_dict and bool(host_parameters(model))
