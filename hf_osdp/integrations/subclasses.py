"""Support other subclasses of `transformers.Trainer`, such as TRL's: plan when they are made, save full
weights, trace their loss.
"""

from __future__ import annotations

import copy
import functools
import inspect
from abc import ABCMeta
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import Trainer as StockTrainer

from ..distributed.fsdp_internals import parameter_groups, stays_gathered
from ..modeling.batch import Loss
from ..modeling.units import canonical_name
from ..sharding.replicas import is_under_plan
from ..sharding.unit_order import called_alone
from ..tracing.fake_model import rebound
from ..tracing.tensors import DEVICE, fake_like

_CONTAINERS = (dict, list, set, deque)
_DATA = ("train_dataset", "eval_dataset")


def check_order(cls: type, ours: type) -> None:
    """Raise TypeError if a class lists our Trainer before another one, whose methods it would then hide."""
    order = cls.__mro__
    between = order[order.index(ours) + 1 : order.index(StockTrainer)]
    hidden = next((other for other in between if issubclass(other, StockTrainer) and other not in ours.__mro__), None)
    if hidden is not None:
        raise TypeError(
            f"{cls.__name__} lists hf_osdp's Trainer before {hidden.__name__}, whose methods it would hide;"
            f" write class {cls.__name__}({hidden.__name__}, Trainer), or use with_osdp({hidden.__name__})."
        )


class PlansWhenMade(ABCMeta):
    """Make a Trainer of any subclass, with `osdp=` if its `__init__` does not take it; then plan, if there is data."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  our Trainer
        trainer: Any = cls.__new__(cls, *args, **kwargs)  # type: ignore[arg-type]
        if "osdp" in kwargs and "osdp" not in inspect.signature(cls.__init__).parameters:  # type: ignore[misc]
            trainer._osdp_argument = kwargs.pop("osdp")
        trainer.__init__(*args, **kwargs)
        trainer._plan_if_data()  # subclasses change model, data and loss in their `__init__`
        return trainer


def with_full_weights(save: Callable[..., None]) -> Callable[..., None]:
    """Return a `_save` that sees full weights in the model, since it may write these instead of the state dict that
    it receives.
    """

    @functools.wraps(save)
    def saving(self: Any, output_dir: str | None = None, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:  # noqa: ANN401
        if self._osdp is None or not state_dict:
            save(self, output_dir, state_dict)
            return
        with full_weights(self.model, state_dict):
            save(self, output_dir, state_dict)

    return saving


@contextmanager
def full_weights(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Replace a sharded model's parameters in this context by the full tensors of `state`, on this process only and
    between steps.
    """
    hidden: list[tuple[nn.Module, str, nn.Parameter]] = []
    for name, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            whole = state.get(canonical_name(f"{name}.{leaf}".lstrip(".")))
            if parameter is not None and whole is not None:
                hidden.append((module, leaf, parameter))
                module._parameters[leaf] = nn.Parameter(whole, requires_grad=False)
    try:
        with called_alone(model):  # a model card of sentence-transformers has an example's output
            yield
    finally:
        for module, leaf, parameter in hidden:
            module._parameters[leaf] = parameter


# ---------------------------------------------------------------------------------------------------------- the loss


def traced_loss(trainer: StockTrainer) -> Loss:
    """Return the trainer's `compute_loss` as a function of a fake model and a batch, for as many items as the batch
    has labels.
    """

    def loss(fake_model: nn.Module, batch: Mapping[str, Any]) -> object:
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        items = max(1, labels.numel()) if isinstance(labels, torch.Tensor) else 1
        return loss_of_items(trainer, fake_model, batch, items if counts_items(trainer) else None)

    return loss


def counts_items(trainer: StockTrainer) -> bool:
    """Return whether the trainer counts the items of a step and gives their number to the loss."""
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


def loss_of_items(trainer: StockTrainer, fake_model: nn.Module, batch: Any, items: Any) -> object:  # noqa: ANN401
    """Return what the trainer's `compute_loss` returns for a fake model, a batch and the number of items of the step,
    or None.

    Each call runs on a copy of the trainer: its metrics stay in the copy, it sends nothing to other ranks, and its
    modules are fake. A sharded module, such as a reference model, returns the output of the trained model.
    """
    last: list[Any] = []
    copied = _copy_with_fake_model(trainer, fake_model, last)
    handle = fake_model.register_forward_hook(lambda module, args, output: last.__setitem__(slice(None), [output]))
    try:
        return copied.compute_loss(fake_model, batch, num_items_in_batch=items)
    finally:
        handle.remove()
        last.clear()  # the loss itself keeps what backward needs


