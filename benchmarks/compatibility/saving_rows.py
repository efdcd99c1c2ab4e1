"""Rows: saving and using the model after training."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .data import tokens
from .models import gpt2, llama
from .row import Figures, Verdict, row
from .side import Side, trained

_GROUP = "Saving and using the model"


def _sums(state: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value.double().abs().sum()) for name, value in state.items()}


def _is_first() -> bool:
    return dist.get_rank() == 0


def _pretrained(side: Side, trainer: Any) -> dict[str, float]:
    """Call `save_pretrained` on every process."""
    folder = Path(side.folder, "out")
    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder, is_main_process=_is_first())
    dist.barrier()
    return _sums(type(llama()).from_pretrained(folder).state_dict())


def _saved_state(side: Side, trainer: Any) -> dict[str, float]:
    path = Path(side.folder, "state.pt")
    state = trainer.accelerator.get_state_dict(trainer.model)
    if _is_first():
        torch.save(state, path)
    dist.barrier()
    return _sums(torch.load(path, weights_only=True))


def _saved_module(side: Side, trainer: Any) -> dict[str, float]:
    """Save the whole module with pickle."""
    path = Path(side.folder, f"module{dist.get_rank()}.pt")
    torch.save(trainer.accelerator.unwrap_model(trainer.model), path)
    return _sums(torch.load(path, weights_only=False).state_dict())


def _called(side: Side, trainer: Any) -> dict[str, float]:
    """Call the model after training, on every process."""
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(input_ids=torch.tensor([[5, 6, 7]])).logits
    return {"sum": float(logits.abs().sum())}


def _read(side: Side, trainer: Any) -> dict[str, float]:
    """Read a weight after training."""
    weight = trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings().weight
    return {"sum": float(weight.detach().abs().sum())}


def _part(side: Side, trainer: Any) -> dict[str, float]:
    """Save the model without its head."""
    folder, part = Path(side.folder, "part"), trainer.accelerator.unwrap_model(trainer.model).model
    part.save_pretrained(folder, is_main_process=_is_first())
    dist.barrier()
    return _sums(type(part).from_pretrained(folder).state_dict())


def _entered(name: str, then: Any, **about: Any) -> None:
    def train(side: Side) -> Figures:
        return trained(side, llama(), tokens(), then=partial(then, side))

    row(name, _GROUP, **about)(train)


_entered("model.save_pretrained", _pretrained, daily=True)
_entered("accelerator.get_state_dict, torch.save", _saved_state)
_entered("a part of the model saved", _part)
_entered("torch.save(model)", _saved_module, expected=Verdict.REFUSED, is_refused_late=True)
_entered("the model called after training", _called)
_entered("a weight read after training", _read)


@row("push_to_hub=False, hub_model_id set", _GROUP)
def _hub(side: Side) -> Figures:
    return trained(side, gpt2(), tokens(), hub_model_id="nobody/nothing", hub_strategy="end")
