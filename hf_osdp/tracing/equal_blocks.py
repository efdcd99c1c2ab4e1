"""Replay the outputs of traced blocks: of equal blocks only two are traced, and the others return outputs of the
same shapes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..modeling.units import class_of
from .tensors import DEVICE

_POSITION_ATTRIBUTES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number"})
_TRACED = 2
"""Number of equal blocks that are traced: the first one differs, because the model's own forward also holds its
input.
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


class RecordedCall(NamedTuple):
    """The structure of what a call returned; `replay` makes the same for other inputs."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    """The outputs: scalars unchanged, None for tensors."""
    input_positions: dict[int, int]
    """For each output that is an input, the input's position."""
    new_tensors: dict[int, _TensorSpec]
    """The outputs that are new tensors, by position."""
    note: Any
    """What the caller noted about it."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], output: object, note: object) -> RecordedCall | None:
        """Describe an output; return None if it holds objects that cannot be recreated."""
        inputs = {id(leaf): number for number, leaf in reversed(list(enumerate(tree_flatten((args, kwargs))[0])))}
        outputs, spec = tree_flatten(output)
        leaves = tuple(leaf if isinstance(leaf, _SCALARS) else None for leaf in outputs)
        others = {position: leaf for position, leaf in enumerate(outputs) if not isinstance(leaf, _SCALARS)}
        input_positions = {position: inputs[id(leaf)] for position, leaf in others.items() if id(leaf) in inputs}
        new = {position: leaf for position, leaf in others.items() if position not in input_positions}
        if not all(isinstance(leaf, torch.Tensor) for leaf in new.values()):
            return None
        specs = {position: _TensorSpec.of(leaf) for position, leaf in new.items()}
        return cls(spec, leaves, input_positions, specs, note)

    def replay(self, args: tuple[Any, ...], kwargs: dict[str, Any], anchor: nn.Parameter | None) -> object:
        """Make outputs of the same shapes, differentiable by the inputs and by `anchor`, a trainable parameter of
        the block.
        """
        inputs, _ = tree_flatten((args, kwargs))
        differentiable = [leaf for leaf in inputs if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        specs = tuple(spec for spec in self.new_tensors.values() if spec.requires_grad)
        made = iter(_AllocateOutputs.apply(specs, anchor, *differentiable) if specs else ())
        leaves = list(self.leaves)
        for position, number in self.input_positions.items():
            leaves[position] = inputs[number]
        for position, spec in self.new_tensors.items():
            leaves[position] = next(made) if spec.requires_grad else spec.empty()
        return tree_unflatten(leaves, self.spec)


class EqualCalls:
    """The calls of equal blocks in one run: after two traced ones, the next ones are only replayed."""

    def __init__(self) -> None:
        self._traced: dict[Hashable, list[RecordedCall]] = {}

    def find(self, key: Hashable) -> RecordedCall | None:
        """Return the call to replay for a key of block and arguments; None if this one has to run."""
        traced = self._traced.get(key, [])
        return traced[-1] if len(traced) == _TRACED else None

    def add(
        self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any], output: object, note: object = None
    ) -> None:
        """Add a call that ran; one whose output cannot be made again will never be replayed."""
        if (call := RecordedCall.of(args, kwargs, output, note)) is not None:
            self._traced.setdefault(key, []).append(call)


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
