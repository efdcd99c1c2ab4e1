"""Read the facts that planning needs from a Trainer's arguments, data and loss; refuse options that a plan
cannot follow.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sized
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import SaveStrategy
from transformers.training_args import OptimizerNames
from transformers.utils import can_return_loss, find_labels

from ..checkpoint.resume import recorded_manifest
from ..distributed.consensus import on_rank_zero
from ..errors import one_line, refuse_first
from ..modeling.batch import Inputs, without_adapters
from ..planner.lengths import Lengths
from ..planner.optimizers import knows_trainer_name, spec_of_trainer_name
from ..planner.training_job import OptimizerSpec
from ..preparation.beside import modules_in
from ..preparation.config import OSDPConfig
from ..preparation.job import Job, RunFolder
from ..preparation.plan_run import PlannedRun
from ..preparation.samples import Batches, find_batches, find_lengths, row_tokens, tokens_of
from ..sharding.micro_batches import reason_against_cuts, reason_against_lengths
from ..sharding.optimizer import spec_of_optimizer
from ..sharding.optimizer_steps import reason_against_unit_steps
from .checkpoints import is_adapted
from .trainer_checkpoints import TrainerCheckpoints
from .trainer_evaluation import evaluation_of, rollouts_of
from .trainer_loss import (
    MicroBatchRule,
    has_stock_loss,
    micro_batch_rule,
    planned_arguments,
    samples_of_step,
    traced_loss,
    warn,
)

_KNOWN = {"bitsandbytes", "peft", "torch", "torchao", "transformers"}
"""Packages of whose modules it is known whether they depend on padding."""
_LOADER = ("get_train_dataloader", "_get_train_sampler")
"""The Trainer's methods that say which rows of the dataset make a batch."""


def job_of_trainer(trainer: TrainerCheckpoints, loader: DataLoader[Any] | None = None) -> tuple[Job, MicroBatchRule]:
    """Return the job of a Trainer whose `__init__` has returned, to train on its own dataset or to evaluate a loader.
    Collective.
    """
    args, config, trains = trainer.args, trainer.accelerator.config, loader is None
    held = {name: modules_in(value) for name, value in vars(trainer).items()}
    beside = trainer.accelerator.beside.facts(trainer.model, held)
    if (
        config.beside is None
        and config.plan is None
        and getattr(args, "use_vllm", False)
        and getattr(args, "vllm_mode", "") == "colocate"
    ):
        config = replace(config, beside=getattr(args, "vllm_gpu_memory_utilization", None))
    batches, sequence_length = _batches(trainer, config, loader)
    model_makes_loss = has_stock_loss(trainer) and trainer.label_smoother is None
    manifest = recorded_manifest(str(args.output_dir)) if trains and config.resume_after_restart else None
    samples = config.global_batch_size or _global_batch_size(
        args, None if manifest is None else manifest.global_batch_size
    )
    rule = micro_batch_rule(trainer, config, batches, sequence_length, trains=trains)
    cuts, lengths = _lengths(trainer, batches, rule, sequence_length) if trains else (False, None)
    sized = replace(config, sequence_length=sequence_length, global_batch_size=samples, micro_batch_size=rule.chosen)
    optimizer, against_unit_steps = _optimizer_facts(trainer)
    rows = trainer.train_dataset if trainer.eval_dataset is None and args.do_predict else trainer.eval_dataset
    evaluated = (loader.dataset, loader.collate_fn) if loader is not None else _rows_and_collator(trainer, rows)
    folder = RunFolder(
        path=str(args.output_dir),
        saves=args.save_strategy != SaveStrategy.NO,
        states=not args.save_only_model,
        adapters=is_adapted(trainer.model),
    )
    job = Job(
        config=sized,
        world_size=args.world_size,
        device_type=args.device.type,
        precision=trainer.accelerator.precision,
        optimizer=optimizer,
        inputs=batches,
        cuts_by_length=cuts,
        deals_samples=rule.averages or args.average_tokens_across_devices,
        lengths=lengths,
        loss=None if batches is None or config.inputs or model_makes_loss else traced_loss(trainer),
        **beside,
        clips_gradients=bool(args.max_grad_norm and args.max_grad_norm > 0),
        against_unit_steps=against_unit_steps,
        activation_checkpointing=bool(
            args.gradient_checkpointing or trainer.accelerator.plugin.activation_checkpointing
        ),
        reads_loss_alone=model_makes_loss and not args.use_liger_kernel,
        trains=trains,
        evaluation=evaluation_of(trainer, rule, *evaluated),
        rollouts=rollouts_of(trainer, sequence_length) if batches is None else None,
        folder=folder if trains else None,
    )
    return job, rule


