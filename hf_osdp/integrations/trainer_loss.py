"""The loss of a Trainer: how it runs on a fake model, and which micro-batches train as the arguments do, which is
decided by what it divides by.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from ..distributed.consensus import on_rank_zero
from ..modeling.batch import Inputs, training_batch, without_adapters
from ..modeling.replaced import replaced
from ..modeling.split.apply import only_loss_read
from ..modeling.wrapping import has_running_statistics
from ..planner.plan import Plan
from ..preparation.beside import modules_in, tensors_in
from ..preparation.config import OSDPConfig
from ..preparation.plan_run import PlannedRun
from ..preparation.samples import Batches
from ..sharding.micro_batches import reason_against_cuts
from ..sharding.replicas import is_under_plan
from ..tracing.fake_model import rebound
from ..tracing.loss_kind import LossKind, find_loss_kind
from ..tracing.tensors import fake_like
from .trainer_checkpoints import TrainerCheckpoints

_log = logging.getLogger(__name__)
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

    samples: int
    """Samples of a step by the arguments, over all processes."""
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

    def loaded(self, plan: Plan) -> tuple[int, int]:
        """Return the samples of a batch that this rank loads, and how many it loads in a step: as the arguments say,
        if steps are cut into the plan's micro-batches.
        """
        size = math.gcd(plan.samples_per_rank, self.size) if self.cuts else plan.micro_batch_size
        return size, plan.samples_per_rank // size

    def cuts_steps_of(self, run: PlannedRun) -> bool:
        """Return whether steps are cut into micro-batches other than the batches that are loaded."""
        return run.budget is not None or self.loaded(run.plan)[0] != run.plan.micro_batch_size


def warn(args: TrainingArguments, line: str, *values: object) -> None:
    """Log a warning on rank 0."""
    if args.process_index == 0:
        _log.warning(line, *values)


def samples_of_step(args: TrainingArguments) -> int:
    """Return the samples of one optimizer step over all processes; `split_batches` divides each batch among them."""
    batch, parts = args.per_device_train_batch_size, parts_of_batch(args)
    if batch % parts:
        raise ValueError(
            f"split_batches=True cannot split batches of {batch} over {parts} processes; use a"
            f" per_device_train_batch_size that is a multiple of {parts}."
        )
    return batch * args.gradient_accumulation_steps * args.world_size // parts


def parts_of_batch(args: TrainingArguments) -> int:
    """Return over how many processes a batch of the arguments' size is split."""
    assert isinstance(args.accelerator_config, AcceleratorConfig)
    return args.world_size if args.accelerator_config.split_batches else 1


def planned_arguments(args: TrainingArguments, size: int, count: int) -> dict[str, object]:
    """Return the arguments with which the stock Trainer loads batches of `size` samples for each process, `count` of
    them in a step, and neither searches for a batch size nor compiles the whole model.
    """
    return {
        "per_device_train_batch_size": size * parts_of_batch(args),
        "gradient_accumulation_steps": count,
        "auto_find_batch_size": False,
        "torch_compile": False,
    }


def micro_batch_rule(
    trainer: TrainerCheckpoints, config: OSDPConfig, inputs: Inputs | None, sequence_length: int, *, trains: bool
) -> MicroBatchRule:
    """Return the rule for a Trainer whose `__init__` has returned; `inputs` are its batches, None if these are not
    known. Collective.

    Raises:
        ValueError: a micro-batch size was requested with which this loss cannot train as with the arguments' own.
    """
    args, requested, samples = trainer.args, config.micro_batch_size, samples_of_step(trainer.args)
    size: int = samples // (args.gradient_accumulation_steps * args.world_size)
    if not trains:
        return MicroBatchRule(samples=samples, size=size, chosen=requested)
    batch, own = inputs(2) if isinstance(inputs, Batches) else None, _own_step(trainer)
    cuts = own is None and on_rank_zero(lambda: reason_against_cuts(batch, samples=2)) is None
    kind = on_rank_zero(lambda: _loss_kind(trainer, inputs, sequence_length))
    problem = None if kind in (LossKind.SHARE, LossKind.MEAN) else _PROBLEMS[kind].format(_owner_of_loss(trainer))
    reason = problem or own or _dependence(trainer, cuts=cuts)
    may_change = kind is LossKind.SHARE or (kind in (LossKind.MEAN, LossKind.WHOLE) and cuts)
    rule = partial(MicroBatchRule, samples=samples, size=size, cuts=cuts, averages=kind is not LossKind.SHARE)
    if reason is None and may_change:
        return rule(chosen=requested)
    reason = reason or f"The loss of {_owner_of_loss(trainer)} is a mean over batches that cannot be cut"
    is_given = requested is None and config.plan is not None and may_change
    if requested in (None, size) and not is_given:
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
    asked = "the plan's micro-batches" if is_given else f"micro_batch_size={requested}"
    warn(args, "%s: %s may train differently than the %d samples of the arguments.", reason, asked, size)
    return rule(chosen=requested, differs=reason)


