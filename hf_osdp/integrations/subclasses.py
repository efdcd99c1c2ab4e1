"""Subclasses of `transformers.Trainer` that are not ours, such as TRL's, under a plan."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Trainer as StockTrainer

from ..modeling.units import canonical_name


def check_order(cls: type, ours: type) -> None:
    """Refuse a class that lists our Trainer before another one, whose methods would then be hidden."""
    order = cls.__mro__
    between = order[order.index(ours) + 1 : order.index(StockTrainer)]
    hidden = next((other for other in between if issubclass(other, StockTrainer)), None)
    if hidden is not None:
        raise TypeError(
            f"{cls.__name__} lists hf_osdp's Trainer before {hidden.__name__}, whose methods it would hide;"
            f" write class {cls.__name__}({hidden.__name__}, Trainer), or use with_osdp({hidden.__name__})."
        )


def planning_at_the_end(init: Callable[..., None]) -> Callable[..., None]:
    """Return an `__init__` that plans when the outermost one has ended, and takes `osdp=` if it does not know it."""
    takes_osdp = "osdp" in inspect.signature(init).parameters

    @functools.wraps(init)
    def planning(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  our Trainer
        if "osdp" in kwargs and not takes_osdp:
            self._asked_osdp = kwargs.pop("osdp")
        outermost = not self.__dict__.get("_in_init", False)
        self._in_init = True
        try:
            init(self, *args, **kwargs)
        finally:
            if outermost:
                del self._in_init
        if outermost:
            self._plan_now()

    return planning


def with_whole_weights(save: Callable[..., None]) -> Callable[..., None]:
    """Return a `_save` that sees whole weights in the model: it may write the model's own, and not the state that it is given."""

    @functools.wraps(save)
    def saving(self: Any, output_dir: str | None = None, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:  # noqa: ANN401
        if self._osdp is None or not state_dict:
            save(self, output_dir, state_dict)
            return
        with whole_weights(self.model, state_dict):
            save(self, output_dir, state_dict)

    return saving


@contextmanager
def whole_weights(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Show a sharded model's parameters as the whole tensors of `state`, by the model's names, between steps and on this process alone."""
    hidden: list[tuple[nn.Module, str, nn.Parameter]] = []
    for name, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            whole = state.get(canonical_name(f"{name}.{leaf}".lstrip(".")))
            if parameter is not None and whole is not None:
                hidden.append((module, leaf, parameter))
                module._parameters[leaf] = nn.Parameter(whole, requires_grad=False)
    try:
        yield
    finally:
        for module, leaf, parameter in hidden:
            module._parameters[leaf] = parameter
