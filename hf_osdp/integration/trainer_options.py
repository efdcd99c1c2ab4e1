"""Where the Trainer's arguments and OSDP meet: what asks for it, what goes on to the plugin, what cannot be planned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from .config import OSDPConfig
from .launch import launch_request

_PLUGIN_OPTIONS = ("cpu_offload", "cpu_ram_efficient_loading", "state_dict_type", "activation_checkpointing")
"""What of `TrainingArguments.fsdp_config` OSDP passes on; the rest is for the plan to decide."""


def asked_config(osdp: OSDPConfig | Mapping[str, object] | bool | None, args: TrainingArguments | None) -> OSDPConfig | None:
    """What was asked for: by the argument, else by `fsdp_config`, else by the launcher.

    Args:
        osdp: the Trainer's argument.
        args: the training arguments, whose `fsdp_config` may hold `osdp`.

    Returns:
        The configuration, or None for the stock Trainer.

    Raises:
        ValueError: an option cannot be read.
    """
    if osdp is False:
        return None
    if isinstance(osdp, OSDPConfig):
        return osdp
    if isinstance(osdp, Mapping):
        return OSDPConfig.from_options(osdp)
    if osdp not in (None, True):
        raise ValueError(f"osdp={osdp!r} is a {type(osdp).__name__}; use True, False, an OSDPConfig or a mapping of its fields.")
    options = _fsdp_config(args).get("osdp")
    if options is None or options is True:
        request = launch_request()
        if request is not None:
            return OSDPConfig.from_options(request.options)
        return OSDPConfig() if osdp or options else None
    if options is False:
        return OSDPConfig() if osdp else None
    if not isinstance(options, Mapping):
        raise ValueError(f"fsdp_config has osdp={options!r}; use true, false or a mapping of options.")
    return OSDPConfig.from_options(options)


def plugin_options(args: TrainingArguments) -> dict[str, Any]:
    """Fields of the plugin that the training arguments set."""
    stated = {**(args.fsdp_plugin_args or {})}
    if not args.fsdp:
        stated.update({name: value for name, value in _fsdp_config(args).items() if name in _PLUGIN_OPTIONS})
    return {name: stated[name] for name in _PLUGIN_OPTIONS if name in stated}


def refuse_unplanned(given: Mapping[str, Any]) -> None:
    """Refuse what a plan made beforehand cannot know.

    Args:
        given: the Trainer's arguments by name.

    Raises:
        ValueError: for `model_init`, `auto_find_batch_size`, DeepSpeed or torch.compile.
    """
    args: TrainingArguments | None = given.get("args")
    if given.get("model") is None:
        raise ValueError("OSDP plans for one model when the Trainer is made; pass model=... instead of model_init.")
    if args is None:
        return
    if args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size=True changes batch sizes after planning; leave it out, the planner chooses the micro-batch.")
    if args.deepspeed:
        raise ValueError("deepspeed and OSDP both decide how the model is sharded; leave one of them out.")
    if args.torch_compile:
        raise ValueError("torch_compile=True is not planned for yet; leave it out.")


def _fsdp_config(args: TrainingArguments | None) -> dict[str, Any]:
    """`TrainingArguments.fsdp_config` as a dict; with `fsdp` unset, transformers leaves the path of a file unread."""
    config = None if args is None else args.fsdp_config
    if isinstance(config, str):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"fsdp_config={config!r} cannot be read ({error}); give a JSON file or a dict.") from None
    return {str(name).removeprefix("fsdp_"): value for name, value in (config or {}).items()}
