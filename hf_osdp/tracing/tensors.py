"""Find tensors and storages in arguments, wrappers and views; make fake tensors and call operators on them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

aten = torch.ops.aten

DEVICE = torch.device("cpu")
"""Device of fake tensors; a CPU-only build of torch aborts on fake CUDA tensors."""


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode, floating_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a fake tensor of the same shape and strides, whose memory no trace counts; a floating-point one gets
    `floating_dtype` if given.
    """
    dtype = floating_dtype if floating_dtype is not None and tensor.is_floating_point() else tensor.dtype
    with _disable_current_modes(), mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=DEVICE)


class FunctionMode(TorchFunctionMode):
    """Run other functions in place of torch's inside the context, also in backward, where blocks are recomputed."""

    def __init__(self, functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        """Replace each function, which a mode sees under its own name, by another with its arguments."""
        super().__init__()
        self._functions = functions

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is not torch.Tensor.backward:
            return self._functions.get(func, func)(*args, **kwargs or {})
        with self:  # torch takes a mode off while it handles a function
            return _run_backward(*args, **kwargs or {})


def _run_backward(
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: torch.Tensor | Iterable[torch.Tensor] | None = None,
) -> None:
    """Run `Tensor.backward`, whose own function would take the modes off again."""
    _engine_run_backward(
        (tensor,), (torch.ones_like(tensor) if gradient is None else gradient,),
        create_graph if retain_graph is None else retain_graph, create_graph,
        (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs or ()),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in an operator's arguments or result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor itself, or those inside a wrapper such as `DTensor`."""
    if is_dtensor(type(tensor)):
        yield from plain_tensors(tensor._local_tensor)  # type: ignore[attr-defined]
    elif is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor


@functools.cache
def is_dtensor(cls: type) -> bool:
    tensor = sys.modules.get(
        "torch.distributed.tensor"
    )  # without the import there are no DTensors; planning does not import it
    return tensor is not None and issubclass(cls, tensor.DTensor)


def storages_in(value: object) -> Iterator[tuple[torch.Tensor, torch.UntypedStorage]]:
    """Yield each plain tensor in an operator's arguments or result with its storage; sparse tensors, which have
    none, are left out.
    """
    for tensor in tensors_in(value):
        for plain in (tensor,) if type(tensor) is FakeTensor else plain_tensors(tensor):
            try:
                storage = plain.untyped_storage()
            except (NotImplementedError, RuntimeError):
                continue
            yield plain, storage


def call_operator(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Call an operator; on fake tensors replace `aten._grouped_mm`, whose shape function accepts less than its
    kernels.

    `aten._grouped_mm` (experts) computes in float32 on the CPU, but its shape function accepts only bfloat16.
    """
    if (
        func._overloadpacket is not aten._grouped_mm
        or args[0].dtype is torch.bfloat16
        or not isinstance(args[0], FakeTensor)
    ):
        return func(*args, **kwargs)
    a, b = args[0], args[1]
    groups = (
        [len(args[2] if len(args) > 2 else kwargs["offs"]) if a.dim() == 2 else a.shape[0]]
        if a.dim() == b.dim()
        else []
    )
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]))
