"""Optimizer steps where parameters lie on two devices, or plain ones beside shards."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .clip import local
from .host_offload import host_parameters

_FUSED_ON_HOST = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers of torch whose fused step takes shards on the CPU; its fused SGD and Adagrad know no sharded tensors."""
_KERNELS = {"foreach", "fused"}
_steppers: weakref.WeakKeyDictionary[torch.optim.Optimizer, _ByPlace] = weakref.WeakKeyDictionary()


def step_by_place(optimizer: torch.optim.Optimizer, host: Iterable[nn.Parameter] = ()) -> None:
    """Have an optimizer step the parameters of each device, and plain ones and shards, by themselves.

    Torch's foreach and fused kernels fail where plain tensors and DTensors share a group, and by default an optimizer gives up its
    foreach kernels for a whole group where one parameter lies on the CPU. While the optimizer steps, each of its groups stands as
    one group for each place. Before and after it is as it was made, so that schedulers, checkpoints and the user
    see the same groups under every plan. On the host Adam and AdamW step with fused kernels, whatever they do on the device.

    Args:
        optimizer: holds the sharded model's parameters. A second call replaces the first.
        host: parameters that live on the host (`host_parameters`).
    """
    if optimizer in _steppers:
        _steppers[optimizer].remove()
    _steppers[optimizer] = _ByPlace(optimizer, host)


def step_new_optimizers_by_place(model: nn.Module) -> None:
    """`step_by_place` for every optimizer of this model when it first steps: in a plain loop nobody tells us of them.

    Args:
        model: sharded, with units on the host or parameters without dimensions, showing shards; the hook goes with it.
    """
    host = host_parameters(model)
    ids = {id(parameter) for parameter in model.parameters()}

    def stepping(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in _steppers and any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            step_by_place(optimizer, host)

    weakref.finalize(model, register_optimizer_step_pre_hook(stepping).remove)


class _ByPlace:
    """The hooks around one optimizer's step."""

    def __init__(self, optimizer: torch.optim.Optimizer, host: Iterable[nn.Parameter]) -> None:
        self._host = {id(parameter) for parameter in host}
        self._whole: list[dict[str, Any]] | None = None
        self._parts: list[list[dict[str, Any]]] = []
        self._handles = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]

    def remove(self) -> None:
        """Leave the optimizer alone."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._after(optimizer, args, kwargs)  # a step that raised left its parts behind
        self._whole = optimizer.param_groups
        self._parts = [self._split(optimizer, group) for group in self._whole]
        optimizer.param_groups = [part for parts in self._parts for part in parts]

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._whole is None:
            return
        for group, parts in zip(self._whole, self._parts, strict=True):
            if parts[0] is not group:  # some optimizers count in their groups
                group.update({key: value for key, value in parts[0].items() if key not in {"params", *_KERNELS}})
        optimizer.param_groups, self._whole, self._parts = self._whole, None, []

    def _split(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[dict[str, Any]]:
        """The group itself where all of it lies in one place on the device, else one for each place."""
        places: dict[tuple[torch.device, bool, bool], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            on_host = id(parameter) in self._host
            places.setdefault((local(parameter).device, isinstance(parameter, DTensor), on_host), []).append(parameter)
        fuses = type(optimizer) in _FUSED_ON_HOST and not group["differentiable"]
        if len(places) < 2 and not (fuses and any(on_host for _, _, on_host in places)):
            return [group]
        parts = []
        for (_, _, on_host), parameters in places.items():
            kernels = {}
            if on_host and fuses:
                kernels = {"foreach": False, "fused": True}
                _steps_to_host(optimizer, parameters)
            parts.append({**group, **kernels, "params": parameters})
        return parts


def _steps_to_host(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Counts of steps come from where a checkpoint had them; fused kernels want them beside the parameters."""
    for parameter in parameters:
        step = optimizer.state[parameter].get("step") if parameter in optimizer.state else None
        if isinstance(step, torch.Tensor) and step.device.type != "cpu":
            optimizer.state[parameter]["step"] = step.cpu()
