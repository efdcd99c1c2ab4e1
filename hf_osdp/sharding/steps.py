"""Micro-steps of an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..modeling.units import modules_by_name
from ..planner.plan import Plan
from .replicas import replicas_of


@contextmanager
def micro_step(model: nn.Module, *, is_last: bool, plan: Plan | None) -> Iterator[None]:
    """Set how gradients are reduced in forward and backward of one micro-batch; after the last one the optimizer
    steps.

    By default a unit's gradients stay whole on each rank until the last micro-step reduces their sum. Units with
    `reduce_every_micro_step` reduce-scatter in each and hold only shards, with more communication; their replicas
    all-reduce the sum in the last micro-step. The result is the same.
    """
    sharded = model if isinstance(model, FSDPModule) else None
    replicas = replicas_of(model)
    if sharded is not None:
        sharded.set_requires_gradient_sync(is_last)  # and with it the all-reduce
    if replicas is not None:
        replicas.reduces = is_last
    if sharded is not None and not is_last and plan is not None:
        modules = modules_by_name(model)
        for unit in plan.units:
            # The modules of a unit share one FSDP2 state.
            if unit.reduce_every_micro_step and isinstance(module := modules[unit.module_names[0]], FSDPModule):
                module.set_requires_gradient_sync(True, recurse=False)
                module.set_requires_all_reduce(False, recurse=False)
    try:
        yield
    finally:
        if sharded is not None:
            sharded.set_requires_gradient_sync(True)
        if replicas is not None:
            replicas.reduces = True
