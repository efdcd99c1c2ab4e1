"""The loss of a Trainer: how it runs on a fake model, and which micro-batches train as the arguments do, which is
decided by what it divides by.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import Trainer

from ..distributed.consensus import on_rank_zero
from ..distributed.fsdp_internals import parameter_groups, stays_gathered
from ..errors import InfeasibleError
from ..modeling.batch import Inputs, training_batch, without_adapters
from ..modeling.wrapping import has_running_statistics
from ..planner.plan import Plan
from ..preparation.config import OSDPConfig
from ..sharding.replicas import is_under_plan
from ..tracing.fake_model import rebound
from ..tracing.loss_kind import LossKind, find_loss_kind
from ..tracing.tensors import fake_like
from .samples import Batches
from .trainer_arguments import accelerator_config_of, samples_of_step, warn

_DATA = ("train_dataset", "eval_dataset")
_TOKENS = 16
"""Tokens of the rows on which the loss is examined."""
_STEP = ("training_step", "get_batch_samples", "_get_num_items_in_batch", "_run_epoch", "_inner_training_loop")
"""The Trainer's methods between an epoch and the loss of a micro-batch."""
_PROVEN = ("transformers", "hf_osdp", "trl", "sentence_transformers")
"""Packages whose steps train the same whatever the micro-batches, as rows of tests/compatibility show."""
_PROBLEMS = {
    LossKind.WHOLE: "The loss of {} is not divided by num_items_in_batch",
    LossKind.MIXED: "The loss of {} is not a sum over samples that is divided by num_items_in_batch",
    LossKind.UNKNOWN: "It is not known whether the loss of {} is divided by num_items_in_batch",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRule:
    """The micro-batches of a Trainer's run."""

    size: int
    """Samples of a micro-batch by the arguments."""
    chosen: int | None
    """Samples of a micro-batch to plan for; None lets the planner choose."""
    kept: str | None = None
    """Why the micro-batch stays at the arguments' size, with the remedy; None if it need not stay."""
    averages: bool = False
    """Each micro-batch's loss counts with its share of the arguments' micro-batch, since the loss does not do so
    itself.
    """

    def factor(self, plan: Plan) -> float:
        """Return the factor of each micro-batch's loss where the stock Trainer sums losses over micro-steps.

        The stock Trainer adds a·b samples' means over micro-batches of b as Σ_a mean_b. With micro-batches of b′ the
        sum has a·b/b′ terms, so each gets b′/b.
        """
        return plan.micro_batch_size / self.size if self.averages else 1.0

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Add to an InfeasibleError why the planner could not choose smaller micro-batches."""
        try:
            yield
        except InfeasibleError as error:
            if self.kept is not None:
                error.args = (f"{error} {self.kept}",)
            raise


def micro_batch_rule(
    trainer: Trainer, config: OSDPConfig, inputs: Inputs | None, sequence_length: int, *, trains: bool
) -> MicroBatchRule:
    """Return the rule for a Trainer whose `__init__` has returned; `inputs` are its batches, None if these are not
    known. Collective.

    Raises:
        ValueError: a micro-batch size was requested with which this loss cannot train as with the arguments' own.
    """
    args, requested = trainer.args, config.micro_batch_size
    size: int = samples_of_step(args) // (args.gradient_accumulation_steps * args.world_size)
    if not trains:
        return MicroBatchRule(size=size, chosen=requested)
    kind = on_rank_zero(lambda: _loss_kind(trainer, inputs, sequence_length))
    problem = None if kind is LossKind.SHARE else _PROBLEMS[kind].format(_owner_of_loss(trainer))
    may_change = kind in (LossKind.SHARE, LossKind.WHOLE)
    coupling = problem or _own_step(trainer) or _coupling(trainer)
    reason = coupling or _batch_count_dependence(trainer)
    averages = kind is LossKind.WHOLE
    if reason is None:
        return MicroBatchRule(size=size, chosen=requested)
    if requested is None and config.plan is not None and may_change:
        warn(
            args,
            "%s: a plan of other micro-batches than the %d samples of the arguments may train differently.",
            reason,
            size,
        )
        return MicroBatchRule(size=size, chosen=None, averages=averages)
    if requested in (None, size):
        remedy = (
            "OSDPConfig(micro_batch_size=...)"
            if may_change
            else "per_device_train_batch_size and gradient_accumulation_steps"
        )
        kept = f"{reason}, so micro-batches stay at {size} samples; set {remedy} for another size."
        if requested is None:
            warn(args, kept)
        return MicroBatchRule(size=size, chosen=size, kept=kept)
    if not may_change:
        raise ValueError(
            f"{reason}, so micro_batch_size={requested} would train something else than the {size} samples of the"
            " arguments; leave it"
            f" out, or set per_device_train_batch_size={requested} and gradient_accumulation_steps."
        )
    warn(
        args,
        "%s: micro_batch_size=%d may train differently than the %d samples of the arguments.",
        reason,
        requested,
        size,
    )
    return MicroBatchRule(size=size, chosen=requested, averages=averages)


def scale_loss(trainer: Trainer, factor: float) -> None:
    """Multiply the losses of training wherever the stock Trainer adds them up over micro-steps, instead of
    averaging them.
    """
    compute_loss = trainer.compute_loss

    @functools.wraps(compute_loss)
    def scaled(model: nn.Module, inputs: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:  # noqa: ANN401
        result = compute_loss(model, inputs, *args, **{**kwargs, "num_items_in_batch": num_items_in_batch})
        is_counted = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
        sums = getattr(trainer, "loss_is_scaled_for_ga", None) is None and (
            is_counted or trainer.compute_loss_func is not None
        )
        if not (model.training and sums):
            return result
        return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor

    trainer.compute_loss = scaled  # type: ignore[method-assign]


def _loss_kind(trainer: Trainer, inputs: Inputs | None, sequence_length: int) -> LossKind:
    """Examine the trainer's loss on short rows, and on whole ones if nothing is found on these."""
    model = trainer.model
    assert isinstance(model, nn.Module)
    if not _counts_items(trainer):
        return LossKind.WHOLE

    short = min(_TOKENS, sequence_length)
    if isinstance(inputs, Batches):
        tried: list[Inputs] = [inputs.with_rows(short), inputs]
    else:
        tried = [inputs or (lambda samples: training_batch(model, short)(samples))]
    kinds = (find_loss_kind(model, batches, traced_loss(trainer)) for batches in tried)
    kind = next((kind for kind in kinds if kind is not LossKind.UNKNOWN), LossKind.UNKNOWN)
    if kind is LossKind.WHOLE and getattr(trainer, "loss_is_scaled_for_ga", None):
        return LossKind.UNKNOWN  # the trainer may divide by the number of micro-steps
    return kind


def _owner_of_loss(trainer: Trainer) -> str:
    if type(trainer).compute_loss is not Trainer.compute_loss:
        return f"{type(trainer).__name__}.compute_loss"
    assert isinstance(trainer.model, nn.Module)
    return type(without_adapters(trainer.model)).__name__ if trainer.compute_loss_func is None else "compute_loss_func"


def _own_step(trainer: Trainer) -> str | None:
    """Return which of the Trainer's methods other code than the proven one replaces; None if there is none."""
    for name in _STEP:
        classes = (cls for cls in type(trainer).__mro__ if name in vars(cls))
        if (owner := _unproven(vars(trainer).get(name) or next(classes, Trainer))) is not None:
            return f"{owner}.{name} runs for each micro-batch, in a way of its own"
    return None


def _unproven(owner: object) -> str | None:
    """Return the name of a class, or of a function, that is not of a proven package."""
    package = str(getattr(owner, "__module__", "")).partition(".")[0]
    return None if package in _PROVEN else str(getattr(owner, "__name__", owner))


def _coupling(trainer: Trainer) -> str | None:
    """Return why the model's outputs may depend on which samples share a micro-batch; None if they do not."""
    assert isinstance(trainer.model, nn.Module)
    cls, model = type(trainer), without_adapters(trainer.model)
    if has_running_statistics(model):
        return f"{type(model).__name__} has batch normalisation, which computes statistics over a micro-batch"
    if cls.get_train_dataloader is not Trainer.get_train_dataloader:
        return f"{cls.__name__} makes its own batches"
    return None


def _batch_count_dependence(trainer: Trainer) -> str | None:
    """Return why a step may depend on the number of its micro-batches; None if only its samples matter."""
    args, dataset = trainer.args, trainer.train_dataset
    for callback in trainer.callback_handler.callbacks:
        between = next(cls for cls in type(callback).__mro__ if "on_substep_end" in vars(cls))
        if (owner := _unproven(between)) is not None:
            return f"{owner}.on_substep_end runs for each micro-batch, in a way of its own"
    if not args.average_tokens_across_devices:
        return "average_tokens_across_devices=False weights samples by the tokens on their process"
    is_whole = isinstance(dataset, Sized) and len(dataset) % samples_of_step(args) == 0
    for name, ends in (
        ("dataloader_drop_last=True", args.dataloader_drop_last),
        ("even_batches=False", not accelerator_config_of(args).even_batches),
    ):
        if ends and not is_whole:
            return f"{name} ends each epoch at a whole micro-batch"
    return None


def traced_loss(trainer: Trainer) -> Callable[..., object]:
    """Return the trainer's `compute_loss` as a function of a fake model, a batch and the number of items of the step,
    by default as many as the batch has labels.
    """

    def loss(fake_model: nn.Module, batch: Any, items: Any = None) -> object:  # noqa: ANN401
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if items is None:
            items = max(1, labels.numel()) if isinstance(labels, torch.Tensor) else 1
        elif not isinstance(labels, torch.Tensor):
            items = None
        with _examined(trainer, fake_model):
            return trainer.compute_loss(
                fake_model, batch, num_items_in_batch=items if _counts_items(trainer) else None
            )

    return loss


def _counts_items(trainer: Trainer) -> bool:
    """Return whether the trainer counts the items of a step and gives their number to the loss."""
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


def bytes_of_other_models(trainer: Trainer) -> dict[str, int]:
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


@contextmanager
def _examined(trainer: Trainer, fake_model: nn.Module) -> Iterator[None]:
    """Let a trainer compute its loss with a fake model in this context, and put everything back: what it holds is
    copied for the time, its modules with fake parameters, and it sends nothing to other ranks.

    A sharded module, such as a reference model, returns the fake model's last output, without gradients.
    """
    own, model, last = vars(trainer), trainer.model, list[Any]()
    assert isinstance(model, nn.Module)
    before = dict(own)

    def last_output(*args: object, **kwargs: object) -> object:
        return tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, requires_grad=False), last[-1])

    handle = fake_model.register_forward_hook(lambda module, args, output: last.__setitem__(slice(None), [output]))
    device = next(fake_model.parameters()).device
    try:
        for name, value in before.items():
            if value is model or name in ("model", "model_wrapped"):
                own[name] = fake_model
            elif isinstance(value, nn.Module):
                sharded = any(map(is_under_plan, value.modules()))
                own[name] = last_output if sharded else _fake_copy(value, model, fake_model)
            elif name not in _DATA and not any(_modules_in(value)):
                own[name] = rebound(value, {id(trainer): trainer, id(model): fake_model})
        own["accelerator"] = _LocalAccelerator(trainer.accelerator, device)
        yield
    finally:
        handle.remove()
        own.clear()
        own.update(before)


def _fake_copy(module: nn.Module, model: nn.Module, fake_model: nn.Module) -> nn.Module:
    """Copy a module with fake parameters, or its own if the model is real; if it holds the trained model, as loss
    modules may, the copy holds `fake_model`.
    """
    like = next(fake_model.parameters())
    mode = torch._guards.detect_fake_mode([like])  # none if the model is real
    memo: dict[int, Any] = {id(model): fake_model}
    for tensor in _tensors(module):
        fake = tensor.detach().to(like.device) if mode is None else fake_like(tensor, mode)
        memo[id(tensor)] = (
            nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
        )
    return copy.deepcopy(module, memo)


def _modules_in(value: object) -> Iterator[nn.Module]:
    """Yield the modules that a value is, or holds in containers."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, nn.Module))


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
