"""When gradients cross the links, over the micro-steps of one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def micro_step(model: nn.Module, *, is_last: bool, reduce_every_micro_step: bool) -> Iterator[None]:
    """Forward and backward of one micro-batch.

    Held back, gradients stay whole on each rank until the last micro-step reduces their sum. Reduced each time, they are
    reduce-scattered and held as shards, for more communication; replicas all-reduce the sum in the last micro-step. The
    result is the same.

    Args:
        model: the sharded model; on an unsharded one this does nothing.
        is_last: the optimizer steps after this one.
        reduce_every_micro_step: the plan's choice.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_requires_gradient_sync(is_last or reduce_every_micro_step)
    model.set_requires_all_reduce(is_last)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)
