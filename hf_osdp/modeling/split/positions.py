"""State dicts of an optimizer whose model is split but not sharded: positions and shapes of the whole model's parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .names import merge_optimizer_state, plain_name, split_names, split_optimizer_state


def keep_positions(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Let `state_dict` and `load_state_dict` of the optimizer be those of one of the whole model.

    torch knows an optimizer's parameters by position, and slices would show there. Where parameters are sharded nothing
    changes: torch's functions for those go by name.

    Args:
        optimizer: of torch, or in Accelerate's wrapper; in each group all slices of a parameter follow one another.
        model: split; the optimizer's parameters are its own. It may go before the optimizer does.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if not _positions(optimizer):
        hooks = _Positions(model)
        optimizer.register_state_dict_post_hook(hooks.merged)
        optimizer.register_load_state_dict_pre_hook(hooks.split)


@contextmanager
def own_positions(optimizers: Any) -> Iterator[None]:
    """Within, state dicts are by the slices' positions: torch's functions that go by name expect that.

    Args:
        optimizers: one or several, as those functions take them; wrapped ones, too.
    """
    several = (optimizers,) if hasattr(optimizers, "param_groups") else tuple(optimizers)
    found = [hooks for optimizer in several for hooks in _positions(getattr(optimizer, "optimizer", optimizer))]
    for hooks in found:
        hooks.active = False
    try:
        yield
    finally:
        for hooks in found:
            hooks.active = True


def _positions(optimizer: torch.optim.Optimizer) -> list[_Positions]:
    hooks = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_state_dict_post_hooks.values())
    return [owner for owner in hooks if isinstance(owner, _Positions)]


class _Positions:
    """The two hooks of one optimizer."""

    def __init__(self, model: nn.Module):
        self._model = weakref.ref(model)
        self.active = True

    def merged(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Positions of slices → those of whole parameters."""
        own = self._names(optimizer)
        if own is None:
            return None
        return at_positions(merge_optimizer_state(_by_name(state, own), self._model()))

    def split(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """The reverse."""
        own = self._names(optimizer)
        if own is None:
            return None
        sliced = {whole.parts[0]: whole for whole in reversed(split_names(self._model()).values())}
        inside = {part for whole in sliced.values() for part in whole.parts[1:]}
        names = [sliced[name].name if name in sliced else name for name in own if name not in inside]
        if sum(len(group["params"]) for group in state["param_groups"]) != len(names):
            return None  # torch says what does not fit
        return at_positions(split_optimizer_state(_by_name(state, names), self._model()))

    def _names(self, optimizer: torch.optim.Optimizer) -> list[str] | None:
        """The parameters' names by position; None where nothing is to be done."""
        model = self._model() if self.active else None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if model is None or any(hasattr(parameter, "placements") for parameter in parameters):
            return None
        names = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
        return [names[parameter] for parameter in parameters] if all(parameter in names for parameter in parameters) else None


def _by_name(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    groups = [{**group, "params": [names[position] for position in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[position]: own for position, own in state["state"].items()}, "param_groups": groups}


def at_positions(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state by names, by positions in the order of its groups."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    positions = {name: position for position, name in enumerate(names)}
    groups = [{**group, "params": [positions[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {positions[name]: own for name, own in state["state"].items()}, "param_groups": groups}
