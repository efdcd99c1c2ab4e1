"""Loops: with Accelerate, as its examples write them, and plain ones against DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import accelerate.utils
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import find_executable_batch_size
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

import hf_osdp

from . import losses
from .data import LENGTH, classes, tokens
from .models import gpt2, llama
from .row import Figures
from .side import SAMPLES, STEPS, Side, made, mean_over_ranks, read_back, sums

_BERT = "BertForSequenceClassification"


def _loader(side: Side, data: Any = "tokens", *, size: int | None = None, shuffle: bool = True) -> DataLoader:
    samples = made(data)
    generator = torch.Generator().manual_seed(1) if shuffle and hasattr(samples, "__len__") else None
    return DataLoader(samples, batch_size=size or side.samples, shuffle=generator is not None, generator=generator)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def _norm(accelerator: Accelerator, model: nn.Module, clip: float | str = 1.0) -> float:
    """Clip gradients to a norm, which is returned, or their values, or not."""
    if clip == "values":
        accelerator.clip_grad_value_(model.parameters(), 1e-3)
    return float(accelerator.clip_grad_norm_(model.parameters(), clip)) if isinstance(clip, float) else 0.0


def _prepared(side: Side, model: Any = "gpt2", **loader: Any) -> tuple[Accelerator, Any, Any, Any]:
    accelerator, model = side.accelerator(), made(model)
    return accelerator, *accelerator.prepare(model, _adamw(model), _loader(side, **loader))


def _loop(
    accelerator: Accelerator, model: Any, optimizers: Any, loader: Any, scheduler: Any = None, *,
    clip: float | str = 1.0, steps: int = STEPS, loss_of: Callable[[Any, Any], torch.Tensor] | None = None,
) -> Figures:  # fmt: skip
    """Run the loop of Accelerate's examples; return figures for each micro-step."""
    figures: Figures = []
    optimizers = optimizers if isinstance(optimizers, tuple) else (optimizers,)
    micro = steps * accelerator.gradient_accumulation_steps
    model.train()
    for _, batch in zip(range(micro), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"] if loss_of is None else loss_of(model, batch)
            accelerator.backward(loss)
            entry = {"loss": mean_over_ranks(loss.detach().float())}
            if accelerator.sync_gradients:
                entry["grad_norm"] = _norm(accelerator, model, clip)
            for optimizer in optimizers:
                optimizer.step()
            if scheduler is not None:
                scheduler.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        entry["learning_rate"] = optimizers[0].param_groups[0]["lr"]
        figures.append(entry)
    return figures


def _losses(loss: str | None) -> Callable[[Any, Any], torch.Tensor] | None:
    if loss is None:
        return None
    function = getattr(losses, loss)
    return lambda model, batch: function(model, getattr(model, "module", model), batch)


def accelerated(
    side: Side, *, model: Any = "gpt2", data: Any = "tokens", clip: float | str = 1.0, loss: str | None = None,
    plugins: Mapping[str, Mapping[str, Any]] | None = None, **options: Any,
) -> Figures:  # fmt: skip
    """Train with an accelerator of these options; `plugins` are objects among them, by their class and arguments."""
    for name, spec in (plugins or {}).items():
        ((kind, arguments),) = spec.items()
        options[name] = getattr(accelerate.utils, kind)(**arguments)
    accelerator, model = side.accelerator(**options), made(model)
    size = side.samples * (2 if getattr(accelerator, "split_batches", False) else 1)
    prepared = accelerator.prepare(model, _adamw(model), _loader(side, data, size=size))
    return _loop(accelerator, *prepared, clip=clip, loss_of=_losses(loss))


def autocast(side: Side) -> Figures:
    accelerator, model = side.accelerator(mixed_precision="bf16"), gpt2()

    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        with accelerator.autocast():
            return model(**batch)["loss"]

    return _loop(accelerator, *accelerator.prepare(model, _adamw(model), _loader(side)), loss_of=loss_of)


def scheduled(side: Side) -> Figures:
    accelerator, model = side.accelerator(), gpt2()
    optimizer = _adamw(model)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 2 * STEPS)
    return _loop(accelerator, *accelerator.prepare(model, optimizer, _loader(side), scheduler))


