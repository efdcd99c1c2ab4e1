"""Work on weights between steps: whole parameters in a context, and element-wise work of callbacks across layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..distributed.process_group import require_all
from ..errors import OSDPError
from ..modeling.replaced import replaced
from ..modeling.wrapping import SkippableMode
from .gradient_checks import REMEDY
from .replicas import replicas_of
from .state import broadcast_into, free_gathered, gathered
from .unit_order import units_of

_REFUSED_BY_TORCH = {
    "mixes whole tensors with shards of weights": (
        "got mixed torch.Tensor and DTensor", "inputs with different meshes", "must have the same mesh",
    ),
    "does with shards of weights what torch cannot do": (
        "Sharding propagation failed", "unevenly sharded tensor", "along the sharded dimension",
        "for tensor subclasses", "on an invalid python storage",
    ),
}  # fmt: skip
"""What work on shards did, and parts of torch's messages about it."""
_BETWEEN_STEPS = "do this within `with hf_osdp.full_parameters(model):`, on every rank"


@contextmanager
def full_parameters(model: nn.Module, *, write_back: bool = True) -> Iterator[nn.Module]:
    """Make a sharded model's parameters whole, plain tensors on every rank inside the context. Collective.

    For code between steps that needs whole weights: an average of weights, `load_state_dict` of a part,
    `merge_and_unload`, saving a part. The whole model is on the device meanwhile. The model cannot be called inside.
    At the end its parameters are shards again, with rank 0's changes; a model that is not sharded is left alone, and
    may be called.

    ```python
    with hf_osdp.full_parameters(model, write_back=False):
        average.update_parameters(model)
    ```

    Args:
        model: the model, or a module of it to gather only that, as `accelerator.prepare` or the Trainer has sharded
            it.
        write_back: whether shards take the changes; False saves a broadcast of each parameter.

    Raises:
        OSDPError: not every rank enters, or the model is called inside.
    """
    free_gathered(model)
    replicas = replicas_of(model)
    named = ((module, leaf, p) for module in model.modules() for leaf, p in module._parameters.items())
    held: list[tuple[nn.Module, str, Any]] = [
        found for found in named if isinstance(found[2], DTensor) or (replicas is not None and found[2] is not None)
    ]
    if not held:
        yield model
        return
    require_all("hf_osdp.full_parameters")
    shards = {id(shard): shard for _, _, shard in held}
    with torch.no_grad():
        whole = {key: nn.Parameter(_whole(shard), shard.requires_grad) for key, shard in shards.items()}
    plain = {module for module, _, shard in held if not isinstance(shard, DTensor)}
    begin = partial(_refuse_call, model, ())
    with _units_at_rest(model, plain), nullcontext() if replicas is None else replaced(replicas, begin=begin):
        for module, leaf, shard in held:
            module._parameters[leaf] = whole[id(shard)]
        try:
            yield model
        finally:
            changed = {id(shard): getattr(module, leaf) for module, leaf, shard in held}
            for module, leaf, shard in held:
                module._parameters[leaf] = shard
    with torch.no_grad():
        for key, shard in shards.items() if write_back else ():
            broadcast_into(shard, changed[key])


@contextmanager
def _units_at_rest(model: nn.Module, replicated: set[nn.Module]) -> Iterator[None]:
    """Refuse calls of the units and of `replicated` modules in this context, and keep FSDP2 from taking a loaded whole
    parameter for a shard.
    """
    groups = units_of(model)
    refusing = replicated.union(*(group.modules for group in groups))
    with ExitStack() as stack:
        for module in refusing:
            stack.callback(module.register_forward_pre_hook(_refuse_call, prepend=True).remove)
        for parameter in (parameter for group in groups for parameter in group.fsdp_params):
            stack.enter_context(replaced(parameter, reset_sharded_param=lambda: None))
        yield


def _whole(parameter: nn.Parameter) -> torch.Tensor:
    return gathered(parameter).detach() if isinstance(parameter, DTensor) else parameter.detach().clone()


def _refuse_call(module: nn.Module, args: object) -> NoReturn:
    raise OSDPError(
        f"{type(module).__name__} was called within hf_osdp.full_parameters, where its units cannot gather; call the"
        " model after it."
    )


class AcrossLayouts(SkippableMode):
    """Run element-wise operators on shards of several layouts, or on shards and whole tensors that are equal on all
    ranks.

    Operands take the layout of the first one, which has the result: nothing is sent to cut a whole tensor, and shards
    are gathered, one at a time, if the layout is another one. So an average of weights that a callback keeps is the
    same as with whole parameters, whether it keeps shards or whole tensors. Work in which gradients flow is left to
    torch, which refuses it.
    """

    def __init__(self, what: str) -> None:
        """Name the work, for the error of a rank that does it alone."""
        super().__init__()
        self._what, self._is_shared = what, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:  # noqa: ANN401
        if any(issubclass(cls, DTensor) for cls in types) and _is_element_wise(func):
            operands = [t for t in tree_leaves(args) if _has_layout(t)]
            flows = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
            if len({_layout(t) for t in operands}) > 1 and not flows:
                args = self._aligned_lists(args) if isinstance(args[0], (list, tuple)) else self._aligned(args)
        return func(*args, **(kwargs or {}))

    def _aligned_lists(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Align the elements of a foreach operator's lists, each with the first list's element at its place."""
        lists = [arg for arg in args if isinstance(arg, (list, tuple))]
        rows = [self._aligned(row) for row in zip(*lists, strict=True)]
        columns = iter([list(column) for column in zip(*rows, strict=True)])
        return tuple(next(columns) if isinstance(arg, (list, tuple)) else arg for arg in args)

    def _aligned(self, args: Sequence[Any]) -> tuple[Any, ...]:
        operands = [t for t in tree_leaves(args) if _has_layout(t)]
        aligned: tuple[Any, ...] = tree_map(lambda t: self._as(t, operands[0]) if _has_layout(t) else t, tuple(args))
        return aligned

    @torch.no_grad()
    def _as(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the layout of another."""
        if _layout(tensor) == _layout(like):
            return tensor
        whole = tensor
        if isinstance(tensor, DTensor):
            if not self._is_shared and not all(placement.is_replicate() for placement in tensor.placements):
                require_all(self._what)
                self._is_shared = True
            whole = gathered(tensor).to(tensor.to_local().device)
        if not isinstance(like, DTensor):
            return whole
        is_alike = whole.shape == like.shape and not any(placement.is_partial() for placement in like.placements)
        placements = like.placements if is_alike else [Replicate()] * like.device_mesh.ndim
        return distribute_tensor(whole, like.device_mesh, placements, src_data_rank=None)


def _is_element_wise(func: Any) -> bool:  # noqa: ANN401
    return (
        torch.Tag.pointwise in func.tags
        or func is torch.ops.aten.copy_.default
        or func.name().startswith("aten::_foreach_")
    )


def _has_layout(value: object) -> bool:
    """Return whether a value is a shard or a whole tensor; torch takes numbers without dimensions for every layout."""
    return isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and value.dim() > 0)


def _layout(tensor: torch.Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


@contextmanager
def mixing_explained(*, in_loss: bool) -> Iterator[None]:
    """Add the remedy to torch's error about work on shards, in a loss or between steps."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        known = (what for what, texts in _REFUSED_BY_TORCH.items() if any(text in str(error) for text in texts))
        if (what := next(known, None)) is None:
            raise
        if in_loss:
            raise OSDPError(f"The loss {what}; {REMEDY}.") from error
        raise OSDPError(f"Code between steps {what}; {_BETWEEN_STEPS}.") from error
