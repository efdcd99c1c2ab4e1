"""What one operator costs: FLOPs of products and attention, bytes moved by everything else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

_PICKS_ROWS = frozenset({aten.embedding, aten.index_select, aten.gather, aten.index, aten.nll_loss_forward})
"""Their first argument is a table of which they read about as many bytes as they write."""
_MOVES_NOTHING = frozenset({aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.lift_fresh})
"""They allocate or alias without touching memory, though their schemas do not say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """One call of one operator."""

    matmul_flops: int = 0
    traffic_bytes: int = 0


def attention_flops(query: Iterable[int], key: Iterable[int], value: Iterable[int]) -> int:
    """Forward FLOPs of scaled dot-product attention: two products, 2 b h Tq Tk (d + dv); a causal mask saves nothing here.

    Args:
        query, key, value: shapes `[..., heads, T, d]`; grouped keys and values count for every query head.

    Returns:
        FLOPs, counted as torch.utils.flop_counter counts them.
    """
    *batch, queries, width = query
    keys, value_width = list(key)[-2], list(value)[-1]
    heads = 1
    for size in batch:
        heads *= size
    return 2 * heads * queries * keys * (width + value_width)


def attention_backward_flops(query: Iterable[int], key: Iterable[int], value: Iterable[int]) -> int:
    """Backward FLOPs of fused attention: five products against two, so 2.5 times forward (FlashAttention-2, arXiv 2307.08691)."""
    return attention_flops(query, key, value) * 5 // 2


def operator_cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> OperatorCost:
    """The cost of a call that a dispatch mode saw.

    Args:
        func: the operator overload.
        args, kwargs, result: its arguments and what it returned, real or fake.

    Returns:
        FLOPs where torch.utils.flop_counter has a formula for the operator, else the bytes it reads and writes.
    """
    packet = func._overloadpacket
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return OperatorCost(matmul_flops=attention_flops(args[0].shape, args[1].shape, args[2].shape))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return OperatorCost(matmul_flops=attention_backward_flops(args[1].shape, args[2].shape, args[3].shape))
    if packet is aten._grouped_mm:
        return OperatorCost(matmul_flops=2 * args[0].numel() * args[1].shape[-1])
    if packet in flop_registry:
        return OperatorCost(matmul_flops=int(flop_registry[packet](*args, **kwargs, out_val=result)))
    if func.is_view or packet in _MOVES_NOTHING:
        return OperatorCost()
    written = sum(_bytes(tensor) for tensor in _tensors(result))
    read_args = args[1:] if packet in _PICKS_ROWS else args
    read = sum(_bytes(tensor) for tensor in _tensors((read_args, kwargs)))
    if packet in _PICKS_ROWS:
        read += written
    return OperatorCost(traffic_bytes=read + written)


def call_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator on fake tensors, also where torch's shape function is narrower than its kernels.

    `aten._grouped_mm` (experts) computes in float32 on the CPU, but its shape function takes bfloat16 only.
    """
    if func._overloadpacket is not aten._grouped_mm or args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)
    a, b = args[0], args[1]
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    shape = (a.shape[-2], b.shape[-1])
    if a.dim() == b.dim():
        shape = (len(offsets) if a.dim() == 2 else a.shape[0], *shape)
    return a.new_empty(shape)


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor; an expanded one has fewer than its elements say."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
