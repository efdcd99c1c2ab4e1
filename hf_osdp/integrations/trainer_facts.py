"""Read the facts that planning needs from a Trainer's arguments, data and loss; refuse options that a plan cannot follow."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import sys
from collections.abc import Mapping, Sized
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import SaveStrategy
from transformers.training_args import OptimizerNames

from ..checkpoint.resume import recorded_manifest
from ..modeling.batch import Inputs, without_adapters
from ..modeling.wrapping import has_running_statistics
from ..planner.job import OptimizerSpec, Precision
from ..planner.plan import Plan
from ..planning.config import OSDPConfig
from ..planning.facts import RunFacts, RunFolder
from ..sharding.host_states import reason_against_unit_steps
from ..sharding.optimizer import frozen_parameters, knows_trainer_name, spec_of_optimizer, spec_of_trainer_name
from .plugin import offloads
from .samples import find_batches, row_tokens, tokens_of
from .subclasses import bytes_of_other_models, has_forward_of_transformers, ignores_item_count, traced_loss
from .trainer_arguments import accelerator_config_of, samples_of_step, warn

_log = logging.getLogger(__name__)
_SINGLE_SAMPLE_LOSSES = ("SFTTrainer", "RewardTrainer")
"""Trainers whose own loss is a sum over tokens or samples, independent of which samples share a batch."""
"""Packages whose `create_optimizer` follows `TrainingArguments.optim`."""


def facts_of_trainer(trainer: Trainer, config: OSDPConfig) -> tuple[OSDPConfig, RunFacts]:
    """Return the configuration with the run's sizes filled in, and the facts of a Trainer whose `__init__` has returned. Collective."""
    args, plugin = trainer.args, trainer.accelerator.plugin
    batches, sequence_length = _batches(trainer, config)
    stock_loss = type(trainer).compute_loss is Trainer.compute_loss
    model_makes_loss = stock_loss and trainer.compute_loss_func is None and trainer.label_smoother is None
    trains = trainer.train_dataset is not None
    manifest = recorded_manifest(str(args.output_dir)) if trains and config.resume_after_restart else None
    samples = config.global_batch_size or _global_batch_size(args, None if manifest is None else manifest.global_batch_size)
    sized = replace(
        config,
        sequence_length=sequence_length,
        global_batch_size=samples,
        micro_batch_size=_micro_batch_size(trainer, config),
    )
    return sized, RunFacts(
        world_size=args.world_size,
        device_type=args.device.type,
        precision=Precision.named(args.mixed_precision, autocast=args.world_size == 1 and not dist.is_initialized()),
        optimizer=_optimizer_spec(trainer),
        steps=_steps(trainer, samples),
        inputs=batches,
        loss=None if batches is None or config.inputs or model_makes_loss else traced_loss(trainer),
        other_models=bytes_of_other_models(trainer),
        clips_gradients=bool(args.max_grad_norm and args.max_grad_norm > 0),
        against_unit_steps=_against_unit_steps(trainer),
        activation_checkpointing=bool(args.gradient_checkpointing or plugin.activation_checkpointing),
        reads_loss_alone=model_makes_loss and not args.use_liger_kernel,
        cpu_offload=offloads(plugin),
        trains=trains,
        frozen_in_optimizer=frozen_parameters(trainer.optimizer),
        folder=trainer_folder(args, trainer.model) if trains else None,
    )


def trainer_folder(args: TrainingArguments, model: nn.Module | None) -> RunFolder:
    """Return the folder that the Trainer writes and what it saves there; for peft models only adapters are saved."""
    assert args.output_dir is not None
    return RunFolder(
        path=args.output_dir,
        saves=args.save_strategy != SaveStrategy.NO,
        limit=args.save_total_limit,
        states=not args.save_only_model,
        adapters=getattr(model, "peft_config", None) is not None,
    )


def _steps(trainer: Trainer, samples_of_step: int) -> int | None:
    """Return the optimizer steps of training; None for a stream without `max_steps`, and if nothing is trained."""
    args, dataset = trainer.args, trainer.train_dataset
    if args.max_steps > 0:
        return args.max_steps
    return math.ceil(args.num_train_epochs * len(dataset) / samples_of_step) if isinstance(dataset, Sized) else None


