"""Replay the outputs of traced blocks: of equal blocks only two are traced, and the others return outputs of the
same shapes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ..modeling.units import class_of
from .tensors import DEVICE

_POSITION_ATTRIBUTES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number"})
TRACED = 2
"""Number of equal blocks that are traced in a run: the first one differs, because the model's own forward also holds
its input.
"""
_SCALARS = (bool, int, float, str, type(None), torch.dtype)


def block_key(block: nn.Module) -> Hashable:
    """Return a key that is equal for blocks of equal cost: classes, scalar attributes except the layer index,
    parameters and buffers.
    """
    parts: list[Hashable] = []
    for name, module in block.named_modules():
        attributes = ((key, value) for key, value in vars(module).items() if key not in _POSITION_ATTRIBUTES)
        scalars = tuple((key, value) for key, value in attributes if _is_scalar(value))
        tensors = tuple(
            (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        )
        parts.append((name, class_of(module), scalars, tensors))
    return tuple(parts)


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return a key that is equal for calls of equal cost: structure, and shapes, strides and dtypes of the tensors."""
    leaves, spec = tree_flatten((args, kwargs))
    keys = (
        _TensorSpec.of(leaf) if isinstance(leaf, torch.Tensor) else leaf if isinstance(leaf, _SCALARS) else type(leaf)
        for leaf in leaves
    )
    return str(spec), torch.is_grad_enabled(), tuple(keys)


class _TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _TensorSpec:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=DEVICE)


class _Input(int):
    """The position of an input that is an output, too."""


class RecordedCall(NamedTuple):
    """The structure of what a call returned; `replay` makes the same for other inputs."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    """The outputs: scalars, inputs, and `_TensorSpec` of new tensors."""
    note: Any
    """What the caller noted about it."""

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any], output: object, note: object = None
    ) -> RecordedCall | None:
        """Describe an output; return None if it holds objects that cannot be recreated."""
        inputs = {id(leaf): _Input(number) for number, leaf in reversed(list(enumerate(tree_leaves((args, kwargs)))))}
        outputs, spec = tree_flatten(output)
        if not all(isinstance(leaf, (*_SCALARS, torch.Tensor)) or id(leaf) in inputs for leaf in outputs):
            return None
        leaves = (
            leaf if isinstance(leaf, _SCALARS) else inputs[id(leaf)] if id(leaf) in inputs else _TensorSpec.of(leaf)
            for leaf in outputs
        )
        return cls(spec, tuple(leaves), note)

    def replay(self, args: tuple[Any, ...], kwargs: dict[str, Any], anchor: nn.Parameter | None) -> object:
        """Make outputs of the same shapes, differentiable by the inputs and by `anchor`, a trainable parameter of
        the block.
        """
        inputs = tree_leaves((args, kwargs))
        differentiable = [leaf for leaf in inputs if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        specs = tuple(leaf for leaf in self.leaves if isinstance(leaf, _TensorSpec) and leaf.requires_grad)
        made = iter(_AllocateOutputs.apply(specs, anchor, *differentiable) if specs else ())

        def output(leaf: Any) -> object:  # noqa: ANN401
            if isinstance(leaf, _TensorSpec):
                return next(made) if leaf.requires_grad else leaf.empty()
            return inputs[leaf] if isinstance(leaf, _Input) else leaf

        return tree_unflatten([output(leaf) for leaf in self.leaves], self.spec)


class _AllocateOutputs(torch.autograd.Function):
    """Allocate outputs in forward and input gradients in backward; save nothing in between."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        specs: tuple[_TensorSpec, ...],
        anchor: object,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.inputs = [(tuple(tensor.shape), tensor.dtype) for tensor in inputs]
        return tuple(spec.empty() for spec in specs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        return None, None, *(torch.empty(shape, dtype=dtype, device=DEVICE) for shape, dtype in ctx.inputs)


def _is_scalar(value: object) -> bool:
    return isinstance(value, _SCALARS) or (
        isinstance(value, tuple) and all(isinstance(item, _SCALARS) for item in value)
    )