def _lengths(
    trainer: TrainerCheckpoints, batches: Inputs | None, rule: MicroBatchRule, longest: int
) -> tuple[bool, Lengths | None]:
    """Return whether a step's samples can be cut by length, and the lengths of the data's samples if they are known.
    Collective.
    """
    args, config, groups = trainer.args, trainer.accelerator.config, "group_by_length"
    is_grouped, data = args.train_sampling_strategy == groups, batches if isinstance(batches, Batches) else None
    known = _loads_as_stock(trainer) and data is not None and not is_grouped
    found = on_rank_zero(lambda: find_lengths(*_rows_and_collator(trainer, trainer.train_dataset)) if known else None)
    batch = None if data is None else data(2)
    reasons = (
        rule.kept,
        rule.differs,
        f"train_sampling_strategy={groups!r} groups samples already" if is_grouped else None,
        None if isinstance(trainer.train_dataset, Sized) else "the dataset is a stream",
        "NEFTune's noise depends on padding" if args.neftune_noise_alpha else None,
        reason_against_lengths(trainer.model, compiles=config.compile),
        on_rank_zero(lambda: reason_against_cuts(batch, samples=2, by_length=True)),
        "samples are padded on the left" if found is not None and found.on_the_left else None,
        "the classifier looks for its pad_token_id, and samples are padded with another"
        if found is not None and _reads_padding(trainer.model, found.fillers)
        else None,
    )
    reason, asked = next(filter(None, reasons), None), config.batch_by_tokens
    if asked and reason is not None:
        warn(args, "batch_by_tokens=True has no effect: %s.", reason.rstrip("."))
    cuts = reason is None and (asked or (asked is None and _is_known(trainer)))
    return bool(cuts), found and found.unequal(longest, rule.size if rule.cuts else None)


def _loads_as_stock(trainer: TrainerCheckpoints) -> bool:
    return all(getattr(type(trainer), name) is getattr(Trainer, name) for name in _LOADER)


def _reads_padding(model: Any, fillers: frozenset[int]) -> bool:  # noqa: ANN401
    """Return whether a classifier may read a column of padding, with these ids, as a sample's last token."""
    text = model.config.get_text_config() if hasattr(model, "config") else None
    is_classifier = type(without_adapters(model)).__name__.endswith("ForSequenceClassification")
    return is_classifier and bool(fillers - {getattr(text, "pad_token_id", None)})


def _is_known(trainer: TrainerCheckpoints) -> bool:
    """Return whether the model, with all its modules, and its loss are of transformers, of which it is known whether
    they depend on padding.
    """
    of_transformers = type(without_adapters(trainer.model)).__module__.startswith("transformers.models.")
    others = {type(module).__module__.partition(".")[0] for module in trainer.model.modules()} - _KNOWN
    return has_stock_loss(trainer) and of_transformers and not others


def _global_batch_size(args: TrainingArguments, started_with: int | None) -> int:
    """Return the samples of a step by the arguments; a restart, which may have fewer processes, keeps those of the
    first start.
    """
    given = samples_of_step(args)
    if started_with is None or started_with == given or started_with % args.world_size:
        return given
    warn(
        args,
        "This restart keeps the global batch of %d samples that training began with; the arguments make %d.",
        started_with,
        given,
    )
    return started_with


def _batches(
    trainer: TrainerCheckpoints, config: OSDPConfig, loader: DataLoader[Any] | None
) -> tuple[Inputs | None, int]:
    """Return the batches that the data gives (None if they cannot be read from it), and the tokens of a row.

    Collective.
    """
    if config.inputs is not None:
        return config.inputs, config.sequence_length or tokens_of(config.inputs(1)) or 1
    evaluated = trainer.eval_dataset
    evaluated = next(iter(evaluated.values()), None) if isinstance(evaluated, dict) else evaluated
    if loader is not None and loader.collate_fn is not None:
        found = find_batches(loader.dataset, loader.collate_fn)
    else:
        several = config.micro_batch_size != 1 and samples_of_step(trainer.args) > trainer.args.world_size
        found = find_batches(
            *_rows_and_collator(trainer, trainer.train_dataset), mixes=several and _loads_as_stock(trainer)
        ) or find_batches(*_rows_and_collator(trainer, evaluated))
    batch = None if found is None else found(1)
    rows = found if isinstance(batch, Mapping) else None
    if isinstance(batch, Mapping) and trainer.train_dataset is not None:
        _refuse_missing_labels(trainer, batch)
    made_in_step = None if found is None or rows is not None else _tokens_to_generate(trainer, found.sample)
    length = row_tokens(made_in_step if rows is None else rows.tokens or 1, config.sequence_length)
    if length is None:
        raise ValueError("The sequence length cannot be read from the dataset; set OSDPConfig(sequence_length=...).")
    if rows is not None:
        if config.sequence_length is None and not rows.is_whole and rows.tokens:
            warn(
                trainer.args,
                "Planned for %d tokens, the longest of the %d samples that were read; if the data has longer ones, set"
                " OSDPConfig(sequence_length=...).", length, rows.seen,
            )  # fmt: skip
        return rows.with_rows(length), length
    if found is not None:
        warn(
            trainer.args,
            "%s makes its batches inside the step; the estimate covers the model's own loss and the memory of"
            " generation, not its time, nor the memory of other work. Lower memory_limit to leave room.",
            type(trainer).__name__,
        )  # fmt: skip
    return None, length


