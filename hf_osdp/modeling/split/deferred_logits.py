"""Logits that are computed when they are read, and in chunks when the loss reads them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from ...errors import OSDPError

_KEPT = frozenset({"to", "float", "tanh", "mul", "div"})
"""Element-wise methods, which can be applied to each chunk if their arguments are numbers, dtypes and devices."""
Change = tuple[Any, ...]
"""A method of a tensor, with its arguments."""


def changed(logits: torch.Tensor, changes: tuple[Change, ...]) -> torch.Tensor:
    """Apply changes to logits."""
    for name, *args in changes:
        logits = getattr(logits, name)(*args)
    return logits


class DeferredLogits:
    """Logits that are computed when something reads them, and in chunks when `F.cross_entropy` reads them.

    Casts, views that keep the vocabulary as the last dimension, slices of tokens, scales by numbers and tanh are
    stored and applied to each chunk. All other operations get a tensor of all logits. `head` is a `ChunkedHead`.
    """

    def __init__(self, head: Any, hidden: torch.Tensor, changes: tuple[Change, ...] = ()) -> None:  # noqa: ANN401
        self._head, self._hidden, self._changes = head, hidden, changes

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._head.out_features))

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self._hidden.dim()

    def contiguous(self) -> DeferredLogits:
        return self

    def view(self, *sizes: Any) -> Any:  # noqa: ANN401 - a tensor if the vocabulary does not stay last
        shape = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
        if not isinstance(shape, (tuple, list)) or not shape or shape[-1] != self._head.out_features:
            return self.whole().view(*sizes)
        return DeferredLogits(self._head, self._hidden.reshape(*shape[:-1], self._hidden.shape[-1]), self._changes)

    reshape = view

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401
        keys = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(one, slice) or one is Ellipsis for one in keys):
            return self.whole()[key]
        cuts_vocabulary = (len(keys) == self.dim() or Ellipsis in keys) and keys[-1] not in (Ellipsis, slice(None))
        if cuts_vocabulary:
            return self.whole()[key]
        return DeferredLogits(self._head, self._hidden[key], self._changes)

    def __mul__(self, other: Any) -> Any:  # noqa: ANN401
        return self._changed("mul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:  # noqa: ANN401
        return self._changed("div", other)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse_in_place(name)
        return partial(self._changed, name) if name in _KEPT else getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        given = kwargs or {}
        if func is F.cross_entropy:
            bound = _CROSS_ENTROPY.bind(*args, **given)
            bound.apply_defaults()
            logits = bound.arguments.pop("input")
            if isinstance(logits, cls) and (found := logits._cross_entropy(**bound.arguments)) is not None:
                return found
        if func is torch.tanh and len(args) == 1 and not given:
            return args[0].tanh()
        _refuse_in_place(getattr(func, "__name__", ""))
        return func(*(_whole(arg) for arg in args), **{name: _whole(value) for name, value in given.items()})

    def whole(self) -> torch.Tensor:
        """Compute all logits, as in the unchanged model."""
        self._head.warn_of_whole()
        return changed(self._head.project(self._hidden), self._changes)

    def _changed(self, method: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if kwargs or not all(isinstance(arg, (int, float, str, torch.dtype, torch.device)) for arg in args):
            return getattr(self.whole(), method)(*args, **kwargs)
        return DeferredLogits(self._head, self._hidden, (*self._changes, (method, *args)))

    def _cross_entropy(
        self,
        target: torch.Tensor,
        ignore_index: int,
        reduction: str,
        label_smoothing: float,
        weight: object,
        **deprecated: Any,
    ) -> torch.Tensor | None:
        """Return the loss, or None if it is not a sum or mean over tokens with one class each."""
        classes = target.dim() == 1 and not target.is_floating_point() and self.dim() == 2
        is_plain = weight is deprecated["size_average"] is deprecated["reduce"] is None
        if not classes or not is_plain or reduction not in ("sum", "mean"):
            return None
        total = self._head.sum_of(self._hidden, target, self._changes, ignore_index, label_smoothing)
        return total if reduction == "sum" else total / (target != ignore_index).sum()


def _of_whole(name: str) -> Callable[..., Any]:
    return lambda logits, *others: getattr(logits.whole(), name)(*map(_whole, others))


_CROSS_ENTROPY = inspect.signature(F.cross_entropy)
for _name in "add radd sub rsub rtruediv matmul rmatmul pow neg abs lt le gt ge eq ne len iter".split():
    setattr(DeferredLogits, f"__{_name}__", _of_whole(f"__{_name}__"))


def _refuse_in_place(name: str) -> None:
    """Refuse methods that would change or observe a tensor of all logits, which the loss does not use."""
    if (name.endswith("_") and not name.endswith("__")) or name in ("register_hook", "retain_grad"):
        raise OSDPError(
            f"{name} of the logits has no effect on a loss in chunks; write logits = logits.{name.rstrip('_')}(...),"
            " or plan with"
            " split_vocabulary=False."
        )


def _whole(value: Any) -> Any:  # noqa: ANN401
    return value.whole() if isinstance(value, DeferredLogits) else value
