"""Repeat operators that ran before with arguments of the same shapes: their results are made without `FakeTensorMode`.

The cache of `FakeTensorMode` takes 0.1 ms for each operator, half of a trace's time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .known_values import ASSUMED
from .tensors import DEVICE
from .work import PhaseRecord

_NAMESPACES = frozenset({"aten", "hf_osdp"})
_EMPTY = torch.ops.aten.empty_strided.default
_BY_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


_Spec: TypeAlias = tuple[torch.Size, tuple[int, ...], int | torch.SymInt, torch.dtype]
"""Shape, strides, storage offset and dtype."""


def keyed(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, list[torch.Tensor]]:
    """Return a key, which calls with equal results and costs share, and a call's tensors; the key is None if these
    depend on more than shapes.
    """
    tensors: list[torch.Tensor] = []
    if func.namespace not in _NAMESPACES or func._schema.is_mutable or func in ASSUMED:
        return None, tensors
    try:
        return (func, _key(args, tensors), _key(tuple(kwargs.items()), tensors) if kwargs else None), tensors
    except _UnknownTypeError:
        return None, tensors


def _key(value: Any, tensors: list[torch.Tensor]) -> object:  # noqa: ANN401
    kind = type(value)
    if kind is FakeTensor and value.constant is None:
        tensors.append(value)
        return *_spec_of(value), value.untyped_storage().nbytes()
    if kind is tuple or kind is list:
        return kind, *(_key(item, tensors) for item in value)
    if kind not in _PLAIN:
        raise _UnknownTypeError
    return kind, value


class _UnknownTypeError(Exception):
    """An argument of an unknown type."""


class Repeatable(NamedTuple):
    """A description of an operator's result: new tensors, or a view of its first argument."""

    is_view: bool
    kind: type
    """`tuple`, `list`, or the type of a single tensor."""
    specs: Sequence[_Spec | None]
    is_small: bool
    work: PhaseRecord

    @classmethod
    def of(
        cls, func: OpOverload, given: Sequence[torch.Tensor], result: Any, is_small: bool, work: PhaseRecord  # noqa: ANN401
    ) -> Repeatable | None:  # fmt: skip
        """Describe a result; return None unless it depends only on shapes and is a view of the first given tensor or
        new plain tensors.
        """
        kind = type(result)
        results = result if kind in (tuple, list) else (result,)
        tensors = [each for each in results if each is not None]
        by_shapes = (given or func is _EMPTY) and _BY_VALUES.isdisjoint(func.tags)
        if not (by_shapes and tensors and all(map(_is_plain, tensors))):
            return None
        inputs, outputs = ([each.untyped_storage()._cdata for each in some] for some in (given, tensors))
        is_view = kind is FakeTensor and outputs == inputs[:1] and result is not given[0]
        is_new = len({*inputs, *outputs}) == len({*inputs}) + len(outputs) and all(map(_fills_its_storage, tensors))
        if not (is_view or is_new):
            return None
        return cls(is_view, kind, [None if each is None else _spec_of(each) for each in results], is_small, work)

    def repeat(self, given: Sequence[torch.Tensor], mode: FakeTensorMode) -> Any:  # noqa: ANN401
        """Return the result of a call with the same key."""

        def made(
            shape: torch.Size, stride: tuple[int, ...], offset: int | torch.SymInt, dtype: torch.dtype
        ) -> FakeTensor:
            if self.is_view:
                empty = torch.empty(0, dtype=dtype, device="meta")
                return FakeTensor(mode, empty.set_(given[0].untyped_storage(), offset, shape, stride), DEVICE)
            return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), DEVICE)

        with torch._C._DisableTorchDispatch():
            results = [None if spec is None else made(*spec) for spec in self.specs]
        return self.kind(results) if self.kind in (tuple, list) else results[0]


def _spec_of(tensor: torch.Tensor) -> _Spec:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


@functools.cache
def seen_operators() -> dict[object, Repeatable | None]:
    """Return the results of operators that ran in this process, by their calls' keys; None for those that must run
    again.

    They depend only on shapes, so that all traces share them: half of a first trace's time is spent on them.
    """
    return {}


def _is_plain(value: object) -> bool:
    return type(value) is FakeTensor and value.layout is torch.strided and not value.is_complex()


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    elements = last + 1 if tensor.numel() else 0
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == elements * tensor.element_size()
