"""Subclasses of `transformers.Trainer` that are not ours, such as TRL's, under a plan."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn

from ..modeling.batch import without_adapters
from ..modeling.batch_norm import has_running_statistics
from ..modeling.units import canonical_name

_Stock = transformers.Trainer
"""`hf_osdp.run` puts ours under its name."""
_OF_SINGLE_SAMPLES = ("SFTTrainer", "RewardTrainer")
"""Trainers with a loss of their own that is a sum over tokens or samples, whichever share a batch."""


def check_order(cls: type, ours: type) -> None:
    """Refuse a class that lists our Trainer before another one, whose methods would then be hidden.

    Raises:
        TypeError: names the other class and the right order.
    """
    order = cls.__mro__
    between = order[order.index(ours) + 1 : order.index(_Stock)]
    hidden = next((other for other in between if issubclass(other, _Stock)), None)
    if hidden is not None:
        raise TypeError(
            f"{cls.__name__} lists hf_osdp's Trainer before {hidden.__name__}, whose methods it would hide;"
            f" write class {cls.__name__}({hidden.__name__}, Trainer), or use with_osdp({hidden.__name__})."
        )


def planning_at_the_end(init: Callable[..., None]) -> Callable[..., None]:
    """Make an `__init__` plan when the outermost one has ended, and take `osdp=` where it does not know it."""
    takes_osdp = "osdp" in inspect.signature(init).parameters

    @functools.wraps(init)
    def planning(self: Any, *args: Any, **kwargs: Any) -> None:
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


def vars_of_others(cls: type, ours: type) -> set[str]:
    """Names that classes in front of ours define themselves, in the place of ours."""
    return {name for other in cls.__mro__[: cls.__mro__.index(ours)] for name in vars(other)}


def batch_coupling(trainer: Any) -> str | None:
    """Return why a loss may depend on which samples share a micro-batch; None where it does not.

    The planner then leaves the size of micro-batches as it is: splitting one would train something else.
    """
    cls, model = type(trainer), without_adapters(trainer.model)
    owner = next(base.__name__ for base in cls.__mro__ if "compute_loss" in vars(base))  # a subclass may have a loss of its own again
    if "return_loss" in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} compares the samples of a batch with each other"
    if has_running_statistics(model):
        return f"{type(model).__name__} has batch normalisation, which takes the statistics of a micro-batch"
    if getattr(getattr(model, "config", None), "output_router_logits", False) or getattr(trainer, "aux_loss_enabled", False):
        return f"{type(model).__name__} balances its experts over the tokens of a micro-batch"
    if owner in _OF_SINGLE_SAMPLES:
        return None
    if cls.compute_loss is not _Stock.compute_loss:
        return f"{cls.__name__} computes its own loss, which may depend on the samples that share a batch"
    if cls.get_train_dataloader is not _Stock.get_train_dataloader:
        return f"{cls.__name__} makes its own batches"
    return None


def tokens_to_generate(trainer: Any, sample: Any) -> int | None:
    """Return the tokens of a prompt and of what is generated for it, as TRL's online trainers name them; None elsewhere."""
    completion = getattr(trainer.args, "max_completion_length", None)
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    if completion is None or tokenizer is None or not isinstance(sample, Mapping) or "prompt" not in sample:
        return None
    return completion + len(tokenizer(str(sample["prompt"]))["input_ids"])


def with_whole_weights(save: Callable[..., None]) -> Callable[..., None]:
    """Show a `_save` whole weights in the model: it may write the model's own, and not the state that it is given."""

    @functools.wraps(save)
    def saving(self: Any, output_dir: str | None = None, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:
        if self._osdp is None or not state_dict:
            save(self, output_dir, state_dict)
            return
        with whole_weights(self.model, state_dict):
            save(self, output_dir, state_dict)

    return saving


@contextmanager
def whole_weights(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Show a sharded model's parameters as the whole tensors of `state`, on this process alone.

    Args:
        model: sharded, between steps.
        state: whole tensors by the model's names.
    """
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
