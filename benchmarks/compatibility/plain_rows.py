"""Rows: plain PyTorch loops, against DistributedDataParallel."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

import hf_osdp

from .data import LENGTH, tokens
from .models import Plain, gpt2, llama
from .row import Figures, row
from .side import SAMPLES, STEPS, Side, mean_over_ranks

_GROUP = "Plain PyTorch loops"


def _batch(number: int) -> dict[str, torch.Tensor]:
    """Return this process's samples of micro-batch `number`."""
    first = (number * 2 + dist.get_rank()) * SAMPLES
    rows = tokens(80)[first : first + SAMPLES]
    return {name: torch.stack([r[name] for r in rows]) for name in rows[0]}


def _loop(
    side: Side,
    *,
    make: Any = gpt2,
    micro: int = 1,
    loss_of: Any = None,
    optimizer_of: Any = None,
    then: Any = None,
    inputs: Any = None,
    clip: Any = None,
    after_step: Any = None,
    **options: Any,
) -> Figures:
    """Train steps of `micro` micro-batches, with clipping."""
    own = {} if inputs is None else {"inputs": inputs}
    model = side.wrapped(make(), sequence_length=LENGTH, global_batch_size=2 * SAMPLES * micro, **own, **options)
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
        if optimizer_of is None
        else optimizer_of(model.parameters())
    )
    figures: Figures = []
    for step in range(STEPS):
        total = 0.0
        for part in range(micro):
            last = part == micro - 1
            with _micro_step(side, model, last):
                batch = _batch(step * micro + part)
                loss = model(**batch)["loss"] if loss_of is None else loss_of(model, batch)
                (loss / micro).backward()
            total += mean_over_ranks(loss) / micro
        figures.append({"loss": total, "grad_norm": (clip or _clipped)(side, model)})
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(model, step)
    return figures if then is None else [*figures, then(side, model)]


def _micro_step(side: Side, model: Any, last: bool) -> Any:
    if not side.is_stock:
        return model.micro_step(is_last=last)
    return nullcontext() if last else model.no_sync()


def _clipped(side: Side, model: Any) -> float:
    clip = partial(nn.utils.clip_grad_norm_, model.parameters()) if side.is_stock else model.clip_grad_norm_
    return float(clip(1.0))


def _clipped_by_torch(side: Side, model: Any) -> float:
    return float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def _entered(name: str, *, about: dict[str, Any] | None = None, **options: Any) -> None:
    row(name, _GROUP, **(about or {}))(partial(_loop, **options))


def _shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _head_read(model: Any, batch: Any) -> torch.Tensor:
    hidden = model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states[-1]
    return _shifted(hidden @ model.module.lm_head.weight.T, batch["labels"])


def _inputs(samples: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(samples, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def _pretrained(side: Side, model: Any) -> dict[str, float]:
    folder = Path(side.folder, "out")
    if side.is_stock:
        model.module.save_pretrained(folder) if dist.get_rank() == 0 else None
    else:
        model.save_pretrained(folder)
    dist.barrier()
    return {
        name: float(value.abs().sum()) for name, value in type(gpt2()).from_pretrained(folder).state_dict().items()
    }


def _whole_state(side: Side, model: Any) -> dict[str, float]:
    state = model.module.state_dict() if side.is_stock else model.full_state_dict()
    return {name: float(value.abs().sum()) for name, value in state.items()} if dist.get_rank() == 0 else {}


_entered("GPT-2")
_entered("Llama, 2 micro-batches", make=llama, micro=2)
_entered("a module that is not from transformers", make=Plain, inputs=_inputs, about={"daily": True})
_entered("a module without repeated blocks", make=partial(Plain, blocks=0), inputs=_inputs)
_entered("the loss reads the head's weight", make=llama, loss_of=_head_read)
_entered("the loss reads the head's weight, other layouts", make=llama, loss_of=_head_read, about={"shift": 1})
_entered("torch.optim.SGD with momentum", optimizer_of=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
_entered("torch.optim.Adagrad", optimizer_of=partial(torch.optim.Adagrad, lr=1e-2))
_entered("torch.optim.Adam, fused", optimizer_of=partial(torch.optim.Adam, lr=1e-2, eps=1e-5, fused=True))


class _Averaged:
    """Average the weights in a whole copy."""

    def __init__(self) -> None:
        self.average = AveragedModel(llama())

    def __call__(self, model: Any, step: int) -> None:
        with hf_osdp.full_parameters(model.module, write_back=False):
            self.average.update_parameters(model.module)

    def sums(self, side: Side, model: Any) -> dict[str, float]:
        return {name: float(value.double().abs().sum()) for name, value in self.average.module.state_dict().items()}


def _loads(model: Any, step: int) -> None:
    if step == 1:
        model.module.load_state_dict(llama().state_dict())


@row("AveragedModel, in full_parameters", _GROUP)
def _averages(side: Side) -> Figures:
    averaged = _Averaged()
    return _loop(side, make=llama, after_step=averaged, then=averaged.sums)


_entered("torch.nn.utils.clip_grad_norm_", make=llama, clip=_clipped_by_torch)
_entered("whole weights loaded between steps", make=llama, after_step=_loads)
_entered("save_pretrained", then=_pretrained)
_entered("whole state dict", make=llama, then=_whole_state)
