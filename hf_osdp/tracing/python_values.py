"""Read known values as Python numbers, lists and text, and make tensors of lists that hold fake ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ..modeling.replaced import replaced
from .tensors import FunctionMode, tensors_in

Value = Callable[[torch.Tensor], torch.Tensor | None]
"""Function from a fake tensor to a real one with its values; None if they are not known."""


@contextmanager
def python_values(value: Value) -> Iterator[None]:
    """Let `tolist`, `format`, NumPy, `torch.tensor` and `torch.as_tensor` use known values inside the context.

    Torch reads the memory of tensors in a list, which fake ones do not have. Fake tensors make lists by one operator
    for each element, which takes seconds for the tokens of a batch, and which no mode sees.
    """
    reads = FunctionMode({
        torch.tensor: functools.partial(_of_lists, torch.tensor),
        torch.as_tensor: functools.partial(_of_lists, torch.as_tensor),
        torch.Tensor.__format__: _format,
        torch.Tensor.__array__: functools.partial(_array, value),
    })  # fmt: skip
    with (
        replaced(FakeTensor, tolist=lambda tensor: _list(value, tensor)),
        replaced(torch.utils, swap_tensors=_swap),
        reads,
    ):
        yield


_list_one_by_one = FakeTensor.tolist
_swap_tensors = torch.utils.swap_tensors


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Leave parameters of a module that moves to its own device as they are: fake ones cannot be swapped."""
    if not isinstance(one, FakeTensor) or (one.dtype, one.device) != (other.dtype, other.device):
        _swap_tensors(one, other)


def _of_lists(make: Callable[..., torch.Tensor], data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
    parts = data if isinstance(data, (list, tuple)) else ()
    dtypes = [tensor.dtype for tensor in tensors_in(parts) if isinstance(tensor, FakeTensor)]
    if dtypes and kwargs.get("dtype") is None:
        kwargs["dtype"] = functools.reduce(torch.promote_types, dtypes)
    plain = tree_map_only(FakeTensor, FakeTensor.tolist, data) if dtypes else data
    return make(plain, *args, **kwargs)


def _list(value: Value, tensor: FakeTensor) -> Any:  # noqa: ANN401
    if (values := value(tensor)) is None:
        return _list_one_by_one(tensor)
    with _disable_current_modes():
        return values.tolist()


def _array(value: Value, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Return the values, or zeros, with which SciPy matches the boxes of a picture in their order."""
    if not isinstance(tensor, FakeTensor):
        return tensor.__array__(*args, **kwargs)
    values = value(tensor)
    with _disable_current_modes():
        return np.asarray(torch.zeros(tensor.shape, dtype=tensor.dtype) if values is None else values, *args, **kwargs)


def _format(tensor: torch.Tensor, spec: str) -> str:
    """Return the text of a number, by which experts are looked up."""
    if not isinstance(tensor, FakeTensor):
        return tensor.__format__(spec)
    return format(tensor.item(), spec) if tensor.dim() == 0 else object.__format__(tensor, spec)
