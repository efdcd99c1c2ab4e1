"""Operators that find no device memory."""

from __future__ import annotations

import torch


def fail(*args: object, **kwargs: object) -> None:
    """As the allocator of CUDA says it."""
    raise torch.OutOfMemoryError("Tried to allocate 512.00 KiB.")


class Fails(torch.autograd.Function):
    """An operator whose backward finds none."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        fail()
