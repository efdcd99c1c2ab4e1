"""Micro-steps of an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from .replicas import replicas_of
from .unit_order import orders_of


@contextmanager
def micro_step(model: nn.Module, *, is_last: bool) -> Iterator[None]:
    """Set how gradients are reduced in forward and backward of one micro-batch; after the last one the optimizer
    steps.

    By default a unit's gradients stay whole on each rank until the last micro-step reduces their sum. Units with
    `reduce_every_micro_step` reduce-scatter in each and hold only shards, with more communication; their replicas
    all-reduce the sum in the last micro-step. The result is the same.
    """
    replicas, orders = replicas_of(model), set() if is_last else orders_of(model)
    units = [unit for order in orders for unit in order.groups]
    for unit in units:
        unit.reduce_grads, unit.all_reduce_grads = unit.reduces_always, False
    if replicas is not None:
        replicas.reduces = is_last
    stock = model if isinstance(model, FSDPModule) and not orders_of(model) else None
    if stock is not None:  # the user sharded it
        stock.set_requires_gradient_sync(is_last)
    try:
        yield
    finally:
        for unit in units:
            unit.reduce_grads = unit.all_reduce_grads = True
        if replicas is not None:
            replicas.reduces = True
        if stock is not None:
            stock.set_requires_gradient_sync(True)
