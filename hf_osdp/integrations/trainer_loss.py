"""The loss of a Trainer: how it runs on a fake model, and which micro-batches train as the arguments do, which is
decided by what it divides by.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import Trainer

from ..distributed.consensus import on_rank_zero
from ..distributed.fsdp_internals import parameter_groups, stays_gathered
from ..errors import InfeasibleError
from ..modeling.batch import Inputs, training_batch, without_adapters
from ..modeling.replaced import replaced
from ..modeling.split.apply import only_loss_read
from ..modeling.wrapping import has_running_statistics
from ..preparation.config import OSDPConfig
from ..sharding.replicas import is_under_plan
from ..tracing.fake_model import rebound
from ..tracing.loss_kind import LossKind, find_loss_kind
from ..tracing.tensors import fake_like
from .micro_batches import reason_against_cuts
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
    differs: str | None = None
    """Why another size than the arguments' may train differently, of which the user was warned."""
    cuts: bool = False
    """The Trainer loads its stock batches, and each step is cut into the plan's micro-batches (`micro_batches.py`);
    else it loads these.
    """
    averages: bool = False
    """Losses are means over the samples of a batch, so that each micro-batch's counts with its share of it."""

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
    batch, own = inputs(2) if isinstance(inputs, Batches) else None, _own_step(trainer)
    cuts = own is None and on_rank_zero(lambda: reason_against_cuts(batch, samples=2)) is None
    kind = on_rank_zero(lambda: _loss_kind(trainer, inputs, sequence_length))
    problem = None if kind in (LossKind.SHARE, LossKind.MEAN) else _PROBLEMS[kind].format(_owner_of_loss(trainer))
    reason = problem or own or _coupling(trainer) or _batch_count_dependence(trainer, cuts=cuts)
    may_change = kind is LossKind.SHARE or (kind in (LossKind.MEAN, LossKind.WHOLE) and cuts)
    rule = partial(MicroBatchRule, size=size, cuts=cuts, averages=kind is not LossKind.SHARE)
    if reason is None and may_change:
        return rule(chosen=requested)
    reason = reason or f"The loss of {_owner_of_loss(trainer)} is a mean over batches that cannot be cut"
    if requested is None and config.plan is not None and may_change:
        warn(
            args,
            "%s: a plan of other micro-batches than the %d samples of the arguments may train differently.",
            reason,
            size,
        )
        return rule(chosen=None, differs=reason)
    if requested in (None, size):
        remedy = (
            "OSDPConfig(micro_batch_size=...)"
            if may_change
            else "per_device_train_batch_size and gradient_accumulation_steps"
        )
        kept = f"{reason}, so micro-batches stay at {size} samples; set {remedy} for another size."
        if requested is None:
            warn(args, kept)
        return rule(chosen=size, kept=kept)
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
    return rule(chosen=requested, differs=reason)


