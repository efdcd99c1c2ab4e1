"""What a training consists of, as short texts by name: compared between ranks before a run, and between save and
resume (`docs/fault_tolerance.md`, a run's identity).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from .quantized import layers_in_4_bits

_SHOWN = 120
"""Longer texts are shown by their beginning and a checksum."""
_SAYS_NOTHING = ("architectures", "dtype", "transformers_version", "use_cache")
"""Entries of configurations that saving writes or that do not change training, as those that begin with `_`."""
_NOT_COMPARED = ("params", "initial_lr", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")
"""Entries of an optimizer's groups that are no arguments of its update."""
DTYPES, _ADAPTER = "dtypes of parameters", "adapter "
_ADAPTERS_SAY_NOTHING = (
    "auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "init_weights", "peft_version",
    "rank_pattern", "revision", "runtime_config", "task_type",
)  # fmt: skip
"""Entries of adapters' configurations that do not change what equal weights compute; AdaLora changes its ranks."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLAIN = (bool, int, float, str, tuple, list, type(None))


def model_texts(model: nn.Module) -> dict[str, str]:
    """Return what may change what equal weights compute: the entries of a model's configuration, such as `n_head`, and
    of its adapters', and the dtypes of its parameters.
    """
    packed = {id(layer.weight) for layer in layers_in_4_bits(model)}
    dtypes = {str(p.dtype) for p in model.parameters() if p.is_floating_point() and id(p) not in packed}
    texts = {**_configuration_texts(model), DTYPES: " and ".join(sorted(dtypes))}
    for adapter, config in getattr(model, "peft_config", {}).items():
        for name, value in config.to_dict().items():
            if name not in _ADAPTERS_SAY_NOTHING:
                plain = sorted({str(one) for one in value}) if isinstance(value, (list, set, tuple)) else value
                texts[f"{_ADAPTER}{adapter}'s {name}"] = _short(plain)
    return texts


def is_of_weights(name: str) -> bool:
    """Return whether a difference in one of `model_texts` is refused: weights would be rounded, or adapters would
    compute something else.
    """
    return name == DTYPES or name.startswith(_ADAPTER)


def _configuration_texts(model: nn.Module) -> dict[str, str]:
    """Return the entries of a model's configuration."""
    config: Any = getattr(model, "config", None)
    entries = config.to_dict() if hasattr(config, "to_dict") else config
    if is_dataclass(config) and not isinstance(config, type):
        entries = asdict(config)
    if not isinstance(entries, Mapping):
        return {}
    kept = {str(name): value for name, value in entries.items() if name not in _SAYS_NOTHING}
    return {name: _short(value) for name, value in kept.items() if not name.startswith("_")}


def holds_datasets(dataset: object) -> bool:
    """Return whether a dataset is several of the library `datasets` by name."""
    return isinstance(dataset, Mapping) and all(hasattr(one, "column_names") for one in dataset.values())


def dataset_text(dataset: Any) -> str:  # noqa: ANN401  # anything that a DataLoader accepts
    """Return a text that tells datasets of other sizes apart; empty without a size."""
    if holds_datasets(dataset):
        return ", ".join(f"{name} {dataset_text(one)}" for name, one in dataset.items())
    try:
        return f"of {len(dataset)} rows"
    except TypeError:
        return ""


def optimizer_texts(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return an optimizer's arguments by name, such as `lr`, over its groups; rates are those before any schedule."""
    texts: dict[str, list[object]] = {}
    for group in optimizer.param_groups:
        for name, value in group.items():
            given = group.get("initial_lr", value) if name == "lr" else value
            plain = given.item() if torch.is_tensor(given) and given.numel() == 1 else given
            if name not in _NOT_COMPARED and isinstance(plain, _PLAIN) and plain not in texts.setdefault(name, []):
                texts[name].append(plain)
    return {name: _short(values[0] if len(values) == 1 else values) for name, values in texts.items()}


def schedule_text(scheduler: object) -> str:
    """Return a scheduler's type and arguments; of functions only those that `functools.partial` has bound."""
    state = vars(scheduler) if isinstance(scheduler, LRScheduler) else {}
    given = {
        name: value
        for name, value in state.items()
        if not name.startswith("_") and name not in ("last_epoch", "base_lrs") and isinstance(value, _PLAIN)
    }
    for one in state.get("lr_lambdas", ()):
        given |= one.keywords if isinstance(one, partial) else {}
    given.pop("lr_lambdas", None)
    return f"{type(scheduler).__name__} {_short(given)}"


def _short(value: object) -> str:
    text = text_of(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({zlib.crc32(text.encode()):08x})"


def text_of(value: object) -> str:
    """Return a value as Python prints it, the same in every process: of a model, its modules with their options."""
    return _ADDRESS.sub("", repr(value))
