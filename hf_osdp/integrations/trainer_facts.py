"""What a Trainer's arguments, data and loss say about the run that is to be planned."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import SaveStrategy
from transformers.training_args import OptimizerNames

from ..checkpoint.resume import recorded_batch
from ..distributed.process_group import of_all_ranks
from ..modeling.batch import Inputs, without_adapters
from ..modeling.wrapping import has_running_statistics
from ..planner.job import OptimizerSpec, Precision
from ..planning.config import OSDPConfig
from ..planning.preflight.checks import RunFolder
from ..planning.problem import RunFacts
from .optimizers import frozen_parameters, spec_of_optimizer, spec_of_trainer_name
from .plugin import offloads
from .samples import find_batches, tokens_of
from .subclasses import held_models, traced_loss
from .trainer_options import samples_of_step

_log = logging.getLogger(__name__)
_SINGLE_SAMPLE_LOSSES = ("SFTTrainer", "RewardTrainer")
"""Trainers with a loss of their own that is a sum over tokens or samples, whichever share a batch."""


def facts_of_trainer(trainer: Trainer, config: OSDPConfig) -> RunFacts:
    """Return what is known about the run of a Trainer whose `__init__` has ended. Collective.

    Raises:
        ValueError: the sequence length, or the optimizer's memory, is not known.
    """
    args, plugin = trainer.args, trainer.accelerator.plugin
    batches, sequence_length = _batches(trainer, config)
    stock_loss = type(trainer).compute_loss is Trainer.compute_loss
    model_makes_loss = stock_loss and trainer.compute_loss_func is None and trainer.label_smoother is None
    trains = trainer.train_dataset is not None
    checkpointing = bool(plugin.activation_checkpointing)
    return RunFacts(
        world_size=args.world_size,
        device_type=args.device.type,
        precision=Precision.named(args.mixed_precision, autocast=args.world_size == 1 and not dist.is_initialized()),
        optimizer=_optimizer_spec(trainer),
        sequence_length=sequence_length,
        global_batch_size=config.global_batch_size or _global_batch_size(args, resumes=trains and config.resume_after_restart),
        micro_batch_size=config.micro_batch_size or _coupled_batch_size(trainer),
        reduce_every_micro_step=config.reduce_every_micro_step,
        inputs=batches,
        loss=None if batches is None or config.inputs or model_makes_loss else traced_loss(trainer),
        other_models=held_models(trainer),
        clips_gradients=bool(args.max_grad_norm and args.max_grad_norm > 0),
        activation_checkpointing=bool(args.gradient_checkpointing) or checkpointing,
        checkpoint_wrapper=checkpointing,
        reads_loss_alone=model_makes_loss and not args.use_liger_kernel,
        cpu_offload=offloads(plugin),
        trains=trains,
        frozen_in_optimizer=frozen_parameters(trainer.optimizer),
        folder=trainer_folder(args, trainer.model) if trains else None,
    )


def trainer_folder(args: TrainingArguments, model: nn.Module | None) -> RunFolder:
    """Return where the Trainer writes, and what; of peft's models only adapters are saved."""
    assert args.output_dir is not None
    return RunFolder(
        path=args.output_dir,
        saves=args.save_strategy != SaveStrategy.NO,
        limit=args.save_total_limit,
        states=not args.save_only_model,
        adapters=getattr(model, "peft_config", None) is not None,
    )


def _global_batch_size(args: TrainingArguments, *, resumes: bool) -> int:
    """Return the samples of a step as the arguments have them; a restart, which may have fewer processes, keeps those it began with."""
    given = samples_of_step(args)
    assert args.output_dir is not None
    begun = recorded_batch(args.output_dir) if resumes else None
    if begun is None or begun == given or begun % args.world_size:
        return given
    if args.process_index == 0:
        _log.warning("This restart keeps the global batch of %d samples that training began with; the arguments make %d.", begun, given)
    return begun


def _coupled_batch_size(trainer: Trainer) -> int | None:
    """Return the samples of a micro-batch where the loss may depend on which samples share one; None leaves them to the planner."""
    args, reason = trainer.args, batch_coupling(trainer)
    if reason is None:
        return None
    size: int = samples_of_step(args) // (args.gradient_accumulation_steps * args.world_size)
    if args.process_index == 0:
        _log.warning("%s, so micro-batches stay at %d samples; OSDPConfig(micro_batch_size=...) sets another size.", reason, size)
    return size