def _global_batch_size(args: TrainingArguments, started_with: int | None) -> int:
    """Return the samples of a step by the arguments; a restart, which may have fewer processes, keeps those of the first start."""
    given = samples_of_step(args)
    if started_with is None or started_with == given or started_with % args.world_size:
        return given
    warn(args, "This restart keeps the global batch of %d samples that training began with; the arguments make %d.", started_with, given)
    return started_with


def _micro_batch_size(trainer: Trainer, config: OSDPConfig) -> int | None:
    """Return the samples of a micro-batch if they were requested or the loss may depend on them; None lets the planner choose."""
    args, requested, coupling = trainer.args, config.micro_batch_size, batch_coupling(trainer)
    reason = coupling or _batch_count_dependence(trainer)
    if reason is None:
        return requested
    size: int = samples_of_step(args) // (args.gradient_accumulation_steps * args.world_size)
    if requested is None and config.plan is not None and coupling is None:
        warn(args, "%s: a plan of other micro-batches than the %d samples of the arguments may train differently.", reason, size)
        return None
    if requested is None:
        warn(args, "%s, so micro-batches stay at %d samples; set OSDPConfig(micro_batch_size=...) for another size.", reason, size)
    elif requested != size:
        warn(args, "%s: micro_batch_size=%d may train differently than the %d samples of the arguments.", reason, requested, size)
    return requested or size


def batch_coupling(trainer: Trainer) -> str | None:
    """Return why the loss may depend on which samples share a micro-batch, whose size must then stay; None if it does not."""
    assert isinstance(trainer.model, nn.Module)
    cls, model = type(trainer), without_adapters(trainer.model)
    if "return_loss" in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} compares the samples of a batch with each other"
    if has_running_statistics(model):
        return f"{type(model).__name__} has batch normalisation, which computes statistics over a micro-batch"
    if getattr(getattr(model, "config", None), "output_router_logits", False) or getattr(trainer, "aux_loss_enabled", False):
        return f"{type(model).__name__} balances its experts over the tokens of a micro-batch"
    owner = next(base.__name__ for base in cls.__mro__ if "compute_loss" in vars(base))  # the class that defines the loss in use
    if owner in _SINGLE_SAMPLE_LOSSES:
        return None
    if cls.compute_loss is not Trainer.compute_loss:
        return f"{cls.__name__} computes its own loss, which may depend on the samples that share a batch"
    if cls.get_train_dataloader is not Trainer.get_train_dataloader:
        return f"{cls.__name__} makes its own batches"
    return None


def _batch_count_dependence(trainer: Trainer) -> str | None:
    """Return why the loss may depend on the number of micro-batches in a step; None if only the samples of the step matter."""
    assert isinstance(trainer.model, nn.Module)
    args, dataset, model = trainer.args, trainer.train_dataset, without_adapters(trainer.model)
    if callable(trainer.compute_loss_func):
        return "compute_loss_func may not divide the loss by num_items_in_batch"
    if trainer.model_accepts_loss_kwargs and not hasattr(model, "accepts_loss_kwargs") and not has_forward_of_transformers(model):
        return f"{type(model).__name__} may not divide its loss by num_items_in_batch"
    if not args.average_tokens_across_devices and trainer.model_accepts_loss_kwargs and not ignores_item_count(model):
        return "average_tokens_across_devices=False weights samples by the tokens on their process"
    is_whole = isinstance(dataset, Sized) and len(dataset) % samples_of_step(args) == 0
    for name, ends in (
        ("dataloader_drop_last=True", args.dataloader_drop_last),
        ("even_batches=False", not accelerator_config_of(args).even_batches),
    ):
        if ends and not is_whole:
            return f"{name} ends each epoch at a whole micro-batch"
    return None