def adds_up(trainer: TrainerCheckpoints, items: object) -> bool:
    """Return whether the stock Trainer adds up the losses of a step's batches, instead of averaging them."""
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    counted = (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None
    return bool(counted if scaled is None else scaled)


def _loss_kind(trainer: TrainerCheckpoints, inputs: Inputs | None, sequence_length: int) -> LossKind:
    """Examine the trainer's loss on short rows, and on whole ones if nothing is found on these."""
    model, means = trainer.model, _owns_mean(trainer, inputs)
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


def has_stock_loss(trainer: TrainerCheckpoints) -> bool:
    """Return whether the loss is computed as by the stock Trainer without `compute_loss_func`."""
    return type(trainer).compute_loss is Trainer.compute_loss and trainer.compute_loss_func is None


def _owns_mean(trainer: TrainerCheckpoints, inputs: Inputs | None) -> bool:
    """Return whether the loss is that of a model of transformers with one label for each sample, all of which weigh
    the same.
    """
    model, batch = without_adapters(trainer.model), inputs(1) if isinstance(inputs, Batches) else None
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    is_replaced = "compute_loss" in vars(trainer) or "_loss_function" in vars(model)
    return (
        has_stock_loss(trainer)
        and not is_replaced
        and trainer.label_smoother is None
        and type(model).__module__.startswith("transformers.")
        and isinstance(labels, torch.Tensor)
        and (labels.dim() == 1 or labels.is_floating_point())
    )


def _owner_of_loss(trainer: TrainerCheckpoints) -> str:
    if type(trainer).compute_loss is not Trainer.compute_loss:
        return f"{type(trainer).__name__}.compute_loss"
    return type(without_adapters(trainer.model)).__name__ if trainer.compute_loss_func is None else "compute_loss_func"


def _own_step(trainer: TrainerCheckpoints) -> str | None:
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


def _dependence(trainer: TrainerCheckpoints, *, cuts: bool) -> str | None:
    """Return why a step may depend on which samples share a micro-batch, or on the number of micro-batches; None if
    only its samples matter.

    If batches are loaded in the plan's sizes, and not cut, an epoch may end at another sample than the stock one.
    """
    args, dataset, model, cls = trainer.args, trainer.train_dataset, without_adapters(trainer.model), type(trainer)
    orders = (type(callback).__mro__ for callback in trainer.callback_handler.callbacks)
    between = (_unproven(next(base for base in order if "on_substep_end" in vars(base))) for order in orders)
    steps = len(dataset) / samples_of_step(args) if isinstance(dataset, Sized) else 0.5
    is_whole, even = steps.is_integer() or 0 < args.max_steps <= steps, trainer.accelerator.even_batches
    several, collator, owner = args.world_size > 1, trainer.data_collator, next(filter(None, between), None)
    makes = _unproven(collator if hasattr(collator, "__name__") else type(collator))
    ends = {
        "dataloader_drop_last=True": args.dataloader_drop_last and not cuts,
        "even_batches=False": not even and (several or not cuts),
        "even_batches=True fills up the last batches of an epoch, and": even and several and not cuts,
    }
    reasons = {
        f"{type(model).__name__} has batch normalisation, which computes statistics over a micro-batch":
            has_running_statistics(model),
        f"{cls.__name__} makes its own batches": cls.get_train_dataloader is not Trainer.get_train_dataloader,
        f"{owner}.on_substep_end runs for each micro-batch, in a way of its own": owner is not None,
        f"{makes} makes batches that cannot be cut, and may mix their samples": not cuts and makes is not None,
        "average_tokens_across_devices=False weights samples by the tokens on their process":
            not cuts and not args.average_tokens_across_devices,
        **{f"{name} ends each epoch at a whole micro-batch": holds and not is_whole for name, holds in ends.items()},
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), None)


def traced_loss(trainer: TrainerCheckpoints) -> Callable[..., object]:
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


def traced_prediction(
    trainer: TrainerCheckpoints, *, loss_alone: bool, generates: bool = False
) -> Callable[..., object]:
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


def _counts_items(trainer: TrainerCheckpoints) -> bool:
    """Return whether the trainer counts the items of a step and gives their number to the loss."""
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


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
def _examined(trainer: TrainerCheckpoints, fake_model: nn.Module) -> Iterator[None]:
    """Let a trainer compute its loss with a fake model in this context, and put everything back: what it holds is
    copied for the time, its modules with fake parameters, and it sends nothing to other ranks.

    A sharded module, such as a reference model, returns the fake model's last output, without gradients.
    """
    own, model, last = vars(trainer), trainer.model, list[Any]()
    before = dict(own)

    def last_output(*args: object, **kwargs: object) -> object:
        return tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, requires_grad=False), last[-1])

    def copied(module: nn.Module) -> object:
        if module is model:
            return fake_model
        return last_output if any(map(is_under_plan, module.modules())) else _fake_copy(module, model, fake_model)

    handle = fake_model.register_forward_hook(lambda module, args, output: last.__setitem__(slice(None), [output]))
    try:
        for name, value in before.items():
            if name in ("model", "model_wrapped"):
                own[name] = fake_model
            elif any(modules_in(value)):
                own[name] = tree_map_only(nn.Module, copied, value)
            elif name not in _DATA:
                own[name] = rebound(value, {id(trainer): trainer, id(model): fake_model})
        own["accelerator"] = _LocalAccelerator(trainer.accelerator, next(fake_model.parameters()).device)
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
    for tensor in tensors_in(module):
        fake = tensor.detach().to(like.device) if mode is None else fake_like(tensor, mode)
        memo[id(tensor)] = (
            nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
        )
    return copy.deepcopy(module, memo)