def bytes_of_other_models(trainer: StockTrainer) -> dict[str, int]:
    """Return the bytes of other models on this device, by the trainer's attribute; sharded models count with their
    shards.
    """
    assert isinstance(trainer.model, nn.Module)
    seen = {id(tensor) for tensor in _tensors(trainer.model)}
    found = {
        name: sum(_bytes_on_device(module, seen) for module in _modules_in(value))
        for name, value in vars(trainer).items()
    }
    return {name: nbytes for name, nbytes in found.items() if nbytes}


class _LocalAccelerator:
    """An accelerator without collectives, on the device of the copied model."""

    def __init__(self, accelerator: object, device: torch.device | str) -> None:
        self._accelerator, self.device = accelerator, device

    def __getattr__(self, name: str) -> object:
        return getattr(self._accelerator, name)

    def gather(self, tensor: object, *args: object, **kwargs: object) -> object:
        return tensor

    gather_for_metrics = reduce = pad_across_processes = gather


def _copy_with_fake_model(trainer: StockTrainer, fake_model: nn.Module, last: list[Any]) -> StockTrainer:
    """Copy a trainer with a fake model; its sharded models return that model's `last` output, without gradients."""
    assert isinstance(trainer.model, nn.Module)
    copied = copy.copy(trainer)

    def last_output(*args: object, **kwargs: object) -> object:
        return tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, requires_grad=False), last[-1])

    for name, value in vars(trainer).items():
        if value is trainer.model or name in ("model", "model_wrapped"):
            setattr(copied, name, fake_model)
        elif isinstance(value, nn.Module):
            sharded = any(map(is_under_plan, value.modules()))
            setattr(copied, name, last_output if sharded else _fake_copy(value, trainer.model, fake_model))
        elif name not in _DATA and not any(_modules_in(value)):
            setattr(copied, name, rebound(value, {id(trainer): copied, id(trainer.model): fake_model}))
    device = DEVICE if _fake_mode(fake_model) else next(fake_model.parameters()).device
    copied.accelerator = _LocalAccelerator(trainer.accelerator, device)
    return copied


def _fake_copy(module: nn.Module, model: nn.Module, fake_model: nn.Module) -> nn.Module:
    """Copy a module with fake parameters, or its own if the model is real; if it holds the trained model, as loss
    modules may, the copy holds `fake_model`.
    """
    mode, device = _fake_mode(fake_model), next(fake_model.parameters()).device
    memo: dict[int, Any] = {id(model): fake_model}
    for tensor in _tensors(module):
        fake = tensor.detach().to(device) if mode is None else fake_like(tensor, mode)
        memo[id(tensor)] = (
            nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
        )
    return copy.deepcopy(module, memo)


def _fake_mode(model: nn.Module) -> FakeTensorMode | None:
    """Return the mode of a fake model; None for a real one."""
    mode: FakeTensorMode | None = torch._guards.detect_fake_mode([next(model.parameters())])
    return mode


def _modules_in(value: object) -> Iterator[nn.Module]:
    leaves = (
        [value]
        if isinstance(value, nn.Module)
        else tree_leaves(value)
        if isinstance(value, (*_CONTAINERS, tuple))
        else []
    )
    return (leaf for leaf in leaves if isinstance(leaf, nn.Module))


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _bytes_on_device(module: nn.Module, seen: set[int]) -> int:
    """Return the bytes of tensors not seen yet, and of the gathered parameters of an FSDP2 root that stays gathered
    after forward.
    """
    new = [tensor for tensor in _tensors(module) if id(tensor) not in seen]
    seen.update(id(tensor) for tensor in new)
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in new]
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in local)
    if new and stays_gathered(module):
        for parameter in (parameter for group in parameter_groups(module) for parameter in group.fsdp_params):
            dtype = getattr(parameter, "param_dtype", None) or parameter.sharded_param.dtype
            nbytes += parameter.sharded_param.shape.numel() * dtype.itemsize
    return nbytes
