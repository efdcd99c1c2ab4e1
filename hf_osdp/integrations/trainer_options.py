"""Options of OSDP in the Trainer's arguments: what switches it on, what the plugin gets, what cannot be planned."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from ..planner.plan import Plan
from ..planning.config import OSDPConfig, merged_config, stated_options
from ..reading import read_json
from .launch import launch_request
from .plugin import refuse_decided, with_block_classes

_PLUGIN_OPTIONS = ("cpu_offload", "cpu_ram_efficient_loading", "state_dict_type", "activation_checkpointing")
"""Entries of `TrainingArguments.fsdp_config` that go to the plugin; the plan decides the rest."""
_ADDED = ("min_num_params", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt")
"""Entries that transformers adds to `fsdp_config` itself, switched off."""

_MOST_BYTES = 2**20
"""Of a file of options."""

_log = logging.getLogger(__name__)


def asked_config(
    osdp: OSDPConfig | Mapping[str, object] | bool | None, args: TrainingArguments | None, *, unasked: bool = False
) -> OSDPConfig | None:
    """Return what was asked for: by the Trainer's argument, then by `fsdp_config`, then by the launcher; None for the stock Trainer.

    The first that says so switches it on or off, and each option comes from the first that sets it. `unasked`: on where none says so.
    """
    if osdp is False:
        return None
    if osdp not in (None, True) and not isinstance(osdp, (OSDPConfig, Mapping)):
        raise ValueError(f"osdp={osdp!r} is of type {type(osdp).__name__}; use True, False, an OSDPConfig or a mapping of its fields.")
    beside = _fsdp_config(args)
    here, request = beside.get("osdp"), launch_request()
    if here is not None and not isinstance(here, (bool, Mapping)):
        raise ValueError(f"fsdp_config has osdp={here!r}; use true, false or a mapping of options.")
    launched = unasked if request.osdp is None else request.osdp
    if osdp is None and (here is False or (here is None and not launched)):
        return None
    _refuse_ignored(beside)
    compiles = {"compile": True} if args is not None and args.torch_compile else {}
    near = {**compiles, **stated_options(here if isinstance(here, Mapping) else None), **stated_options(None if osdp is True else osdp)}
    if compiles and near.get("compile") is False:
        raise ValueError("torch_compile=True beside compile=False of OSDP's options: leave one of the two out.")
    classes = beside.get("transformer_layer_cls_to_wrap")
    return merged_config(with_block_classes(near, classes, option="transformer_layer_cls_to_wrap"), request.options)


def _refuse_ignored(beside: Mapping[str, Any]) -> None:
    """Refuse entries of `fsdp_config` that would have no effect; those that transformers adds itself, switched off, are accepted."""
    if beside.get("version", 2) not in (2, "2"):
        raise ValueError(f"fsdp_config has version={beside['version']!r}, which cannot run a plan; leave it out or use 2.")
    set_here = {name: value for name, value in beside.items() if name not in _ADDED or value not in (0, None)}
    refuse_decided(set_here)
    known = ("osdp", "version", "transformer_layer_cls_to_wrap", "auto_wrap_policy", *_PLUGIN_OPTIONS)
    for name, value in set_here.items():
        if name not in known and value is not None:
            raise ValueError(
                f"fsdp_config has {name}={value!r}, which has no effect under a plan; leave it out (known are {', '.join(known)}; options"
                " of OSDPConfig go into osdp)."
            )


def plugin_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the fields of the plugin that the training arguments set."""
    stated = {**(args.fsdp_plugin_args or {})}
    if not args.fsdp:
        stated.update({name: value for name, value in _fsdp_config(args).items() if name in _PLUGIN_OPTIONS})
    return {name: stated[name] for name in _PLUGIN_OPTIONS if name in stated}


def own_arguments(args: TrainingArguments) -> TrainingArguments:
    """Return a copy of the training arguments that the planner may write into, with one number of accumulation steps in it."""
    own = copy.copy(args)
    own.accelerator_config = copy.deepcopy(args.accelerator_config)
    steps = (_accelerator_config(own).gradient_accumulation_kwargs or {}).pop("num_steps", None)
    if steps is not None and args.gradient_accumulation_steps not in (1, steps):
        raise ValueError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} and num_steps={steps} of accelerator_config were both given;"
            " leave one of the two out."
        )
    own.gradient_accumulation_steps = steps or args.gradient_accumulation_steps
    own.torch_compile = False  # the plan has it, by block
    return own


def samples_of_step(args: TrainingArguments) -> int:
    """Return the samples of one optimizer step over all processes; `split_batches` divides each batch among them."""
    batch, splits = args.per_device_train_batch_size, _accelerator_config(args).split_batches
    if splits and batch % args.world_size:
        raise ValueError(
            f"split_batches=True splits batches of {batch} over {args.world_size} processes; use a per_device_train_batch_size that"
            f" {args.world_size} divides."
        )
    return batch * args.gradient_accumulation_steps * (1 if splits else args.world_size)


def set_batch(args: TrainingArguments, plan: Plan) -> None:
    """Write the plan's batch sizes into the Trainer's own arguments, as `split_batches` needs them."""
    parts = args.world_size if _accelerator_config(args).split_batches else 1
    args.per_device_train_batch_size = plan.micro_batch_size * parts
    args.gradient_accumulation_steps = plan.accumulation_steps
    if args.auto_find_batch_size and args.process_index == 0:
        _log.warning(
            "auto_find_batch_size=True was switched off: the plan has the batch size, %d samples at once on each process, which fits by its"
            " estimate.",
            plan.micro_batch_size,
        )
    args.auto_find_batch_size = False


def refuse_unplanned(given: Mapping[str, Any]) -> None:
    """Refuse arguments of a Trainer, by name, that a plan made beforehand cannot take into account."""
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


def _accelerator_config(args: TrainingArguments) -> AcceleratorConfig:
    assert isinstance(args.accelerator_config, AcceleratorConfig)
    return args.accelerator_config


def _fsdp_config(args: TrainingArguments | None) -> dict[str, Any]:
    """Return `TrainingArguments.fsdp_config` as a dict; with `fsdp` unset, transformers leaves the path of a file unread."""
    config = None if args is None else args.fsdp_config
    if isinstance(config, str):
        path, config = config, read_json(config, "fsdp_config", limit_bytes=_MOST_BYTES)
        if not isinstance(config, dict):
            raise ValueError(f"fsdp_config={path!r} holds a {type(config).__name__}; it must map option names to values.")
    return {str(name).removeprefix("fsdp_"): value for name, value in (config or {}).items()}
