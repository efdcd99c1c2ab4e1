"""Take over what a script, the Trainer or Accelerate asks of a model's blocks: `torch.compile`."""

from __future__ import annotations

import logging
import sys
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import nn

from ..preparation.config import OSDPConfig

if TYPE_CHECKING:  # imports peft and bitsandbytes, after which `notebook_launcher` refuses to start
    from transformers import TrainingArguments

_log = logging.getLogger(__name__)


def unwrapped(model: nn.Module, config: OSDPConfig) -> tuple[nn.Module, OSDPConfig]:
    """Return a model without the wrappers of `torch.compile(module)`, around itself or its modules, and the
    configuration, which compiles blocks if there were any.

    Names of parameters below a wrapper begin with `_orig_mod.`, also in saved files, which `from_pretrained` would not
    find.

    Raises:
        ValueError: a wrapper has another backend than Inductor, or the plan is given.
    """
    dynamo = sys.modules.get("torch._dynamo")  # without it nothing is wrapped
    wrappers = {m for m in model.modules() if isinstance(m, dynamo.OptimizedModule)} if dynamo is not None else set()
    if not wrappers:
        return model, config
    if any(wrapper.get_compiler_config() is None for wrapper in wrappers):
        raise ValueError(
            "torch.compile(model) with a backend other than inductor cannot be planned; use inductor, or leave it out."
        )
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child in wrappers:
                module._modules[name] = child._orig_mod  # type: ignore[union-attr, assignment]
    _log.warning(
        "torch.compile(model) was taken off, and the plan compiles the blocks with Inductor's defaults; its mode,"
        " fullgraph, dynamic"
        " and options are not used. Leave torch.compile out and set OSDPConfig(compile=True) instead."
    )
    plain: nn.Module = model._orig_mod if model in wrappers else model  # type: ignore[assignment]
    return plain, _compiling(config)


def with_arguments(options: dict[str, object], args: TrainingArguments | None) -> dict[str, object]:
    """Return options with what training arguments ask of the blocks; raise ValueError if the two contradict."""
    if args is None or not args.torch_compile:
        return options
    if options.get("compile") is False:
        raise ValueError("torch_compile=True contradicts compile=False in OSDP's options; leave one of the two out.")
    return {"compile": True, **options}


def with_dynamo(config: OSDPConfig, state: AcceleratorState) -> OSDPConfig:
    """Let the plan compile blocks if dynamo was requested; Accelerate would compile the whole model."""
    dynamo = state.dynamo_plugin
    if dynamo.backend == DynamoBackend.NO or dynamo.disable:
        return config
    stock = {"backend": "inductor", "mode": "default", "fullgraph": False, "dynamic": None, "options": None}
    asked = {
        "backend": dynamo.backend.value.lower(), "mode": dynamo.mode or "default", "fullgraph": bool(dynamo.fullgraph),
        "dynamic": dynamo.dynamic, "options": dynamo.options or None,
    }  # fmt: skip
    if refused := [f"{name}={value!r}" for name, value in asked.items() if value != stock[name]]:
        raise ValueError(
            f"torch.compile with {', '.join(refused)} cannot be planned; use inductor with its defaults, or leave it"
            " out."
        )
    return _compiling(config)


def without_dynamo(state: AcceleratorState) -> AcceleratorState:
    """Return a state with which Accelerate does not compile the model; all accelerators share the given one."""
    own = copy(state)
    own.dynamo_plugin = TorchDynamoPlugin(backend="no")
    return own


def _compiling(config: OSDPConfig) -> OSDPConfig:
    return replace(config, compile=True)