def _refuse_missing_labels(trainer: TrainerCheckpoints, batch: Mapping[str, Any]) -> None:
    """Refuse batches without labels where a model of transformers would return no loss, as the first step would."""
    cls = type(without_adapters(trainer.model))
    names = find_labels(cls) if cls.__module__.startswith("transformers.") and not can_return_loss(cls) else []
    if has_stock_loss(trainer) and names and not any(name in batch for name in names):
        raise ValueError(
            f"Batches have {', '.join(batch)} and none of {', '.join(names)}, so that {cls.__name__} returns no loss;"
            " let the dataset or the collator give labels."
        )


def _rows_and_collator(trainer: TrainerCheckpoints, dataset: Any) -> tuple[Any, Any]:  # noqa: ANN401  of any library
    """Return a dataset with the columns that the Trainer keeps, and the collator for its rows."""
    if type(trainer).get_train_dataloader is not Trainer.get_train_dataloader:
        return dataset, trainer.data_collator
    datasets = sys.modules.get("datasets")  # not imported: the dataset is not one of its class
    if datasets is not None and isinstance(dataset, datasets.Dataset):
        return trainer._remove_unused_columns(dataset), trainer.data_collator
    return dataset, trainer._get_collator_with_removed_columns(trainer.data_collator)


def _tokens_to_generate(trainer: TrainerCheckpoints, sample: object) -> int | None:
    """Return the tokens of a prompt plus its completion, for TRL's online trainers; None for others."""
    completion: int | None = getattr(trainer.args, "max_completion_length", None)
    tokenizer: Any = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    if completion is None or tokenizer is None or not isinstance(sample, Mapping) or "prompt" not in sample:
        return None
    return completion + len(tokenizer(str(sample["prompt"]))["input_ids"])


def _optimizer_facts(trainer: TrainerCheckpoints) -> tuple[OptimizerSpec, str | None]:
    """Return what the optimizer will hold, and why it may not step unit by unit; None if it may."""
    device_type, made, given = trainer.args.device.type, trainer.optimizer, trainer.optimizer_cls_and_kwargs
    name = OptimizerNames(trainer.args.optim).value
    if made is not None:
        return spec_of_optimizer(made, device_type=device_type), reason_against_unit_steps(made)
    if given is None and knows_trainer_name(name):
        return spec_of_trainer_name(name, device_type=device_type), None
    spec = spec_of_optimizer(_tiny_optimizer(trainer, name), device_type=device_type)
    if given is not None and given[1].get("optim_bits") == 8:  # as transformers' `create_optimizer` does
        spec = replace(spec, keeps_embeddings=True)
    return spec, f"the optimizer of optim={name!r} may keep state that all its parameters share"


def _tiny_optimizer(trainer: TrainerCheckpoints, name: str) -> torch.optim.Optimizer:
    """Return the Trainer's optimizer, from its `optimizer_cls_and_kwargs` or else from its arguments, over one
    element.
    """
    given = trainer.optimizer_cls_and_kwargs
    try:
        cls, options = given or trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"optim={name!r} cannot be made: {one_line(error).rstrip('.')}; do so, or use adamw_torch."
        ) from None
    return cast("torch.optim.Optimizer", cls([nn.Parameter(torch.zeros(1))], **options))


def refuse_changes(args: TrainingArguments, run: PlannedRun, planned_samples: int) -> None:
    """Refuse a number of samples other than the plan's, and micro-batches that were planned without the training."""
    plan, asked, samples = run.plan, args.per_device_train_batch_size, samples_of_step(args)
    refuse_first({
        f"This Trainer was planned to evaluate, since it had no train_dataset, with {plan.micro_batch_size} samples at"
        f" once, and the arguments train {asked}: make another Trainer with train_dataset to train.":
            not run.trains and planned_arguments(args, plan.micro_batch_size, 1)["per_device_train_batch_size"]
            != asked,
        f"The Trainer's arguments now make {samples} samples per step, but the plan was made for {planned_samples};"
        " set batch sizes before it is made.": samples != planned_samples,
    })  # fmt: skip
