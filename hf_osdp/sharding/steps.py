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
    replicas = replicas_of(model)
    units = [] if is_last else [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_requires_gradient_sync(False, recurse=False)  # and with it the all-reduce
    by_step = [unit for unit in plan.units if unit.reduce_every_micro_step] if units and plan is not None else []
    modules = modules_by_name(model) if by_step else {}
    for decision in by_step:
        # The modules of a unit share one FSDP2 state.
        if isinstance(module := modules[decision.module_names[0]], FSDPModule):
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_requires_all_reduce(False, recurse=False)
    if replicas is not None:
        replicas.reduces = is_last
    try:
        yield
    finally:
        for unit in units:
            unit.set_requires_gradient_sync(True, recurse=False)
        if replicas is not None:
            replicas.reduces = True
