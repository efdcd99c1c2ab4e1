"""Tiny models of many architectures, in sizes of tiny.yaml, and their batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import nn

from hf_osdp.modeling.batch import training_batch
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.description import UnitDescription
from hf_osdp.tracing.describe import describe

from .training import Batches

TOKENS = 12
SAMPLES = 4
"""Samples of one optimizer step, over all ranks."""

_SIZES = yaml.safe_load(Path(__file__).with_name("tiny.yaml").read_text(encoding="utf-8"))
TINY: dict[str, dict[str, Any]] = _SIZES["architectures"]
VISION: dict[str, dict[str, Any]] = _SIZES["vision"]
OTHERS: dict[str, dict[str, Any]] = _SIZES["others"]
BLOCK_CLASSES = {"AlbertForMaskedLM": ("AlbertLayer",)}
"""Where blocks are not found by themselves."""


def tiny_config(name: str, **changes: Any) -> Any:
    """The configuration of a tiny model."""
    return getattr(transformers, name).config_class(**{**TINY[name], **changes})


def tiny_architecture(name: str, **changes: Any) -> nn.Module:
    """The same weights at each call, in float64."""
    torch.manual_seed(0)
    config = tiny_config(name, **changes)
    model = getattr(transformers, name)._from_config(config, experts_implementation="eager")  # others have no float64
    return model.to(torch.float64).train()


def tiny_vision(name: str) -> nn.Module:
    """A vision-language model, with the same weights at each call, in float64."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    config = cls.config_class(**VISION[name])
    config._experts_implementation = "eager"  # the usual one has no float64
    model: nn.Module = cls._from_config(config).double().train().requires_grad_()
    for parameter in model.parameters():  # some gates and projections start as zeros
        parameter.data += 0.02 * torch.randn(parameter.shape, dtype=torch.float64)
    return model


@contextmanager
def no_float32() -> Iterator[None]:
    """Where Gemma's norm asks for float32, in which sums depend on their order in the 8th digit, it gets float64."""
    stock = torch.Tensor.float  # positions stay as they are
    torch.Tensor.float = lambda tensor: tensor.double() if tensor.is_floating_point() else stock(tensor)
    try:
        yield
    finally:
        torch.Tensor.float = stock


def batch_of(model: nn.Module, step: int, *, part: int = 0, parts: int = 1) -> dict[str, Any]:
    """Part `part` of `parts` of the samples of a step, with random content."""
    generator = torch.Generator().manual_seed(1000 + step)
    size = SAMPLES // parts

    def filled(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if name == "attention_mask":
            return value[:size]
        if value.is_floating_point():
            value = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        else:
            classes = getattr(model.config, "vocab_size", 100) if value.dim() > 1 else model.config.num_labels
            value = torch.randint(0, classes, value.shape, generator=generator)
        return value[part * size : (part + 1) * size]

    return {name: filled(name, value) for name, value in training_batch(model, TOKENS)(SAMPLES).items()}


def loss_of(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Mean cross-entropy in float64: the losses inside transformers go through float32."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return nn.functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())


def units_of(model: nn.Module) -> tuple[UnitDescription, ...]:
    """The model's units as described; a trace, which takes seconds, tells only which of them run several times."""
    classes = BLOCK_CLASSES.get(type(model).__name__)
    if classes is None:
        return find_units(model)
    return describe(model, sequence_length=TOKENS, block_classes=classes, recomputation=False).units


def batches_of(model: nn.Module) -> Batches:
    """Return batches, of which the first part alone moves batch norm's running statistics: rank 0's are saved."""

    def batch(step: int, *, part: int = 0, parts: int = 1) -> dict[str, Any]:
        for module in model.modules():
            if hasattr(module, "track_running_stats"):
                module.track_running_stats = part == 0
        return batch_of(model, step, part=part, parts=parts)

    return batch