def _evaluated(accelerator: Accelerator, model: nn.Module, loader: Any) -> dict[str, float]:
    model.eval()
    found: list[torch.Tensor] = []
    for batch in loader:
        with torch.no_grad():
            logits = model(**batch).logits
        found.append(accelerator.gather_for_metrics(logits))
    logits = torch.cat(found)
    return {"rows": float(len(logits)), "sum": float(logits.abs().sum())}


def gathered(side: Side) -> Figures:
    accelerator, model = side.accelerator(), made(_BERT)
    loaders = _loader(side, "classes"), _loader(side, classes(7), shuffle=False)
    model, optimizer, loader, other = accelerator.prepare(model, _adamw(model), *loaders)
    return [*_loop(accelerator, model, optimizer, loader), _evaluated(accelerator, model, other)]


def evaluation(side: Side) -> Figures:
    accelerator = side.accelerator()
    return [_evaluated(accelerator, *accelerator.prepare(made(_BERT), _loader(side, classes(7), shuffle=False)))]


def states(side: Side) -> Figures:
    accelerator, *prepared = _prepared(side, shuffle=False)
    first = _loop(accelerator, *prepared, steps=2)
    accelerator.save_state(str(side.folder / "state"))
    second = _loop(accelerator, *prepared)
    accelerator.load_state(str(side.folder / "state"))
    return [*first, *second, *_loop(accelerator, *prepared)]


def saved_by_hand(side: Side) -> Figures:
    accelerator, model, *others = _prepared(side)
    figures = _loop(accelerator, model, *others)
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        side.folder / "out", is_main_process=accelerator.is_main_process, save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )  # fmt: skip
    return [*figures, read_back(side.folder / "out", gpt2())]


def model_saved(side: Side, model: Any = "llama") -> Figures:
    from safetensors.torch import load_file

    accelerator, model, *others = _prepared(side, model)
    figures = _loop(accelerator, model, *others)
    accelerator.save_model(model, str(side.folder / "out"))
    accelerator.wait_for_everyone()
    return [*figures, sums(load_file(side.folder / "out" / "model.safetensors"))]


def compiled(side: Side) -> Figures:
    return _loop(*_prepared(side, "compiled"))


def prepared_singly(side: Side) -> Figures:
    accelerator, model = side.accelerator(), gpt2()
    loader = accelerator.prepare(_loader(side))
    return _loop(accelerator, *accelerator.prepare(model, _adamw(model)), loader)


def model_first(side: Side) -> Figures:
    accelerator = side.accelerator()
    model, loader = accelerator.prepare(gpt2(), _loader(side))
    return _loop(accelerator, model, accelerator.prepare(_adamw(model)), loader)


def two_models(side: Side) -> Figures:
    accelerator, one, two = side.accelerator(), gpt2(), llama()
    one, two, optimizer, loader = accelerator.prepare(one, two, _adamw(one), _loader(side))
    return _loop(accelerator, one, optimizer, loader)


def second_model(side: Side) -> Figures:
    accelerator, one, optimizer, loader = _prepared(side)
    two = llama()
    two, second = accelerator.prepare(two, _adamw(two))
    return [*_loop(accelerator, one, optimizer, loader), *_loop(accelerator, two, second, loader)]


def two_optimizers(side: Side) -> Figures:
    accelerator, model = side.accelerator(), llama()
    head = torch.optim.SGD(model.lm_head.parameters(), lr=0.1)
    body = torch.optim.AdamW(model.model.parameters(), lr=1e-2, eps=1e-5)
    model, body, head, loader = accelerator.prepare(model, body, head, _loader(side))
    return _loop(accelerator, model, (body, head), loader)


def local_sgd(side: Side) -> Figures:
    accelerator, model, *others = _prepared(side)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True):
        return _loop(accelerator, model, *others)


def batch_size_found(side: Side) -> Figures:
    accelerator = side.accelerator()

    @find_executable_batch_size(starting_batch_size=side.samples)
    def inner(batch_size: int) -> Figures:
        accelerator.free_memory()
        model = gpt2()
        return _loop(accelerator, *accelerator.prepare(model, _adamw(model), _loader(side, size=batch_size)))

    return inner()