def batch_coupling(trainer: Trainer) -> str | None:
    """Return why a loss may depend on which samples share a micro-batch; None where it does not.

    The planner then keeps the size of micro-batches: splitting one would train something else.
    """
    assert isinstance(trainer.model, nn.Module)
    cls, model = type(trainer), without_adapters(trainer.model)
    if "return_loss" in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} compares the samples of a batch with each other"
    if has_running_statistics(model):
        return f"{type(model).__name__} has batch normalisation, which takes the statistics of a micro-batch"
    if getattr(getattr(model, "config", None), "output_router_logits", False) or getattr(trainer, "aux_loss_enabled", False):
        return f"{type(model).__name__} balances its experts over the tokens of a micro-batch"
    owner = next(base.__name__ for base in cls.__mro__ if "compute_loss" in vars(base))  # a subclass may have a loss of its own again
    if owner in _SINGLE_SAMPLE_LOSSES:
        return None
    if cls.compute_loss is not Trainer.compute_loss:
        return f"{cls.__name__} computes its own loss, which may depend on the samples that share a batch"
    if cls.get_train_dataloader is not Trainer.get_train_dataloader:
        return f"{cls.__name__} makes its own batches"
    return None


def _batches(trainer: Trainer, config: OSDPConfig) -> tuple[Inputs | None, int]:
    """Return batches as the data gives them, None where the data does not show them, and the tokens of a row. Collective."""
    if config.inputs is not None:
        return config.inputs, config.sequence_length or tokens_of(config.inputs(1)) or 1
    found = None
    for dataset in (trainer.train_dataset, trainer.eval_dataset):
        dataset = next(iter(dataset.values()), None) if isinstance(dataset, dict) else dataset
        found = found or find_batches(*_rows_and_collator(trainer, dataset))
    says_it = trainer.args.process_index == 0
    if found is not None and isinstance(found(1), Mapping):
        batches, length = found.with_rows(config.sequence_length)
        if config.sequence_length is None and not found.is_whole and found.tokens and says_it:
            _log.warning(
                "Planned for %d tokens, the longest of %d samples that were looked at; where longer ones come, give"
                " OSDPConfig(sequence_length=...).", length, found.seen,
            )  # fmt: skip
        return batches, length
    generated = config.sequence_length or (None if found is None else _tokens_to_generate(trainer, found.sample))
    if generated is None:
        raise ValueError("The sequence length cannot be read from the dataset; give OSDPConfig(sequence_length=...).")
    if found is not None and says_it:
        _log.warning(
            "%s makes its batches in the step itself, as by generation: the estimate is that of the model's own loss, without what it"
            " takes to make them; a lower memory_limit leaves room.", type(trainer).__name__,
        )  # fmt: skip
    return None, config.sequence_length or max(of_all_ranks(generated))


def _rows_and_collator(trainer: Trainer, dataset: Any) -> tuple[Any, Any]:  # noqa: ANN401  of any library
    """Return a dataset with the columns that the Trainer keeps, and what makes batches of its rows."""
    if type(trainer).get_train_dataloader is not Trainer.get_train_dataloader:
        return dataset, trainer.data_collator
    datasets = sys.modules.get("datasets")  # a dataset of its class cannot be there without it
    if datasets is not None and isinstance(dataset, datasets.Dataset):
        return trainer._remove_unused_columns(dataset), trainer.data_collator
    return dataset, trainer._get_collator_with_removed_columns(trainer.data_collator)


def _tokens_to_generate(trainer: Trainer, sample: object) -> int | None:
    """Return the tokens of a prompt and of what is generated for it, as TRL's online trainers name them; None elsewhere."""
    completion: int | None = getattr(trainer.args, "max_completion_length", None)
    tokenizer: Any = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    if completion is None or tokenizer is None or not isinstance(sample, Mapping) or "prompt" not in sample:
        return None
    return completion + len(tokenizer(str(sample["prompt"]))["input_ids"])


def _optimizer_spec(trainer: Trainer) -> OptimizerSpec:
    """Return what the optimizer of this training will hold."""
    device_type, optimizer = trainer.args.device.type, trainer.optimizer
    if optimizer is None and trainer.optimizer_cls_and_kwargs is not None:
        cls, options = trainer.optimizer_cls_and_kwargs
        optimizer = cls([nn.Parameter(torch.zeros(1))], **options)
    if optimizer is not None:
        return spec_of_optimizer(optimizer, device_type=device_type)
    return spec_of_trainer_name(OptimizerNames(trainer.args.optim).value, device_type=device_type)