def _batches(trainer: Trainer, config: OSDPConfig) -> tuple[Inputs | None, int]:
    """Return the batches that the data gives (None if they cannot be read from it), and the tokens of a row. Collective."""
    if config.inputs is not None:
        return config.inputs, config.sequence_length or tokens_of(config.inputs(1)) or 1
    evaluated = trainer.eval_dataset
    evaluated = next(iter(evaluated.values()), None) if isinstance(evaluated, dict) else evaluated
    found = find_batches(*_rows_and_collator(trainer, trainer.train_dataset)) or find_batches(*_rows_and_collator(trainer, evaluated))
    made_in_step = found is not None and not isinstance(found(1), Mapping)
    tokens = None if found is None else _tokens_to_generate(trainer, found.sample) if made_in_step else found.tokens or 1
    length = row_tokens(tokens, config.sequence_length)
    if length is None:
        raise ValueError("The sequence length cannot be read from the dataset; set OSDPConfig(sequence_length=...).")
    if found is not None and not made_in_step:
        if config.sequence_length is None and not found.is_whole and found.tokens:
            warn(
                trainer.args, "Planned for %d tokens, the longest of the %d samples that were read; if the data has longer ones, set"
                " OSDPConfig(sequence_length=...).", length, found.seen,
            )  # fmt: skip
        return found.with_rows(length), length
    if found is not None:
        warn(
            trainer.args, "%s makes its batches inside the step, for example by generation; the estimate covers the model's own loss, not"
            " the memory and time to make them. Lower memory_limit to leave room.", type(trainer).__name__,
        )  # fmt: skip
    return None, length


def _rows_and_collator(trainer: Trainer, dataset: Any) -> tuple[Any, Any]:  # noqa: ANN401  of any library
    """Return a dataset with the columns that the Trainer keeps, and the collator for its rows."""
    if type(trainer).get_train_dataloader is not Trainer.get_train_dataloader:
        return dataset, trainer.data_collator
    datasets = sys.modules.get("datasets")  # not imported: the dataset is not one of its class
    if datasets is not None and isinstance(dataset, datasets.Dataset):
        return trainer._remove_unused_columns(dataset), trainer.data_collator
    return dataset, trainer._get_collator_with_removed_columns(trainer.data_collator)


def _tokens_to_generate(trainer: Trainer, sample: object) -> int | None:
    """Return the tokens of a prompt plus its completion, for TRL's online trainers; None for others."""
    completion: int | None = getattr(trainer.args, "max_completion_length", None)
    tokenizer: Any = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    if completion is None or tokenizer is None or not isinstance(sample, Mapping) or "prompt" not in sample:
        return None
    return completion + len(tokenizer(str(sample["prompt"]))["input_ids"])


def _optimizer_spec(trainer: Trainer) -> OptimizerSpec:
    device_type, name, optimizer = trainer.args.device.type, OptimizerNames(trainer.args.optim).value, trainer.optimizer
    if optimizer is None and trainer.optimizer_cls_and_kwargs is None and knows_trainer_name(name):
        return spec_of_trainer_name(name, device_type=device_type)
    spec = spec_of_optimizer(optimizer or _tiny_optimizer(trainer, name), device_type=device_type)
    given = {} if trainer.optimizer_cls_and_kwargs is None else trainer.optimizer_cls_and_kwargs[1]
    registers = optimizer is None and given.get("optim_bits") == 8  # as transformers' `create_optimizer` does for bitsandbytes
    return replace(spec, keeps_embeddings=True) if registers else spec


def _tiny_optimizer(trainer: Trainer, name: str) -> torch.optim.Optimizer:
    """Return the Trainer's optimizer, from its `optimizer_cls_and_kwargs` or else from this `optim` name, over one element."""
    args = copy.copy(trainer.args)
    args.optim = name
    try:
        cls, options = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(args, cast("Any", trainer.model))
    except (ImportError, ValueError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"optim={name!r} cannot be made: {why}; do so, or use adamw_torch.") from None
    return cast("torch.optim.Optimizer", cls([nn.Parameter(torch.zeros(1))], **options))


def _against_unit_steps(trainer: Trainer) -> str | None:
    """Return why the optimizer may not step unit by unit; None if it may."""
    if trainer.optimizer is not None:
        return reason_against_unit_steps(trainer.optimizer)
    name = OptimizerNames(trainer.args.optim).value
    known = trainer.optimizer_cls_and_kwargs is None and knows_trainer_name(name)
    return None if known else f"the optimizer of optim={name!r} may keep state that all its parameters share"


def refuse_changes(trainer: Trainer, plan: Plan) -> None:
    """Refuse a number of samples other than the plan's."""
    if (samples := samples_of_step(trainer.args)) != plan.global_batch_size:
        raise ValueError(
            f"The Trainer's arguments now make {samples} samples per step, but the plan has {plan.global_batch_size}; set batch sizes"
            " before the Trainer is made."
        )
