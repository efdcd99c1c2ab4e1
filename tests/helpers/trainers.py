"""Trainers of tiny models on the CPU, ours or others', and rows for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from hf_osdp.integrations.trainer import Trainer
from tests.helpers.models import tiny_model


def token_rows(
    count: int = 8, length: int = 12, *, vocabulary: int = 61, label: Any = torch.clone
) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, vocabulary, (count, length), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": label(row)} for row in ids]


def small_arguments(folder: object, kind: type = TrainingArguments, **options: Any) -> Any:
    small = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "per_device_train_batch_size": 2}
    return kind(str(folder), **{**small, **options})


def small_trainer(
    folder: object, kind: type = Trainer, model: nn.Module | None = None, *, arguments: Mapping[str, Any] = {},
    **given: Any,
) -> Any:  # fmt: skip
    """A Trainer of one step; ours plans for a CPU of a preset, with the options `osdp`."""
    if issubclass(kind, Trainer):
        given["osdp"] = {"memory_limit": "1GiB", "hardware": "cpu", **given.get("osdp", {})}
    args = given.pop("args", None) or small_arguments(folder, **{"max_steps": 1, **arguments})
    return kind(model=tiny_model("gpt2", layers=1) if model is None else model, args=args, **given)
