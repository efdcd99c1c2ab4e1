"""When gradients are reduced, over the micro-steps of one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..modeling.units import modules_by_name
from ..planner.plan import Plan


@contextmanager
def micro_step(model: nn.Module, *, is_last: bool, plan: Plan | None) -> Iterator[None]:
    """Run forward and backward of one micro-batch inside; after the last one the optimizer steps.

    By default a unit's gradients stay whole on each rank until the last micro-step reduces their sum. Units with
    `reduce_every_micro_step` reduce-scatter each time and hold shards, for more communication; replicas all-reduce the sum in the
    last micro-step. The result is the same.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_requires_gradient_sync(is_last)
    model.set_requires_all_reduce(is_last)
    if not is_last and plan is not None:
        modules = modules_by_name(model)
        for unit in plan.units:
            # The unit's first module stands for all.
            if unit.reduce_every_micro_step and isinstance(module := modules[unit.module_names[0]], FSDPModule):
                module.set_requires_gradient_sync(True, recurse=False)
                module.set_requires_all_reduce(False, recurse=False)  # which the line before switches on as well
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)