def no_sync(side: Side) -> Figures:
    accelerator, model, optimizer, loader = _prepared(side)
    figures: Figures = []
    for number, batch in zip(range(2 * STEPS), loader, strict=False):
        with nullcontext() if number % 2 else accelerator.no_sync(model):
            loss = model(**batch).loss / 2
            accelerator.backward(loss)
        figures.append({"loss": mean_over_ranks(loss)})
        if number % 2:
            figures.append({"grad_norm": _norm(accelerator, model)})
            optimizer.step()
            optimizer.zero_grad()
    return figures


# ------------------------------------------------------------------------------------------------------ plain loops


def _batch(number: int) -> dict[str, torch.Tensor]:
    first = (number * 2 + dist.get_rank()) * SAMPLES
    rows = tokens(80)[first : first + SAMPLES]
    return {name: torch.stack([r[name] for r in rows]) for name in rows[0]}


def _inputs(samples: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(samples, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def _micro_step(side: Side, model: Any, last: bool) -> Any:
    if not side.is_stock:
        return model.micro_step(is_last=last)
    return nullcontext() if last else model.no_sync()


def _clipped(side: Side, model: Any) -> float:
    clip = partial(nn.utils.clip_grad_norm_, model.parameters()) if side.is_stock else model.clip_grad_norm_
    return float(clip(1.0))


def plain(
    side: Side, *, model: Any = "gpt2", micro: int = 1, loss: str | None = None,
    optimizer: Mapping[str, Mapping[str, Any]] | None = None, inputs: bool = False, torch_clips: bool = False,
    after_step: Any = None, then: str | None = None,
) -> Figures:  # fmt: skip
    """Train steps of `micro` micro-batches, with clipping; `inputs` says that the user gives an example of them."""
    ((kind, arguments),) = (optimizer or {"AdamW": {"lr": 1e-2, "eps": 1e-5}}).items()
    own, loss_of = {"inputs": _inputs} if inputs else {}, _losses(loss)
    model = side.wrapped(made(model), sequence_length=LENGTH, global_batch_size=2 * SAMPLES * micro, **own)
    stepped = getattr(torch.optim, kind)(model.parameters(), **arguments)
    figures: Figures = []
    for step in range(STEPS):
        total = 0.0
        for part in range(micro):
            with _micro_step(side, model, last=part == micro - 1):
                batch = _batch(step * micro + part)
                value = model(**batch)["loss"] if loss_of is None else loss_of(model, batch)
                (value / micro).backward()
            total += mean_over_ranks(value) / micro
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)) if torch_clips else _clipped(side, model)
        figures.append({"loss": total, "grad_norm": norm})
        stepped.step()
        stepped.zero_grad()
        if after_step is not None:
            after_step(model, step)
    return figures if then is None else [*figures, _THEN[then](side, model)]


def _pretrained(side: Side, model: Any) -> dict[str, float]:
    if not side.is_stock:
        model.save_pretrained(side.folder / "out")
    elif dist.get_rank() == 0:
        model.module.save_pretrained(side.folder / "out")
    return read_back(side.folder / "out", gpt2())


def _whole_state(side: Side, model: Any) -> dict[str, float]:
    state = model.module.state_dict() if side.is_stock else model.full_state_dict()
    return sums(state) if dist.get_rank() == 0 else {}


_THEN = {"pretrained": _pretrained, "whole state": _whole_state}


def averaged(side: Side) -> Figures:
    average = AveragedModel(llama())

    def after_step(model: Any, step: int) -> None:
        with hf_osdp.full_parameters(model.module, write_back=False):
            average.update_parameters(model.module)

    return [*plain(side, model="llama", after_step=after_step), sums(average.module.state_dict())]


def loaded(side: Side) -> Figures:
    def after_step(model: Any, step: int) -> None:
        if step == 1:
            model.module.load_state_dict(llama().state_dict())

    return plain(side, model="llama", after_step=after_step)
