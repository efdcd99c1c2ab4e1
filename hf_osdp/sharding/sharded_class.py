"""The class of a sharded module: FSDP2's subclass under the original name; it replaces methods that would return
shards or hang.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch import library, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from ..distributed.consensus import on_rank_zero
from ..distributed.mesh import rank, world_size
from ..distributed.process_group import require_all
from ..errors import OSDPError
from .replicas import replicas_of
from .state import full_state_dict
from .unit_order import generating

_REMEDY = "call model.save_pretrained(folder) on every rank, or save what accelerator.get_state_dict(model) returns on rank 0"  # noqa: E501


def keep_class(module: nn.Module) -> None:
    """Name the class of a module of a sharded model as before, and let it save whole weights: FSDP2 renames classes,
    and transformers looks up losses, heads and files by their names.

    FSDP2 marks every module. transformers' `generate` needs that, to let all ranks generate equally many tokens. But
    encoders with LayerDrop (20 classes of transformers 5.23) run every layer where they find the mark.
    """
    if isinstance(module, FSDPModule):
        module.__class__ = _sharded_class(type(module).__mro__[2])  # type: ignore[assignment]
    else:
        save_whole(module)
    if not hasattr(module, "generate"):
        vars(module).pop("_is_fsdp_managed_module", None)


@functools.cache
def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Make FSDP2's subclass of a class, as `fully_shard` does, with the original name and replacements for methods
    that sharding breaks.
    """
    methods: dict[str, Any] = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    methods |= {"__deepcopy__": _no_copy, "__reduce_ex__": _no_copy}
    if hasattr(cls, "generate"):
        methods["generate"] = _CalledOnAllRanks(cls.generate)
    if (save := _save_of(cls)) is not None:
        methods["save_pretrained"] = _saving_whole_weights(save)
    return type(cls.__name__, (FSDPModule, cls), methods)


@functools.cache
def refuse_partial_use() -> None:
    """Refuse files and pickles of shards from now on, and make numbers that are read from them those of all ranks.

    torch would write one rank's shards, and `item`, `float` and `bool` of a sum or norm would return one rank's part.
    """
    copyreg.pickle(DTensor, _no_pickle)
    library.register_torch_dispatch("aten::_local_scalar_dense", DTensor, _number)


def _is_whole(tensor: DTensor) -> bool:
    sizes = tensor.device_mesh.shape
    return all(size == 1 or placement.is_replicate() for size, placement in zip(sizes, tensor.placements, strict=True))


def _no_pickle(tensor: DTensor) -> str | tuple[Any, ...]:
    _refuse_shards([tensor])
    return tensor.__reduce_ex__(2)


def _refuse_shards(values: Iterable[object]) -> None:
    if shapes := [tuple(value.shape) for value in values if isinstance(value, DTensor) and not _is_whole(value)]:
        raise OSDPError(
            f"A file, a pickle or a copy would get one rank's shard of a tensor of shape {shapes[0]}; {_REMEDY}."
        )


def _number(cls: object, func: Any, types: object, args: tuple[DTensor], kwargs: object) -> object:  # noqa: ANN401
    (tensor,) = args
    if _is_whole(tensor):
        return func(tensor.to_local())
    if tensor.device_mesh.size() == world_size():
        require_all("A number read from shards of weights (item, float, bool)")
    number = func(tensor.full_tensor())
    if not any(placement.is_partial("max") or placement.is_partial("min") for placement in tensor.placements):
        return number
    is_nan = tensor.to_local().isnan().float()  # gloo's maximum loses it
    summed = [Partial() if placement.is_partial() else placement for placement in tensor.placements]
    return math.nan if DTensor.from_local(is_nan, tensor.device_mesh, summed).full_tensor() else number


def _no_copy(self: nn.Module, *_: object) -> NoReturn:
    raise OSDPError(
        f"torch.save, pickle and copy would get one rank's shards of a sharded {type(self).__name__}; {_REMEDY}."
    )


class _CalledOnAllRanks:
    """A method that gathers parameters; it raises before any of FSDP2's hooks unless all ranks call it."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __set_name__(self, cls: type, name: str) -> None:
        self._name, self._label = name, f"{cls.__name__}.{name}"

    def __set__(self, module: nn.Module, method: Callable[..., Any]) -> None:
        module.__dict__[self._name] = method  # set by `register_fsdp_forward_method`, which the Trainer calls

    def __get__(self, module: nn.Module | None, cls: type) -> Callable[..., Any]:
        if module is None:
            return self._method
        method = module.__dict__.get(self._name) or self._method.__get__(module, cls)

        @functools.wraps(method)
        def called(*args: Any, **kwargs: Any) -> object:
            require_all(self._label)
            with generating():
                return method(*args, **kwargs)

        return called


def save_whole(part: nn.Module) -> None:
    """Make a part of a sharded model, or the model inside of adapters, save whole weights too."""
    if (save := _save_of(type(part))) is not None:
        part.save_pretrained = _saving_whole_weights(save).__get__(part)


def _save_of(cls: type[nn.Module]) -> Callable[..., Any] | None:
    """Return a class's `save_pretrained`, if it can be given whole weights."""
    save = getattr(cls, "save_pretrained", None)
    return save if save is not None and {"state_dict", "kwargs"} & set(inspect.signature(save).parameters) else None


def _saving_whole_weights(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that rank 0 writes whole weights; without a state dict they are gathered, and every rank
    must call it.
    """
    signature = inspect.signature(save)

    @functools.wraps(save)
    def saved(self: nn.Module, *args: Any, **kwargs: Any) -> object:
        call = signature.bind(self, *args, **kwargs)
        owner = call.arguments if "state_dict" in signature.parameters else call.arguments.setdefault("kwargs", {})
        if (state := owner.get("state_dict")) is not None:
            _refuse_shards(state.values())
            return save(*call.args, **call.kwargs) if rank() == 0 else None
        if not any(
            isinstance(parameter, DTensor) for parameter in self.parameters()
        ):  # whole already, perhaps on one rank alone
            replicas = replicas_of(self)
            is_others = replicas is not None and replicas.is_all and rank() > 0  # rank 0 writes the same
            return None if is_others else save(*call.args, **call.kwargs)
        require_all(f"{type(self).__name__}.save_pretrained")
        owner["state_dict"] = full_state_dict(self)
        return on_rank_zero(lambda: save(*call.args, **call.kwargs))

    return saved
