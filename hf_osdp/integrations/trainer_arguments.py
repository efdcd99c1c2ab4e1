"""Arguments of a Trainer: what they ask for, what a plan refuses, and what they are under a plan."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from ..errors import refuse_first, shown
from ..preparation.config import OSDPConfig, stated_options
from ..reading import read_json
from .launch import launch_request
from .plugin import TAKEN, OSDPPlugin, compiled_modules, refuse_decided

_log = logging.getLogger(__name__)
_ADDED_BY_TRANSFORMERS = {
    **dict.fromkeys(("min_num_params", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"), 0), "reshard_after_forward": True,
}  # fmt: skip
"""Entries that transformers itself adds to `fsdp_config`, for `fsdp="full_shard"` too, with values that ask for
nothing.
"""


def warn(args: TrainingArguments, line: str, *values: object) -> None:
    """Log a warning on rank 0."""
    if args.process_index == 0:
        _log.warning(line, *values)


def requested_options(
    osdp: OSDPConfig | Mapping[str, object] | bool | None,
    args: TrainingArguments | None,
    *,
    on_by_default: bool = False,
) -> dict[str, object] | None:
    """Return the options that the Trainer's `osdp` and `fsdp_config` set, for `OSDPPlugin`, which adds those of the
    launcher; None for the stock Trainer.

    The first of the three that sets it turns OSDP on or off, else `on_by_default` does; each option comes from the
    first that sets it.
    """
    if osdp is False:
        return None
    fsdp_config = _fsdp_config(args)
    here, launched = fsdp_config.get("osdp"), launch_request().osdp
    refuse_first({
        f"osdp={shown(osdp)} is of type {type(osdp).__name__}; use True, False, an OSDPConfig or a mapping of its"
        " fields.": osdp not in (None, True) and not isinstance(osdp, (OSDPConfig, Mapping)),
        f"fsdp_config has osdp={shown(here)}; use true, false or a mapping of options.":
            here is not None and not isinstance(here, (bool, Mapping)),
    })  # fmt: skip
    if osdp is None and (here is False or (here is None and not (on_by_default if launched is None else launched))):
        return None
    _refuse_ignored(fsdp_config)
    places = (place for place in (here, osdp) if not isinstance(place, bool))
    options = {name: value for place in places for name, value in stated_options(place).items()}
    if args is not None and args.torch_compile and options.get("compile") is False:
        raise ValueError("torch_compile=True contradicts compile=False in OSDP's options; leave one of the two out.")
    return options


def _refuse_ignored(fsdp_config: Mapping[str, Any]) -> None:
    """Refuse entries of `fsdp_config` that would have no effect; accept those that transformers adds itself."""
    if fsdp_config.get("version", 2) not in (2, "2"):
        raise ValueError(
            f"fsdp_config has version={fsdp_config['version']!r}, which cannot run a plan; leave it out or use 2."
        )
    set_here = {
        name: value
        for name, value in fsdp_config.items()
        if name not in _ADDED_BY_TRANSFORMERS or value not in (_ADDED_BY_TRANSFORMERS[name], None)
    }
    refuse_decided(set_here)
    known = ("osdp", "version", "auto_wrap_policy", *TAKEN)
    refuse_first({
        f"fsdp_config has {name}={shown(value)}, which has no effect under a plan; leave it out (allowed:"
        f" {', '.join(known)}; options of OSDPConfig go into osdp).": name not in known and value is not None
        for name, value in set_here.items()
    })  # fmt: skip


def requested_plugin(
    osdp: OSDPConfig | Mapping[str, object] | bool | None,
    args: TrainingArguments,
    model: nn.Module | None,
    *,
    on_by_default: bool,
) -> OSDPPlugin | None:
    """Return the plugin with all that a Trainer is given, or refuse what no plan can be made for; None for the stock
    Trainer.
    """
    options = requested_options(osdp, args, on_by_default=on_by_default)
    if options is None:
        return None
    refuse_unsupported(args, model)
    return OSDPPlugin(osdp=options, **plugin_options(args))


def plugin_options(args: TrainingArguments) -> dict[str, Any]:
    stated = {**(args.fsdp_plugin_args or {}), **({} if args.fsdp else _fsdp_config(args))}
    return {name: stated[name] for name in TAKEN if name in stated}


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


def refuse_unsupported(args: TrainingArguments, model: nn.Module | None) -> None:
    """Refuse what a Trainer is given for which no plan can be made beforehand."""
    full = next((name for name in ("bf16_full_eval", "fp16_full_eval") if getattr(args, name)), "")
    refuse_first({
        "OSDP plans for one model; pass model=... instead of model_init.": model is None,
        "deepspeed and OSDP both decide how the model is sharded; leave one of them out.": args.deepspeed,
        f"{full}=True converts the weights for evaluation, which FSDP2's shards do not allow; leave it out:"
        f" {full.partition('_')[0]}=True computes evaluations in that precision too.":
            full and args.world_size > 1,
        "The Trainer was given torch.compile(model); give it the model itself, and torch_compile=True in its"
        " arguments.": model is not None and compiled_modules(model),
    })  # fmt: skip


def _fsdp_config(args: TrainingArguments | None) -> dict[str, Any]:
    """Return `TrainingArguments.fsdp_config` as a dict; transformers does not read it from a file unless `fsdp` is
    set.
    """
    config = None if args is None else args.fsdp_config
    if isinstance(config, str):
        path, config = config, read_json(config, "fsdp_config")
        if not isinstance(config, dict):
            raise ValueError(
                f"fsdp_config={path!r} holds a {type(config).__name__}; it must map option names to values."
            )
    return {str(name).removeprefix("fsdp_"): value for name, value in (config or {}).items()}
