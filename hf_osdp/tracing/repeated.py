"""Repeat operators that ran before with arguments of the same shapes: their results are made without `FakeTensorMode`.

The cache of `FakeTensorMode` takes 0.1 ms for each operator, half of a trace's time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

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


class Call:
    """An operator call.

    Calls with equal `key` have equal results and costs; it is None if these depend on more than shapes.
    """

    def __init__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.tensors: list[torch.Tensor] = []
        self.storages: list[torch.UntypedStorage] = []
        self.key: object = None
        if func.namespace in _NAMESPACES and not func._schema.is_mutable and func not in ASSUMED:
            try:
                self.key = (func, self._key(args), self._key(tuple(kwargs.items())) if kwargs else None)
            except _UnknownTypeError:
                self.tensors.clear()

    def _key(self, value: Any) -> object:  # noqa: ANN401
        kind = type(value)
        if kind is FakeTensor and value.constant is None:
            storage = value.untyped_storage()
            self.tensors.append(value)
            self.storages.append(storage)
            return value.shape, value.stride(), value.storage_offset(), value.dtype, storage.nbytes()
        if kind is tuple or kind is list:
            return kind, *map(self._key, value)
        if kind not in _PLAIN:
            raise _UnknownTypeError
        return kind, value


class _UnknownTypeError(Exception):
    """An argument of an unknown type."""


class _ResultSpec(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Repeatable(NamedTuple):
    """A description of an operator's result: new tensors, or a view of its first argument."""

    is_view: bool
    kind: type
    """`tuple`, `list`, or the type of a single tensor."""
    specs: Sequence[_ResultSpec | None]
    is_small: bool
    work: PhaseRecord

    @classmethod
    def of(cls, call: Call, result: Any, is_small: bool, work: PhaseRecord) -> Repeatable | None:  # noqa: ANN401
        """Describe a result; return None unless it depends only on shapes and is a view of the first argument or
        new plain tensors.
        """
        kind = type(result)
        results = result if kind in (tuple, list) else (result,)
        tensors = [each for each in results if each is not None]
        by_shapes = (call.tensors or call.func is _EMPTY) and _BY_VALUES.isdisjoint(call.func.tags)
        if not (by_shapes and tensors and all(map(_is_plain, tensors))):
            return None
        inputs, outputs = (
            [storage._cdata for storage in s] for s in (call.storages, map(torch.Tensor.untyped_storage, tensors))
        )
        is_view = kind is FakeTensor and outputs == inputs[:1] and result is not call.tensors[0]
        is_new = len({*inputs, *outputs}) == len({*inputs}) + len(outputs) and all(map(_fills_its_storage, tensors))
        if not (is_view or is_new):
            return None
        specs = [
            None if each is None else _ResultSpec(each.shape, each.stride(), each.storage_offset(), each.dtype)
            for each in results
        ]
        return cls(is_view, kind, specs, is_small, work)

    def repeat(self, call: Call, mode: FakeTensorMode) -> Any:  # noqa: ANN401
        """Return the result of a call with the same key."""
        with torch._C._DisableTorchDispatch():
            if self.is_view:
                spec = self.specs[0]
                assert spec is not None
                view = torch.empty(0, dtype=spec.dtype, device="meta")
                return FakeTensor(mode, view.set_(call.storages[0], spec.offset, spec.shape, spec.stride), DEVICE)
            results = [
                None if spec is None
                else FakeTensor(mode, torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta"),
                                DEVICE)
                for spec in self.specs
            ]  # fmt: skip
        return self.kind(results) if self.kind in (tuple, list) else results[0]


@functools.cache
def seen_operators() -> dict[object, Repeatable | None]:
    """Return the results of operators that ran in this process, by `Call.key`; None for those that must run again.

    They depend only on shapes, so that all traces share them: half of a first trace's time is spent on them.
    """
    return {}


def _is_plain(value: object) -> bool:
    return type(value) is FakeTensor and value.layout is torch.strided and not value.is_complex()


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    elements = last + 1 if tensor.numel() else 0
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == elements * tensor.element_size()
