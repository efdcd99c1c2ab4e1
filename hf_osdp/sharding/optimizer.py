"""Optimizers that were made before the model was sharded, and those that must not be used after."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import OSDPError
from ..modeling.split.names import split_names
from ..modeling.split.positions import keep_positions
from ..modeling.units import canonical_name
from .host_offload import host_parameters
from .mixed_step import step_by_place
from .optimizer_probe import difference_on_shards

_REASONS = {
    "adafactor": "factors a parameter's second moment over its rows and columns",
    "lamb": "scales by the norm of each whole parameter",
    "lars": "scales by the norm of each whole parameter",
    "muon": "orthogonalises each whole matrix",
    "shampoo": "preconditions with each whole matrix",
    "soap": "preconditions with each whole matrix",
    "galore": "projects each whole matrix",
    "lbfgs": "needs dot products over all parameters",
    "sparseadam": "needs sparse gradients",
    "rprop": "assigns elements by a mask",
    "lomo": "updates while backward runs, before gradients are reduced",
    "apollo": "scales by the norms of a parameter's channels",
    "8bit": "holds its states in blocks that are quantized together",
    "4bit": "holds its states in blocks that are quantized together",
}
"""Why an optimizer is wrong, or fails, on shards, by a part of its name in lower case."""


_ELEMENT_WISE = tuple(
    getattr(torch.optim, name) for name in ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD")
)
"""Optimizers of torch that train on shards as they train on the whole; a subclass may do something else."""
_MOST_APART = 1e-4
"""Of an update: rounding of float32 leaves less, a norm of a shard in the place of the whole's some percent."""
_ADVICE = "use an element-wise optimizer such as AdamW, Adam, SGD or RMSprop"


def reason_against(name: str) -> str | None:
    """Why an optimizer of this name is wrong, or fails, on shards; None where the name says nothing.

    Args:
        name: of a class, or as `TrainingArguments(optim=...)` has it.
    """
    return next((reason for part, reason in _REASONS.items() if part in name.lower()), None)


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer itself, where Accelerate has wrapped it."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    return optimizer


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update of an element depends on other elements: on shards it may train differently.

    The class and all its bases are looked at by name, so that the versions of different packages are found. What is neither known to
    be wrong nor one of torch's own is tried on a matrix and on its shards.

    Raises:
        OSDPError: the optimizer is known to be wrong under sharding, or was seen to be, or cannot be tried.
    """
    optimizer = unwrapped(optimizer)
    name = type(optimizer).__name__
    for cls in type(optimizer).__mro__:
        if reason := reason_against(cls.__name__):
            raise OSDPError(f"{name} {reason}, which shards of a parameter do not allow; {_ADVICE}.")
    if type(optimizer) in _ELEMENT_WISE or not any(group["params"] for group in optimizer.param_groups):
        return
    try:
        apart = difference_on_shards(optimizer)
    except Exception as error:  # it may be made for anything
        text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise OSDPError(f"{name} cannot be tried on shards ({type(error).__name__}: {text}); {_ADVICE}.") from error
    if not apart <= _MOST_APART:
        raise OSDPError(
            f"{name} is not element-wise: two steps on a matrix and on its shards differ by {100 * apart:.2g} % of the update; {_ADVICE}."
        )


def check_new_optimizers(model: nn.Module) -> None:
    """`check_optimizer` for every optimizer of this model before its first step: in a plain loop nobody tells us of them.

    Args:
        model: sharded, showing shards; the hook goes with it.
    """
    ids = {id(parameter) for parameter in model.parameters()}
    checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def stepping(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in checked and any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            check_optimizer(optimizer)
            checked.add(optimizer)

    weakref.finalize(model, register_optimizer_step_pre_hook(stepping).remove)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Each parameter's first name; take it before the model is sharded, for `rebind_parameters`."""
    return {parameter: canonical_name(name) for name, parameter in model.named_parameters()}


def release_parameters(optimizer: torch.optim.Optimizer, old_names: Mapping[nn.Parameter, str]) -> None:
    """Put names in the place of parameters, so that the optimizer does not keep the unsharded model alive meanwhile.

    Until `rebind_parameters` the optimizer cannot be used.

    Raises:
        OSDPError: the optimizer has state already, or holds a parameter that the model does not have; it is left as it was.
    """
    inner = unwrapped(optimizer)
    if optimizer.state and not _is_new_adagrad(inner):
        raise OSDPError(
            f"{type(inner).__name__} has state from before the model was sharded: it has taken steps, or makes state when it is made;"
            " make it from the sharded model's parameters, or give a new AdamW, Adam, SGD or RMSprop."
        )
    names = [[_name(parameter, old_names) for parameter in group["params"]] for group in optimizer.param_groups]
    inner.state.clear()
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        group["params"] = group_names


def _is_new_adagrad(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's state is what Adagrad makes when it is made; `rebind_parameters` makes it again."""
    return type(optimizer) is torch.optim.Adagrad and not any(state["step"] for state in optimizer.state.values())


def rebind_parameters(optimizer: torch.optim.Optimizer, old_names: Mapping[nn.Parameter, str], model: nn.Module) -> None:
    """Point an optimizer at the sharded parameters, found by name. Groups, their order and hyperparameters stay.

    In the place of a parameter that is in slices now come all its slices.

    Args:
        optimizer: made from the unsharded model, without state; `release_parameters` may have been called on it.
        old_names: `parameter_names(model)`, from before sharding.
        model: the model, sharded.

    Raises:
        OSDPError: the optimizer has state, or holds a parameter that the model does not have.
    """
    release_parameters(optimizer, old_names)
    new = {canonical_name(name): [parameter] for name, parameter in model.named_parameters(remove_duplicate=False)}
    new |= {name: [new[part][0] for part in whole.parts] for name, whole in split_names(model).items()}
    if missing := [name for group in optimizer.param_groups for name in group["params"] if name not in new]:
        raise OSDPError(f"The sharded model has no parameter {missing[0]!r} ({len(missing)} missing), which the optimizer updates.")
    for group in optimizer.param_groups:
        group["params"] = [parameter for name in group["params"] for parameter in new[name]]
    inner = unwrapped(optimizer)  # Accelerate's wrapper has no hooks
    if type(inner) is torch.optim.Adagrad:
        inner.state = torch.optim.Adagrad([dict(group) for group in inner.param_groups], **inner.defaults).state
    step_by_place(inner, host_parameters(model))
    if split_names(model):
        keep_positions(inner, model)


def _name(parameter: nn.Parameter | str, old_names: Mapping[nn.Parameter, str]) -> str:
    if isinstance(parameter, str):
        return parameter
    if parameter not in old_names:
        shape = tuple(parameter.shape)
        raise OSDPError(
            f"The optimizer holds a parameter of shape {shape} that the model does not have; make it from model.parameters(), and where a"
            " loss has parameters of its own, make it a module of the model."
        )
    return old_names[parameter]
