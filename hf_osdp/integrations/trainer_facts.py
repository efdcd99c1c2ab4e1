"""Read the facts that planning needs from a Trainer's arguments, data and loss; refuse options that a plan cannot follow."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import sys
from collections.abc import Mapping, Sized
from dataclasses import fields, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import SaveStrategy
from transformers.training_args import OptimizerNames

from ..checkpoint.resume import recorded_manifest
from ..modeling.batch import Inputs, without_adapters
from ..modeling.wrapping import has_running_statistics
from ..planner.job import OptimizerSpec, Precision
from ..planner.plan import Plan
from ..planning.config import OSDPConfig, merged_config, stated_options
from ..planning.facts import RunFacts, RunFolder
from ..reading import read_json
from ..sharding.optimizer import frozen_parameters, knows_trainer_name, spec_of_optimizer, spec_of_trainer_name
from ..sharding.unit_steps import reason_against_unit_steps
from .launch import launch_request
from .plugin import offloads, refuse_decided, with_block_classes
from .samples import find_batches, row_tokens, tokens_of
from .subclasses import bytes_of_other_models, has_forward_of_transformers, ignores_item_count, traced_loss

_log = logging.getLogger(__name__)
_SINGLE_SAMPLE_LOSSES = ("SFTTrainer", "RewardTrainer")
"""Trainers whose own loss is a sum over tokens or samples, independent of which samples share a batch."""
_PLUGIN_OPTIONS = ("cpu_offload", "cpu_ram_efficient_loading", "state_dict_type", "activation_checkpointing")
"""Entries of `TrainingArguments.fsdp_config` that go to the plugin; the plan decides the rest."""
_ADDED_BY_TRANSFORMERS = ("min_num_params", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt")
"""Entries that transformers itself adds to `fsdp_config` with a value that turns them off."""
_STOCK_PACKAGES = ("transformers", "hf_osdp")
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
    optimizer = _optimizer_spec(trainer)
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
        optimizer=optimizer,
        optimizer_choices=_optimizer_choices(trainer, config, optimizer, None if manifest is None else manifest.settings.get("optimizer")),
        steps=_steps(trainer, samples),
        inputs=batches,
        loss=None if batches is None or config.inputs or model_makes_loss else traced_loss(trainer),
        other_models=bytes_of_other_models(trainer),
        clips_gradients=bool(args.max_grad_norm and args.max_grad_norm > 0),
        against_backward_step=reader_of_gradients(trainer),
        against_unit_steps=_against_unit_steps(trainer),
        activation_checkpointing=bool(args.gradient_checkpointing or plugin.activation_checkpointing),
        reads_loss_alone=model_makes_loss and not args.use_liger_kernel,
        cpu_offload=offloads(plugin),
        trains=trains,
        frozen_in_optimizer=frozen_parameters(trainer.optimizer),
        folder=trainer_folder(args, trainer.model) if trains else None,
    )


def _warn(args: TrainingArguments, line: str, *values: object) -> None:
    """Log a warning on rank 0."""
    if args.process_index == 0:
        _log.warning(line, *values)


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
    _warn(args, "This restart keeps the global batch of %d samples that training began with; the arguments make %d.", started_with, given)
    return started_with


def _micro_batch_size(trainer: Trainer, config: OSDPConfig) -> int | None:
    """Return the samples of a micro-batch if they were requested or the loss may depend on them; None lets the planner choose."""
    args, requested, coupling = trainer.args, config.micro_batch_size, batch_coupling(trainer)
    reason = coupling or _batch_count_dependence(trainer)
    if reason is None:
        return requested
    size: int = samples_of_step(args) // (args.gradient_accumulation_steps * args.world_size)
    if requested is None and config.plan is not None and coupling is None:
        _warn(args, "%s: a plan of other micro-batches than the %d samples of the arguments may train differently.", reason, size)
        return None
    if requested is None:
        _warn(args, "%s, so micro-batches stay at %d samples; set OSDPConfig(micro_batch_size=...) for another size.", reason, size)
    elif requested != size:
        _warn(args, "%s: micro_batch_size=%d may train differently than the %d samples of the arguments.", reason, requested, size)
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
        ("even_batches=False", not _accelerator_config(args).even_batches),
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
            _warn(
                trainer.args, "Planned for %d tokens, the longest of the %d samples that were read; if the data has longer ones, set"
                " OSDPConfig(sequence_length=...).", length, found.seen,
            )  # fmt: skip
        return found.with_rows(length), length
    if found is not None:
        _warn(
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


def _optimizer_choices(
    trainer: Trainer, config: OSDPConfig, optimizer: OptimizerSpec, started_with: str | None
) -> tuple[tuple[str, OptimizerSpec], ...]:
    """Return the candidate optimizers, by `optim` name with their specs; a restart keeps `started_with`, the one that training began with.

    Return no candidates if the optimizer exists already, or is made by other code than the Trainer's.
    """
    owner = next(cls for cls in type(trainer).__mro__ if "create_optimizer" in vars(cls))
    made = trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None
    if config.other_optimizers is None or made or owner.__module__.partition(".")[0] not in _STOCK_PACKAGES:
        return ()
    choices = {OptimizerNames(trainer.args.optim).value: optimizer}
    for name in config.other_optimizers:
        choices.setdefault(name, spec_of_trainer_name(name, device_type=trainer.args.device.type))
        _tiny_optimizer(trainer, name)
    kept = {name: spec for name, spec in choices.items() if started_with is None or spec.name == started_with.lower()}
    return tuple((kept or choices).items())


def reader_of_gradients(trainer: Trainer) -> str | None:
    """Return what may read gradients between backward and the end of the optimizer step; None if nothing does."""
    for callback in trainer.callback_handler.callbacks:
        for event in ("on_pre_optimizer_step", "on_optimizer_step"):
            if getattr(type(callback), event) is not getattr(TrainerCallback, event):
                return f"{type(callback).__name__}.{event} may read gradients"
    if type(trainer).training_step is not Trainer.training_step:
        return f"{type(trainer).__name__}.training_step may read gradients"
    if trainer.optimizer is not None and trainer.optimizer._optimizer_step_pre_hooks:
        return f"a hook of {type(trainer.optimizer).__name__}.step may read gradients"
    return None


def _against_unit_steps(trainer: Trainer) -> str | None:
    """Return why the optimizer may not step unit by unit; None if it may."""
    if trainer.optimizer is not None:
        return reason_against_unit_steps(trainer.optimizer)
    name = OptimizerNames(trainer.args.optim).value
    known = trainer.optimizer_cls_and_kwargs is None and knows_trainer_name(name)
    return None if known else f"the optimizer of optim={name!r} may keep state that all its parameters share"


def requested_config(
    osdp: OSDPConfig | Mapping[str, object] | bool | None, args: TrainingArguments | None, *, on_by_default: bool = False
) -> OSDPConfig | None:
    """Return the configuration merged from the Trainer's `osdp`, `fsdp_config` and the launcher; None for the stock Trainer.

    The first of these that sets it turns OSDP on or off, else `on_by_default` does; each option comes from the first that sets it.
    """
    if osdp is False:
        return None
    if osdp not in (None, True) and not isinstance(osdp, (OSDPConfig, Mapping)):
        raise ValueError(f"osdp={osdp!r} is of type {type(osdp).__name__}; use True, False, an OSDPConfig or a mapping of its fields.")
    fsdp_config = _fsdp_config(args)
    here, request = fsdp_config.get("osdp"), launch_request()
    if here is not None and not isinstance(here, (bool, Mapping)):
        raise ValueError(f"fsdp_config has osdp={here!r}; use true, false or a mapping of options.")
    launched = on_by_default if request.osdp is None else request.osdp
    if osdp is None and (here is False or (here is None and not launched)):
        return None
    _refuse_ignored(fsdp_config)
    compiles = {"compile": True} if args is not None and args.torch_compile else {}
    options = {**compiles, **stated_options(here if isinstance(here, Mapping) else None), **stated_options(None if osdp is True else osdp)}
    if compiles and options.get("compile") is False:
        raise ValueError("torch_compile=True contradicts compile=False in OSDP's options; leave one of the two out.")
    classes = fsdp_config.get("transformer_layer_cls_to_wrap")
    return merged_config(with_block_classes(options, classes, option="transformer_layer_cls_to_wrap"), request.options)


def _refuse_ignored(fsdp_config: Mapping[str, Any]) -> None:
    """Refuse entries of `fsdp_config` that would have no effect; accept those that transformers adds itself, if they are off."""
    if fsdp_config.get("version", 2) not in (2, "2"):
        raise ValueError(f"fsdp_config has version={fsdp_config['version']!r}, which cannot run a plan; leave it out or use 2.")
    set_here = {name: value for name, value in fsdp_config.items() if name not in _ADDED_BY_TRANSFORMERS or value not in (0, None)}
    refuse_decided(set_here)
    known = ("osdp", "version", "transformer_layer_cls_to_wrap", "auto_wrap_policy", *_PLUGIN_OPTIONS)
    for name, value in set_here.items():
        if name not in known and value is not None:
            raise ValueError(
                f"fsdp_config has {name}={value!r}, which has no effect under a plan; leave it out (allowed: {', '.join(known)}; options"
                " of OSDPConfig go into osdp)."
            )


def plugin_options(args: TrainingArguments) -> dict[str, Any]:
    stated = {**(args.fsdp_plugin_args or {}), **({} if args.fsdp else _fsdp_config(args))}
    return {name: stated[name] for name in _PLUGIN_OPTIONS if name in stated}


def copied_arguments(args: TrainingArguments) -> TrainingArguments:
    """Return a copy of the training arguments that the planner may change, with accelerator_config's `num_steps` merged in."""
    own = copy.copy(args)
    own.accelerator_config = copy.deepcopy(args.accelerator_config)
    steps = (_accelerator_config(own).gradient_accumulation_kwargs or {}).pop("num_steps", None)
    if steps is not None and args.gradient_accumulation_steps not in (1, steps):
        raise ValueError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} and num_steps={steps} of accelerator_config disagree;"
            " leave one of the two out."
        )
    own.gradient_accumulation_steps = steps or args.gradient_accumulation_steps
    own.torch_compile = False  # the plan decides which blocks to compile
    return own


