"""The work of operators: FLOPs of products and of fused attention, and the bytes that are read and written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from ..modeling.selective import operator_name
from .attention import attention_flops
from .kernel_scratch import KernelScratch
from .tensors import tensors_in

aten = torch.ops.aten

_PICKS_ROWS = frozenset({aten.embedding, aten.index_select, aten.gather, aten.index, aten.nll_loss_forward})
"""Operators whose first argument is a table, from which they read about as many bytes as they write."""
_MOVES_NOTHING = frozenset({
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.lift_fresh,
    aten._unsafe_view,
})  # fmt: skip
"""Operators that allocate or alias without reading or writing memory, though their schemas do not say so."""

_PRODUCTS = flop_registry | {aten.addmm_: flop_registry[aten.addmm], aten.baddbmm_: flop_registry[aten.baddbmm]}
"""Formulas of FLOPs, which torch has not for products that are added in place, as in the loss in chunks."""

WORK = ("matmul_flops", "attention_flops", "product_bytes", "traffic_bytes")
"""Fields of a phase that say how long it takes on a device."""
_KERNEL, _VIEW = 1.75, 0.75
"""CPU time of an operator that runs a kernel, and of one that only makes a view or allocates, with the model's Python,
as multiples of the mean operator that `measurement.rates.operator_seconds` times: docs/rates.md.
"""
_CAUSAL_SHARE = 0.5
"""Share of the scores that a fused kernel computes under a causal mask: none above the diagonal."""


@dataclass(slots=True, kw_only=True)
class PhaseRecord:
    levels: list[int] = field(default_factory=list)
    """Live bytes when the phase began and after each of its operators."""
    come: list[int] = field(default_factory=list)
    """How many of these bytes are gradients of parameters that had come before."""
    scratch: list[tuple[int, KernelScratch]] = field(default_factory=list)
    """Indices of the levels after the operators whose kernels take memory while they run, and what these take."""
    matmul_flops: int = 0
    attention_flops: int = 0
    product_bytes: int = 0
    traffic_bytes: int = 0
    operators: float = 0.0
    """CPU time, in operators: `_KERNEL` and `_VIEW`."""

    def add(self, work: PhaseRecord) -> None:
        """Add the work of another record."""
        for name in (*WORK, "operators"):
            setattr(self, name, getattr(self, name) + getattr(work, name))

    def count(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Count an operator: the bytes that it reads and writes, and its FLOPs if there is a formula
        for it.
        """
        packet = func._overloadpacket
        if func.namespace == "prim":  # a query about a fake tensor, not a computation
            return
        moves = not func.is_view and packet not in _MOVES_NOTHING
        self.operators += _KERNEL if moves else _VIEW
        if (flops := _attention_flops(func, args, kwargs)) is not None:
            self.attention_flops += flops
            self.product_bytes += _bytes((args, kwargs)) + _bytes(result)
        elif packet is aten._grouped_mm or packet in _PRODUCTS:
            grouped = packet is aten._grouped_mm
            self.matmul_flops += (
                2 * args[0].numel() * args[1].shape[-1]
                if grouped
                else int(_PRODUCTS[packet](*args, **kwargs, out_val=result))
            )
            self.product_bytes += _bytes((args, kwargs)) + _bytes(result)
        elif packet in _PICKS_ROWS:
            self.traffic_bytes += _bytes((args[1:], kwargs)) + 2 * _bytes(result)
        elif moves:
            self.traffic_bytes += _bytes((args, kwargs)) + _bytes(result)


def _attention_flops(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the FLOPs of a fused attention operator; None if it is another one."""
    backward = "attention" in func._schema.name and func._schema.name.endswith("backward")
    if not backward and operator_name(func) != "attention":
        return None
    shapes = [tensor.shape for tensor in args[backward : 3 + backward]]
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    share = _CAUSAL_SHARE if named.get("is_causal", False) else 1.0
    return round(share * attention_flops(*shapes, backward=backward))


def _bytes(value: object) -> int:
    """Return the bytes of tensors' memory; an expanded tensor has fewer than its elements need."""
    return sum(
        min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()) for tensor in tensors_in(value)
    )
