"""The class of a sharded module: FSDP2's subclass under its author's name, and what a user calls on a whole model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..errors import OSDPError
from .agree import on_rank_zero
from .state import full_state_dict
from .together import require_all

_OWN = "__module__", "__qualname__", "__doc__"


def keep_class(module: nn.Module) -> None:
    """Name a sharded module's class as before: FSDP2 renames it, and transformers looks up losses, heads and files by class name.

    Args:
        module: after `fully_shard`.
    """
    module.__class__ = _sharded_class(type(module).__mro__[2])


@functools.cache
def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """FSDP2's subclass of a class, as `fully_shard` makes it, with the name and the methods that sharding would break."""
    methods: dict[str, Any] = {name: getattr(cls, name) for name in _OWN}
    methods |= {"__deepcopy__": _no_copy, "__reduce_ex__": _no_copy, "_is_fsdp_managed_module": True}  # the last: for `generate`
    if hasattr(cls, "generate"):
        methods["generate"] = _on_all_ranks(cls.generate)
    save = getattr(cls, "save_pretrained", None)
    if save is not None and {"state_dict", "kwargs"} & set(inspect.signature(save).parameters):
        methods["save_pretrained"] = _of_whole_weights(save)
    return type(cls.__name__, (FSDPModule, cls), methods)


def _no_copy(self: nn.Module, *_: Any) -> NoReturn:
    raise OSDPError(
        f"A sharded {type(self).__name__} cannot be copied or pickled, as torch.save(model) does: it holds one rank's shards. Call"
        " model.save_pretrained(folder) on every rank, or save what accelerator.get_state_dict(model) gives on rank 0."
    )


def _on_all_ranks(method: Callable[..., Any]) -> Callable[..., Any]:
    """Raise where one rank calls a method that gathers parameters and others do not."""

    @functools.wraps(method)
    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        require_all(f"{type(self).__name__}.{method.__name__}")
        return method(self, *args, **kwargs)

    return called


def _of_whole_weights(save: Callable[..., Any]) -> Callable[..., Any]:
    """Write whole weights, once: gathered where none are given, which every rank must call."""
    signature = inspect.signature(save)

    @functools.wraps(save)
    def saved(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        given = {**call.arguments, **call.arguments.get("kwargs", {})}.get("state_dict")
        if given is not None:
            return save(*call.args, **call.kwargs) if not dist.is_initialized() or dist.get_rank() == 0 else None
        require_all(f"{type(self).__name__}.save_pretrained")
        owner = call.arguments if "state_dict" in signature.parameters else call.arguments.setdefault("kwargs", {})
        owner["state_dict"] = full_state_dict(self)
        return on_rank_zero(lambda: save(*call.args, **call.kwargs))

    return saved