def samples_of_step(args: TrainingArguments) -> int:
    """Return the samples of one optimizer step over all processes; `split_batches` divides each batch among them."""
    batch, splits = args.per_device_train_batch_size, _accelerator_config(args).split_batches
    if splits and batch % args.world_size:
        raise ValueError(
            f"split_batches=True cannot split batches of {batch} over {args.world_size} processes; use a per_device_train_batch_size"
            f" that is a multiple of {args.world_size}."
        )
    return batch * args.gradient_accumulation_steps * (1 if splits else args.world_size)


def set_batch(args: TrainingArguments, plan: Plan) -> None:
    """Write the plan's batch sizes into the Trainer's own arguments, multiplied for `split_batches` if it is set."""
    parts = args.world_size if _accelerator_config(args).split_batches else 1
    args.per_device_train_batch_size = plan.micro_batch_size * parts
    args.gradient_accumulation_steps = plan.accumulation_steps
    if args.auto_find_batch_size:
        _warn(
            args, "auto_find_batch_size=True was switched off: the plan sets %d samples at once on each process, which fit"
            " by its estimate.", plan.micro_batch_size,
        )  # fmt: skip
    args.auto_find_batch_size = False


def refuse_unsupported(given: Mapping[str, Any]) -> None:
    """Refuse Trainer arguments, by name, that a plan made beforehand cannot account for."""
    args: TrainingArguments | None = given.get("args")
    if given.get("model") is None:
        raise ValueError("OSDP plans for one model when the Trainer is made; pass model=... instead of model_init.")
    if args is None:
        return
    if args.deepspeed:
        raise ValueError("deepspeed and OSDP both decide how the model is sharded; leave one of them out.")
    if (full := next((name for name in ("bf16_full_eval", "fp16_full_eval") if getattr(args, name)), None)) and args.world_size > 1:
        raise ValueError(
            f"{full}=True converts the weights for evaluation, which FSDP2's shards do not allow; leave it out:"
            f" {full.partition('_')[0]}=True computes evaluations in that precision too."
        )


