"""Run a Trainer's evaluation as it fits: its batches in parts, its outputs moved in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from transformers import Trainer as StockTrainer

from ..errors import OSDPError
from ..modeling.activations import tensors_of
from ..modeling.replaced import replaced
from ..preparation.evaluation import FittedEvaluation
from ..sharding.micro_batches import micro_batches
from .trainer_evaluation import evaluation_loop

Predicted = tuple[torch.Tensor | None, Any, Any]
"""Loss, outputs and labels of a batch."""


@contextmanager
def evaluating(
    trainer: StockTrainer, fitted: FittedEvaluation | None, loader: DataLoader[Any], *, keeps: bool
) -> Iterator[None]:
    """Let the Trainer evaluate this loader as it fits in this context; raise PreflightError if it does not."""
    args, data = trainer.args, getattr(loader, "dataset", None)
    if fitted is None or (keeps and not fitted.loop.keeps_outputs):  # then nothing is known of the outputs
        yield
        return
    asked = evaluation_loop(args, len(data) if isinstance(data, Sized) else None, keeps=keeps)
    asked = replace(asked, generation=fitted.loop.generation if keeps else None)
    now = fitted.of(asked)
    moved = args.eval_accumulation_steps if now.loop.moved_after == asked.moved_after else now.loop.moved_after
    with replaced(args, eval_accumulation_steps=moved), replaced(trainer, _evaluation=now):
        yield


def predict_in_parts(
    trainer: StockTrainer, step: Callable[..., Predicted], inputs: dict[str, Any], fitted: FittedEvaluation
) -> Predicted:
    """Return what a prediction step returns for a batch, from parts of it that fit. Collective.

    Losses of the parts are divided by the items of the whole batch and added, or weigh by their samples.
    """
    size, averages = fitted.loop.micro_batch_size, fitted.asked.averages
    try:
        parts = micro_batches([inputs], size, averages=averages) if size < fitted.loop.batch_size else []
    except OSDPError:  # on all ranks: this batch cannot be cut
        parts = []
    if len(parts) < 2:
        return step(inputs=inputs)
    rows, done, total, whole = len(next(iter(inputs.values()))), 0, None, None
    items = trainer._get_num_items_in_batch([inputs], trainer.args.device)
    with replaced(trainer, _get_num_items_in_batch=lambda *_: items):
        for part, share in parts:
            loss, *kept = step(inputs=part)
            if loss is not None:
                loss = (loss * share if share else torch.zeros_like(loss)) if averages else loss
                total = loss if total is None else total + loss
            if whole is None:
                whole = tree_map_only(torch.Tensor, lambda one: one.new_empty((rows, *one.shape[1:])), kept)
            upto = done + len(next(iter(part.values())))
            if any(one.shape[:1] != (upto - done,) for one in tensors_of(kept)):
                return step(inputs=inputs)  # outputs of the batch as a whole
            for into, one in zip(tensors_of(whole), tensors_of(kept), strict=True):
                into[done:upto] = one
            done = upto
            del kept
    assert whole is not None
    return total, whole[0], whole[1]
