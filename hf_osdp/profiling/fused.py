"""Stand-ins for CUDA's fused kernels, so that a trace without a GPU allocates what they allocate.

On the CPU attention with dropout falls back to explicit products, and dropout keeps its noise in the activations' dtype.
CUDA runs FlashAttention or memory-efficient attention whatever the dropout, and keeps dropout's mask in bool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from .operators import attention_backward_flops, attention_flops

CountFlops = Callable[[int], None]


class FusedKernels(TorchFunctionMode):
    """Replaces attention and dropout by functions that allocate as CUDA's kernels do.

    Args:
        count_flops: called with the FLOPs of each attention, in forward and in backward.
    """

    def __init__(self, count_flops: CountFlops) -> None:
        super().__init__()
        self._count_flops = count_flops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward and not any(kwargs.values()):
            with self:  # torch leaves the mode while it handles a call, but blocks that are recomputed in backward need it
                return _backward(*args)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is torch.dropout:
            return _dropout(*args, **kwargs)
        if func is F.dropout:
            return _functional_dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)  # the kernels take an additive bias
        return _FusedAttention.apply(query, key, value, attn_mask, self._count_flops)


def _backward(loss: torch.Tensor) -> None:
    """`loss.backward()` without asking the function modes again."""
    _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


class _FusedAttention(torch.autograd.Function):
    """Allocates what FlashAttention-2 does: output and float32 logsumexp; float32 query gradients in half precision's backward."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: Any, count_flops: CountFlops) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        # both kernels write [b, T, h, d] and return a transposed view, so that the caller's reshape copies nothing
        out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, logsumexp, bias)
        ctx.count_flops = count_flops
        count_flops(attention_flops(query.shape, key.shape, value.shape))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, _, logsumexp, bias = ctx.saved_tensors
        row_sums = torch.empty_like(logsumexp)
        wide = torch.empty_like(query, dtype=torch.float32) if query.element_size() < 4 else None
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        bias_grad = torch.empty_like(bias) if ctx.needs_input_grad[3] else None
        ctx.count_flops(attention_backward_flops(query.shape, key.shape, value.shape))
        del row_sums, wide
        return *grads, bias_grad, None


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """`torch.dropout` as its fused CUDA kernel runs it: the mask is saved as bool."""
    if not train or not 0 < p < 1 or input.numel() == 0:
        return torch.dropout(input, p, train)
    return torch.native_dropout(input, p, train)[0]


def _functional_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if inplace or not training:
        return F.dropout(input, p, training, inplace)
    return _dropout(input, p, training)
