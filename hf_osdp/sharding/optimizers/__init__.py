"""Kinds of optimizers, a module each. A kind is added, or taken away, here and in `planner/optimizers.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...planner import optimizers as names
from ...planner.training_job import OptimizerSpec
from .bitsandbytes import Bitsandbytes
from .kind import ElementWise, Kind
from .muon import Muon, spec_beside_adamw
from .torchao import Torchao

_KINDS: tuple[type[Kind], ...] = (ElementWise, Muon, Torchao, Bitsandbytes)
OF_MODEL: dict[str, Callable[..., OptimizerSpec]] = {names.MUON: spec_beside_adamw}
"""Name on the command line → what the optimizer holds for a model (`names.NEED_MODEL`)."""


def bare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer without Accelerate's wrappers."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return optimizer


def kind_of(optimizer: torch.optim.Optimizer) -> Kind:
    """Return what is known about an optimizer, plain or wrapped by Accelerate."""
    optimizer = bare_optimizer(optimizer)
    return next((kind for kind in _KINDS if kind.includes(optimizer)), Kind)(optimizer)