def copy_changes(own: TrainingArguments, given: TrainingArguments, before: dict[str, Any]) -> None:
    """Copy into the Trainer's own arguments each field of the `given` ones that has changed since `before`."""
    for field in fields(given):
        value = getattr(given, field.name)
        if value != before.get(field.name, value):
            setattr(own, field.name, value)
            before[field.name] = value


def refuse_changes(trainer: Trainer, config: OSDPConfig, plan: Plan) -> None:
    """Refuse a number of samples other than the plan's, and callbacks added after planning that would find no gradients."""
    if (samples := samples_of_step(trainer.args)) != plan.global_batch_size:
        raise ValueError(
            f"The Trainer's arguments now make {samples} samples per step, but the plan has {plan.global_batch_size}; set batch sizes"
            " before the Trainer is made."
        )
    in_backward = config.step_in_backward is None and any(unit.step_in_backward for unit in plan.units)
    if in_backward and (reason := reader_of_gradients(trainer)):
        raise ValueError(f"The plan steps in backward, but {reason}; pass it to the Trainer's constructor, or set step_in_backward=False.")


def _accelerator_config(args: TrainingArguments) -> AcceleratorConfig:
    assert isinstance(args.accelerator_config, AcceleratorConfig)
    return args.accelerator_config


def _fsdp_config(args: TrainingArguments | None) -> dict[str, Any]:
    """Return `TrainingArguments.fsdp_config` as a dict; transformers does not read it from a file unless `fsdp` is set."""
    config = None if args is None else args.fsdp_config
    if isinstance(config, str):
        path, config = config, read_json(config, "fsdp_config")
        if not isinstance(config, dict):
            raise ValueError(f"fsdp_config={path!r} holds a {type(config).__name__}; it must map option names to values.")
    return {str(name).removeprefix("fsdp_"): value for name, value in (config or {}).items()}
