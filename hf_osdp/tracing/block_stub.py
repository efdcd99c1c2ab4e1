"""Stand-ins for blocks equal to one that was traced: outputs of the same kind, no work."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..modeling.units import class_of
from .fake_copy import DEVICE

_POSITION_ATTRIBUTES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number"})
_SCALARS = (bool, int, float, str, type(None), torch.dtype)


def block_key(block: nn.Module) -> Hashable:
    """What makes two blocks cost the same: classes, scalar attributes but the layer's number, parameters."""
    parts: list[Hashable] = []
    for name, module in block.named_modules():
        scalars = tuple(
            (key, value)
            for key, value in vars(module).items()
            if key not in _POSITION_ATTRIBUTES and (isinstance(value, _SCALARS) or _is_scalars(value))
        )
        tensors = tuple(
            (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        )
        parts.append((name, class_of(module), scalars, tensors))
    return tuple(parts)


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """What makes two calls of a block cost the same: structure, and shapes, strides and dtypes of the tensors."""
    leaves, spec = tree_flatten((args, kwargs))
    return (str(spec), torch.is_grad_enabled(), tuple(_leaf_key(leaf) for leaf in leaves))


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorSpec:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=DEVICE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _InputLeaf:
    """An output that is one of the inputs."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """What a call gave back; `replay` gives the like for other inputs."""

    spec: TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> CallRecord | None:
        """Describe an output, or None if it holds objects that cannot be made anew."""
        inputs, _ = tree_flatten((args, kwargs))
        outputs, spec = tree_flatten(output)
        leaves = []
        for leaf in outputs:
            index = next((i for i, given in enumerate(inputs) if given is leaf), None)
            if isinstance(leaf, torch.Tensor):
                made = _TensorSpec(shape=tuple(leaf.shape), stride=leaf.stride(), dtype=leaf.dtype, requires_grad=leaf.requires_grad)
                leaves.append(made if index is None else _InputLeaf(index=index))
            elif isinstance(leaf, _SCALARS):
                leaves.append(leaf)
            elif index is not None:
                leaves.append(_InputLeaf(index=index))
            else:
                return None
        return cls(spec=spec, leaves=tuple(leaves))

    def replay(self, args: tuple[Any, ...], kwargs: dict[str, Any], anchor: nn.Parameter | None) -> Any:
        """Outputs of the same shapes.

        Args:
            args, kwargs: the call's arguments; those that need gradients get them in backward.
            anchor: a trainable parameter of the block, which makes the outputs differentiable if no argument is.
        """
        inputs, _ = tree_flatten((args, kwargs))
        differentiable = [leaf for leaf in inputs if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        traced = tuple(leaf for leaf in self.leaves if isinstance(leaf, _TensorSpec) and leaf.requires_grad)
        made = iter(_StandIn.apply(traced, anchor, *differentiable) if traced else ())
        leaves = [self._leaf(leaf, inputs, made) for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)

    @staticmethod
    def _leaf(leaf: Any, inputs: list[Any], made: Any) -> Any:
        if isinstance(leaf, _InputLeaf):
            return inputs[leaf.index]
        if isinstance(leaf, _TensorSpec):
            return next(made) if leaf.requires_grad else leaf.empty()
        return leaf


class _StandIn(torch.autograd.Function):
    """Allocates outputs in forward and input gradients in backward; keeps nothing between."""

    @staticmethod
    def forward(ctx: Any, outputs: tuple[_TensorSpec, ...], anchor: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.inputs = [(tuple(tensor.shape), tensor.dtype) for tensor in inputs]
        return tuple(spec.empty() for spec in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *(torch.empty(shape, dtype=dtype, device=DEVICE) for shape, dtype in ctx.inputs)


def _is_scalars(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, _SCALARS) for item in value)


def _leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
    return leaf if isinstance(leaf, _SCALARS) else type(leaf)