def adds_up(trainer: Trainer, items: object) -> bool:
    """Return whether the stock Trainer adds up the losses of a step's batches, instead of averaging them."""
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    counted = (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None
    return bool(counted if scaled is None else scaled)


def _loss_kind(trainer: Trainer, inputs: Inputs | None, sequence_length: int) -> LossKind:
    """Examine the trainer's loss on short rows, and on whole ones if nothing is found on these."""
    model = trainer.model
    assert isinstance(model, nn.Module)
    means = _owns_mean(trainer, model, inputs)
    if not (_counts_items(trainer) or means):
        return LossKind.WHOLE

    short = min(_TOKENS, sequence_length)
    if isinstance(inputs, Batches):
        tried: list[Inputs] = [inputs.with_rows(short), inputs]
    else:
        tried = [inputs or (lambda samples: training_batch(model, short)(samples))]
    kinds = (find_loss_kind(model, batches, traced_loss(trainer)) for batches in tried)
    kind = next((kind for kind in kinds if kind is not LossKind.UNKNOWN), LossKind.UNKNOWN)
    if kind is LossKind.MEAN and not means:
        kind = LossKind.WHOLE
    if kind is LossKind.WHOLE and getattr(trainer, "loss_is_scaled_for_ga", None):
        return LossKind.UNKNOWN  # the trainer may divide by the number of micro-steps
    return kind


def _owns_mean(trainer: Trainer, model: nn.Module, inputs: Inputs | None) -> bool:
    """Return whether the loss is that of a model of transformers with one label for each sample, all of which weigh
    the same.
    """
    labels = inputs(1).get("labels") if isinstance(inputs, Batches) and isinstance(inputs(1), Mapping) else None
    is_own = type(trainer).compute_loss is Trainer.compute_loss and trainer.compute_loss_func is None
    is_own = is_own and "compute_loss" not in vars(trainer) and "_loss_function" not in vars(without_adapters(model))
    from_transformers = type(without_adapters(model)).__module__.startswith("transformers.")
    return (
        is_own
        and trainer.label_smoother is None
        and from_transformers
        and isinstance(labels, torch.Tensor)
        and (labels.dim() == 1 or labels.is_floating_point())
    )


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


def _batch_count_dependence(trainer: Trainer, *, cuts: bool) -> str | None:
    """Return why a step may depend on the number of its micro-batches; None if only its samples matter.

    If batches are loaded in the plan's sizes, and not cut, an epoch may end at another sample than the stock one.
    """
    args, dataset = trainer.args, trainer.train_dataset
    for callback in trainer.callback_handler.callbacks:
        between = next(cls for cls in type(callback).__mro__ if "on_substep_end" in vars(cls))
        if (owner := _unproven(between)) is not None:
            return f"{owner}.on_substep_end runs for each micro-batch, in a way of its own"
    steps = len(dataset) / samples_of_step(args) if isinstance(dataset, Sized) else 0.5
    is_whole, even = steps.is_integer() or 0 < args.max_steps <= steps, accelerator_config_of(args).even_batches
    several, collator = args.world_size > 1, trainer.data_collator
    owner = _unproven(collator if hasattr(collator, "__name__") else type(collator))
    if not cuts and owner is not None:
        return f"{owner} makes batches that cannot be cut, and may mix their samples"
    if not cuts and not args.average_tokens_across_devices:
        return "average_tokens_across_devices=False weights samples by the tokens on their process"
    for name, ends in (
        ("dataloader_drop_last=True", args.dataloader_drop_last and not cuts),
        ("even_batches=False", not even and (several or not cuts)),
        ("even_batches=True fills up the last batches of an epoch, and", even and several and not cuts),
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


def traced_prediction(trainer: Trainer, *, loss_alone: bool, generates: bool = False) -> Callable[..., object]:
    """Return the trainer's `prediction_step` as a function of a fake model and a batch, to the loss and to what an
    evaluation keeps beside it; if it `generates`, to the loss that it computes of the labels after that.
    """

    def predicted(fake_model: nn.Module, batch: Any) -> object:  # noqa: ANN401
        given, inputs = batch.get("labels"), None
        items = max(1, given.numel()) if isinstance(given, torch.Tensor) and _counts_items(trainer) else None
        with _examined(trainer, fake_model), only_loss_read(fake_model) if loss_alone else nullcontext():
            with replaced(trainer, _prepare_inputs=dict, _get_num_items_in_batch=lambda *_: items):
                step = partial(Trainer.prediction_step, trainer) if generates else trainer.prediction_step
                loss, logits, labels = step(fake_model, batch, loss_alone or generates)
            if logits is not None and trainer.preprocess_logits_for_metrics is not None:
                logits = trainer.preprocess_logits_for_metrics(logits, cast("torch.Tensor", labels))
            if "inputs" in trainer.args.include_for_metrics:
                inputs = batch.get(getattr(trainer.model, "main_input_name", "input_ids"))
        return torch.zeros(()) if loss is None else loss, logits, labels, inputs

    return predicted


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
        name: sum(_bytes_on_device(module, seen) for module in modules) for name, modules in _held(trainer).items()
    }
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def models_of(trainer: Trainer) -> list[nn.Module]:
    """Return the trained model and all others that the trainer holds."""
    return [module for modules in _held(trainer).values() for module in modules]


def _held(trainer: Trainer) -> dict[str, list[nn.Module]]:
    """Return the models by the trainer's attribute, and those of `OSDPConfig(also=...)`."""
    values = {**vars(trainer), "models beside": trainer.accelerator.beside.models}
    return {name: list(_modules_in(value)) for name, value in values.items()}


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

    def copied(module: nn.Module) -> object:
        if module is model:
            return fake_model
        return last_output if any(map(is_under_plan, module.modules())) else _fake_copy(module, model, fake_model)

    handle = fake_model.register_forward_hook(lambda module, args, output: last.__setitem__(slice(None), [output]))
    device = next(fake_model.parameters()).device
    try:
        for name, value in before.items():
            if name in ("model", "model_wrapped"):
                own[name] = fake_model
            elif any(_modules_in(value)):
                own[name] = tree_map_only(nn.Module, copied, value)
            elif name not in _DATA:
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
