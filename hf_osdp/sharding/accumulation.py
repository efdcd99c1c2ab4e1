"""When gradients cross the links, over the micro-steps of one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..modeling.units import modules_by_name
from ..planner.plan import Plan


@contextmanager
def micro_step(model: nn.Module, *, is_last: bool, plan: Plan | None) -> Iterator[None]:
    """Forward and backward of one micro-batch.

    Held back, a unit's gradients stay whole on each rank until the last micro-step reduces their sum. Reduced each time, they are
    reduce-scattered and held as shards, for more communication; replicas all-reduce the sum in the last micro-step. The
    result is the same.

    Args:
        model: the sharded model; on an unsharded one this does nothing.
        is_last: the optimizer steps after this one.
        plan: whose units hold or reduce; None holds all.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_requires_gradient_sync(is_last)
    model.set_requires_all_reduce(is_last)
    if not is_last and plan is not None:
        for module in _reducing(model, plan):
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_requires_all_reduce(False, recurse=False)  # which the line before switches on as well
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)


def _reducing(model: nn.Module, plan: Plan) -> list[FSDPModule]:
    """The first module of each unit that reduces its gradients in every micro-step; it stands for all of the unit's."""
    modules = modules_by_name(model)
    found = (modules[unit.module_names[0]] for unit in plan.units if unit.reduce_every_micro_step)
    return [module for module in found if isinstance(module, FSDPModule)]
