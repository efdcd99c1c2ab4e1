"""What one operator costs: FLOPs of products and attention, bytes moved by everything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from .tensors import tensors_in

aten = torch.ops.aten

_PICKS_ROWS = frozenset({aten.embedding, aten.index_select, aten.gather, aten.index, aten.nll_loss_forward})
"""Their first argument is a table of which they read about as many bytes as they write."""
_MOVES_NOTHING = frozenset({aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.lift_fresh})
"""They allocate or alias without touching memory, though their schemas do not say so."""


class OperatorCost(NamedTuple):
    """One call of one operator."""

    matmul_flops: int = 0
    traffic_bytes: int = 0


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Return the forward FLOPs of scaled dot-product attention: two products, 2 b h Tq Tk (d + dv), also where a causal mask halves them.

    Shapes are `[..., heads, T, d]`; grouped keys and values count for every query head, as in torch.utils.flop_counter.
    """
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def attention_backward_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Return the backward FLOPs of fused attention: five products against two, 2.5 times forward (FlashAttention-2, arXiv 2307.08691)."""
    return attention_flops(query, key, value) * 5 // 2


def operator_cost(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> OperatorCost:
    """Return an operator's FLOPs where torch.utils.flop_counter has a formula for it, else the bytes that it reads and writes."""
    packet = func._overloadpacket
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return OperatorCost(matmul_flops=attention_flops(*(tensor.shape for tensor in args[:3])))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return OperatorCost(matmul_flops=attention_backward_flops(*(tensor.shape for tensor in args[1:4])))
    if packet is aten._grouped_mm:
        return OperatorCost(matmul_flops=2 * args[0].numel() * args[1].shape[-1])
    if packet in flop_registry:
        return OperatorCost(matmul_flops=int(flop_registry[packet](*args, **kwargs, out_val=result)))
    if func.is_view or packet in _MOVES_NOTHING:
        return OperatorCost()
    written = _bytes(result)
    if packet in _PICKS_ROWS:
        return OperatorCost(traffic_bytes=_bytes((args[1:], kwargs)) + 2 * written)
    return OperatorCost(traffic_bytes=_bytes((args, kwargs)) + written)


def call_operator(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Call an operator on fake tensors, also where torch's shape function is narrower than its kernels.

    `aten._grouped_mm` (experts) computes in float32 on the CPU, but its shape function takes bfloat16 only.
    """
    if func._overloadpacket is not aten._grouped_mm or args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)
    a, b = args[0], args[1]
    groups = [len(args[2] if len(args) > 2 else kwargs["offs"]) if a.dim() == 2 else a.shape[0]] if a.dim() == b.dim() else []
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]))


def _bytes(value: object) -> int:
    """Return the bytes behind tensors; an expanded one has fewer than its elements say."""
    return sum(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()) for tensor in tensors_in(value))
