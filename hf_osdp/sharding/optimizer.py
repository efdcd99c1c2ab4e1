"""Optimizers of a sharded model: those made before it was sharded, and steps over parameters on two devices."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..distributed.mesh import world_size
from ..errors import OSDPError
from ..modeling.split.names import keep_positions, split_names
from ..modeling.units import canonical_name
from .gradients import local
from .host_offload import host_parameters
from .optimizer_check import check_optimizer, unwrapped

_FUSED_ON_HOST = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers of torch whose fused step takes shards on the CPU; its fused SGD and Adagrad know no sharded tensors."""
_KERNELS = {"foreach", "fused"}


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return each parameter's first name; take it before the model is sharded, for `rebind_parameters`."""
    return {parameter: canonical_name(name) for name, parameter in model.named_parameters()}


def release_parameters(optimizer: torch.optim.Optimizer, old_names: Mapping[nn.Parameter, str]) -> None:
    """Put names in the place of parameters, so that the optimizer does not keep the unsharded model alive meanwhile.

    Until `rebind_parameters` the optimizer cannot be used.

    Raises:
        OSDPError: the optimizer has state already, or holds a parameter that the model does not have; it is left as it was.
    """
    inner = unwrapped(optimizer)
    # Adagrad makes its state when it is made; `rebind_parameters` makes it again.
    new_adagrad = type(inner) is torch.optim.Adagrad and not any(state["step"] for state in inner.state.values())
    if optimizer.state and not new_adagrad:
        raise OSDPError(
            f"{type(inner).__name__} has state from before the model was sharded: it has taken steps, or makes state when it is made;"
            " make it from the sharded model's parameters, or give a new AdamW, Adam, SGD or RMSprop."
        )
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if strange := [p for p in held if not isinstance(p, str) and p not in old_names]:
        raise OSDPError(
            f"The optimizer holds a parameter of shape {tuple(strange[0].shape)} that the model does not have; make it from"
            " model.parameters(), and where a loss has parameters of its own, make it a module of the model."
        )
    inner.state.clear()
    for group in optimizer.param_groups:
        group["params"] = [p if isinstance(p, str) else old_names[p] for p in group["params"]]


def rebind_parameters(optimizer: torch.optim.Optimizer, old_names: Mapping[nn.Parameter, str], model: nn.Module) -> None:
    """Point an optimizer, without state, at the sharded parameters, found by `old_names`. Groups and hyperparameters stay.

    A parameter that is split is replaced by all its slices.

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
    step_by_device(inner, host_parameters(model))
    if split_names(model):
        keep_positions(inner, model)


def step_by_device(optimizer: torch.optim.Optimizer, host: Iterable[nn.Parameter] = ()) -> None:
    """Have an optimizer step the parameters of each device, and plain ones and shards, by themselves.

    torch's foreach and fused kernels fail where plain tensors and DTensors share a group, and by default an optimizer gives up its
    foreach kernels for a whole group where one parameter lies on the CPU. While the optimizer steps, each of its groups is replaced
    by one group for each kind. Before and after it is as it was made, so that schedulers, checkpoints and the user see the same
    groups under every plan. On the `host` Adam and AdamW step with fused kernels. A second call replaces the first.
    """
    if (before := _stepper(optimizer)) is not None:
        before.remove()
    _StepByDevice(optimizer, host)


def prepare_new_optimizers(model: nn.Module) -> None:
    """Prepare every optimizer of this model when it first steps: in a plain loop no call tells of them.

    Among several ranks it is checked (`check_optimizer`); where parameters lie on two devices or have no dimensions, it steps by device.
    """
    host = host_parameters(model)
    mixed = bool(host) or any(not parameter.dim() for parameter in model.parameters())
    ids = {id(parameter) for parameter in model.parameters()}
    prepared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def prepare(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if optimizer in prepared or not any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            return
        if world_size() > 1:
            check_optimizer(optimizer)
        if mixed and _stepper(optimizer) is None:
            step_by_device(optimizer, host)
        prepared.add(optimizer)

    weakref.finalize(model, register_optimizer_step_pre_hook(prepare).remove)


class _StepByDevice:
    """Hooks around one optimizer's step."""

    def __init__(self, optimizer: torch.optim.Optimizer, host: Iterable[nn.Parameter]) -> None:
        self._host = {id(parameter) for parameter in host}
        self._whole: list[dict[str, Any]] | None = None
        self._parts: list[list[dict[str, Any]]] = []
        self._handles = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._after(optimizer, args, kwargs)  # a step that raised left its parts behind
        self._whole = optimizer.param_groups
        self._parts = [self._split(optimizer, group) for group in self._whole]
        optimizer.param_groups = [part for parts in self._parts for part in parts]

    def _after(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self._whole is None:
            return
        for group, parts in zip(self._whole, self._parts, strict=True):
            if parts[0] is not group:  # some optimizers count in their groups
                group.update({key: value for key, value in parts[0].items() if key not in {"params", *_KERNELS}})
        optimizer.param_groups, self._whole, self._parts = self._whole, None, []

    def _split(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the group itself where all of it is of one kind on the device, else one group for each kind."""
        kinds: dict[tuple[torch.device, bool, bool], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            on_host = id(parameter) in self._host
            kinds.setdefault((local(parameter).device, isinstance(parameter, DTensor), on_host), []).append(parameter)
        fuses = type(optimizer) in _FUSED_ON_HOST and not group["differentiable"]
        if len(kinds) < 2 and not (fuses and any(on_host for _, _, on_host in kinds)):
            return [group]
        parts = []
        for (_, _, on_host), parameters in kinds.items():
            kernels = {}
            if on_host and fuses:
                kernels = {"foreach": False, "fused": True}
                _move_step_counts(optimizer, parameters)
            parts.append({**group, **kernels, "params": parameters})
        return parts


def _stepper(optimizer: torch.optim.Optimizer) -> _StepByDevice | None:
    owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, _StepByDevice)), None)


def _move_step_counts(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Move counts of steps to the host, where fused kernels want them: a checkpoint may have had them on the device."""
    for state in (optimizer.state[parameter] for parameter in parameters if parameter in optimizer.state):
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].cpu()
