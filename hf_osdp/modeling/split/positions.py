"""State dicts of an optimizer whose model is split but not sharded, with positions and shapes of the whole model's parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .names import canonical_name, merge_optimizer_state, split_names, split_optimizer_state


def keep_positions(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Let `state_dict` and `load_state_dict` of the optimizer be those of one of the whole model.

    torch knows an optimizer's parameters by position, and slices would show there. Where parameters are sharded nothing
    changes: torch's functions for those use names.

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
def own_positions(optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Within, state dicts have the slices' positions, which torch's functions that use names expect.

    Args:
        optimizers: one or several, as those functions take them; wrapped ones, too.
    """
    several = tuple(optimizers) if isinstance(optimizers, Iterable) else (optimizers,)
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

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.active = True

    def merged(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Turn positions of slices into those of whole parameters; for `register_state_dict_post_hook`."""
        model, own = self._names(optimizer)
        return None if model is None else at_positions(merge_optimizer_state(_by_name(state, own), model))

    def split(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Turn positions of whole parameters into those of slices; for `register_load_state_dict_pre_hook`."""
        model, own = self._names(optimizer)
        if model is None:
            return None
        sliced = {whole.parts[0]: whole for whole in reversed(split_names(model).values())}
        inside = {part for whole in sliced.values() for part in whole.parts[1:]}
        names = [sliced[name].name if name in sliced else name for name in own if name not in inside]
        if sum(len(group["params"]) for group in state["param_groups"]) != len(names):
            return None  # torch says what does not fit
        return at_positions(split_optimizer_state(_by_name(state, names), model))

    def _names(self, optimizer: torch.optim.Optimizer) -> tuple[nn.Module | None, list[str]]:
        """Return the model, None where nothing is to be done, and the parameters' names by position."""
        model = self._model() if self.active else None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if model is None or any(hasattr(parameter, "placements") for parameter in parameters):
            return None, []
        names = {parameter: canonical_name(name) for name, parameter in model.named_parameters()}
        if not all(parameter in names for parameter in parameters):
            return None, []
        return model, [names[parameter] for parameter in parameters]


def _by_name(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    groups = [{**group, "params": [names[position] for position in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[position]: own for position, own in state["state"].items()}, "param_groups": groups}


def at_positions(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by positions in the order of its groups, from one by names."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    positions = {name: position for position, name in enumerate(names)}
    groups = [{**group, "params": [positions[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {positions[name]: own for name, own in state["state"].items()}, "param_groups": groups}
