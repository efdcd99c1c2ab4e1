"""Rows: loops with Accelerate, as its examples write them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import GradientAccumulationPlugin, find_executable_batch_size
from torch import nn
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

from .data import Stream, classes, tokens
from .models import Plain, gpt2, llama, tiny
from .row import Figures, Verdict, row
from .side import STEPS, Side, mean_over_ranks

_GROUP = "Accelerate loops"
_REFUSED = {"expected": Verdict.REFUSED}


def _loader(side: Side, samples: Any = None, *, size: int | None = None, shuffle: bool = True) -> DataLoader:
    samples = tokens() if samples is None else samples
    generator = torch.Generator().manual_seed(1)
    shuffle = shuffle and hasattr(samples, "__len__")
    return DataLoader(
        samples, batch_size=size or side.samples, shuffle=shuffle, generator=generator if shuffle else None
    )


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def _norm(accelerator: Accelerator, model: nn.Module, greatest: float = 1.0) -> float:
    return float(accelerator.clip_grad_norm_(model.parameters(), greatest))


def _loop(
    side: Side, accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any, scheduler: Any = None,
    *, clip: Callable[..., float] = _norm, steps: int = STEPS,
    loss_of: Callable[[Any, Any], torch.Tensor] | None = None,
) -> Figures:  # fmt: skip
    """Run the loop of Accelerate's examples; return figures for each micro-step."""
    figures: Figures = []
    micro = steps * accelerator.gradient_accumulation_steps
    model.train()
    for _, batch in zip(range(micro), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"] if loss_of is None else loss_of(model, batch)
            accelerator.backward(loss)
            entry = {"loss": mean_over_ranks(loss.detach().float())}
            if accelerator.sync_gradients:
                entry["grad_norm"] = clip(accelerator, model)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        entry["learning_rate"] = optimizer.param_groups[0]["lr"]
        figures.append(entry)
    return figures


def _plain(
    side: Side, *, make: Any = gpt2, data: Any = None, clip: Any = _norm, loss_of: Any = None, **options: Any
) -> Figures:
    accelerator = side.accelerator(**options)
    model = make()
    size = side.samples * (2 if getattr(accelerator, "split_batches", False) else 1)
    prepared = accelerator.prepare(model, _adamw(model), _loader(side, data, size=size))
    return _loop(side, accelerator, *prepared, clip=clip, loss_of=loss_of)


def _values(accelerator: Accelerator, model: nn.Module) -> float:
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    return 0.0


def _none(accelerator: Accelerator, model: nn.Module) -> float:
    return 0.0


def _entered(name: str, *, about: dict[str, Any] | None = None, **options: Any) -> None:
    row(name, _GROUP, **(about or {}))(partial(_plain, **options))


_ROUNDED = {"loss_tolerance": 2e-2, "norm_tolerance": 5e-2}
_entered("nlp_example", make=partial(tiny, "BertForSequenceClassification"), data=classes())
_entered("a plain nn.Module", make=Plain)
_entered("bf16", mixed_precision="bf16", about=_ROUNDED)
_entered("fp16", mixed_precision="fp16", about={**_ROUNDED, "config": {"hardware": None}})
_entered("gradient_accumulation_steps=2", gradient_accumulation_steps=2)
_entered(
    "GradientAccumulationPlugin",
    gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False),
)
_entered("clip_grad_norm_ to 0.1", clip=partial(_norm, greatest=0.1))
_entered("clip_grad_value_", clip=_values)
_entered("no clipping", clip=_none)
_entered("a stream, dispatched", data=Stream())


@row("DataLoaderConfiguration(split_batches=True)", _GROUP)
def _split(side: Side) -> Figures:
    from accelerate.utils import DataLoaderConfiguration

    return _plain(side, dataloader_config=DataLoaderConfiguration(split_batches=True))


@row("DataLoaderConfiguration(dispatch_batches=True)", _GROUP)
def _dispatched(side: Side) -> Figures:
    from accelerate.utils import DataLoaderConfiguration

    return _plain(side, data=Stream(), dataloader_config=DataLoaderConfiguration(dispatch_batches=True))


def _autocast_loss(accelerator: Accelerator, model: Any, batch: Any) -> torch.Tensor:
    with accelerator.autocast():
        return model(**batch)["loss"]


@row("accelerator.autocast, bf16", _GROUP, **_ROUNDED)
def _autocast(side: Side) -> Figures:
    accelerator = side.accelerator(mixed_precision="bf16")
    model = gpt2()
    prepared = accelerator.prepare(model, _adamw(model), _loader(side))
    return _loop(side, accelerator, *prepared, loss_of=partial(_autocast_loss, accelerator))


@row("a scheduler", _GROUP)
def _scheduled(side: Side) -> Figures:
    accelerator = side.accelerator()
    model = gpt2()
    optimizer = _adamw(model)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 2 * STEPS)
    return _loop(side, accelerator, *accelerator.prepare(model, optimizer, _loader(side), scheduler))


@row("gather_for_metrics, uneven last batch", _GROUP)
def _gathered(side: Side) -> Figures:
    accelerator = side.accelerator()
    model = tiny("BertForSequenceClassification")
    model, optimizer, loader, other = accelerator.prepare(
        model, _adamw(model), _loader(side, classes()), _loader(side, classes(7), shuffle=False)
    )
    figures = _loop(side, accelerator, model, optimizer, loader)
    return [*figures, _evaluated(accelerator, model, other)]


def _evaluated(accelerator: Accelerator, model: nn.Module, loader: Any) -> dict[str, float]:
    model.eval()
    found: list[torch.Tensor] = []
    for batch in loader:
        with torch.no_grad():
            logits = model(**batch).logits
        found.append(accelerator.gather_for_metrics(logits))
    logits = torch.cat(found)
    return {"rows": float(len(logits)), "sum": float(logits.abs().sum())}


@row("evaluation without an optimizer", _GROUP)
def _evaluation(side: Side) -> Figures:
    accelerator = side.accelerator()
    model, loader = accelerator.prepare(
        tiny("BertForSequenceClassification"), _loader(side, classes(7), shuffle=False)
    )
    return [_evaluated(accelerator, model, loader)]


@row("save_state, load_state", _GROUP)
def _states(side: Side) -> Figures:
    accelerator = side.accelerator()
    model = gpt2()
    model, optimizer, loader = accelerator.prepare(model, _adamw(model), _loader(side, shuffle=False))
    first = _loop(side, accelerator, model, optimizer, loader, steps=2)
    accelerator.save_state(str(side.folder / "state"))
    second = _loop(side, accelerator, model, optimizer, loader)
    accelerator.load_state(str(side.folder / "state"))
    return [*first, *second, *_loop(side, accelerator, model, optimizer, loader)]


@row("get_state_dict, unwrap_model, save_pretrained", _GROUP)
def _saved(side: Side) -> Figures:
    accelerator = side.accelerator()
    model = gpt2()
    model, optimizer, loader = accelerator.prepare(model, _adamw(model), _loader(side))
    figures = _loop(side, accelerator, model, optimizer, loader)
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        side.folder / "out",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    return [*figures, _sums(type(gpt2()).from_pretrained(side.folder / "out").state_dict())]


@row("torch.compile(model), accelerator.save_model", _GROUP)
def _compiled(side: Side) -> Figures:
    *figures, sums = _save_model(side, torch.compile(llama()))
    if side.is_stock:  # saves names that `from_pretrained` does not find
        sums = {name.removeprefix("_orig_mod."): value for name, value in sums.items()}
    return [*figures, sums]


@row("accelerator.save_model", _GROUP)
def _save_model(side: Side, model: Any = None) -> Figures:
    from safetensors.torch import load_file

    accelerator = side.accelerator()
    model = llama() if model is None else model
    model, optimizer, loader = accelerator.prepare(model, _adamw(model), _loader(side))
    figures = _loop(side, accelerator, model, optimizer, loader)
    accelerator.save_model(model, str(side.folder / "out"))
    accelerator.wait_for_everyone()
    return [*figures, _sums(load_file(side.folder / "out" / "model.safetensors"))]


def _sums(state: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value.double().abs().sum()) for name, value in state.items()}


@row("objects prepared one by one", _GROUP, **_REFUSED)
def _singly(side: Side) -> Figures:
    accelerator = side.accelerator()
    model = gpt2()
    loader = accelerator.prepare(_loader(side))
    model, optimizer = accelerator.prepare(model, _adamw(model))
    return _loop(side, accelerator, model, optimizer, loader)


@row("the model prepared first, then the optimizer of its parameters", _GROUP, refused_by="accelerate", **_REFUSED)
def _model_first(side: Side) -> Figures:
    accelerator = side.accelerator()
    model, loader = accelerator.prepare(gpt2(), _loader(side))
    return _loop(side, accelerator, model, accelerator.prepare(_adamw(model)), loader)


@row("two models", _GROUP, **_REFUSED)
def _two(side: Side) -> Figures:
    accelerator = side.accelerator()
    one, two = gpt2(), llama()
    one, two, optimizer, loader = accelerator.prepare(one, two, _adamw(one), _loader(side))
    return _loop(side, accelerator, one, optimizer, loader)


@row("a second model prepared later", _GROUP, **_REFUSED)
def _second(side: Side) -> Figures:
    accelerator = side.accelerator()
    one, two = gpt2(), llama()
    one, optimizer, loader = accelerator.prepare(one, _adamw(one), _loader(side))
    two, second = accelerator.prepare(two, _adamw(two))
    return [*_loop(side, accelerator, one, optimizer, loader), *_loop(side, accelerator, two, second, loader)]


@row("two optimizers", _GROUP)
def _two_optimizers(side: Side) -> Figures:
    accelerator = side.accelerator()
    model = llama()
    head = torch.optim.SGD(model.lm_head.parameters(), lr=0.1)
    model, body, head, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.model.parameters(), lr=1e-2, eps=1e-5), head, _loader(side)
    )
    figures: Figures = []
    for _, batch in zip(range(STEPS), loader, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        figures.append({"loss": mean_over_ranks(loss), "grad_norm": _norm(accelerator, model)})
        for optimizer in (body, head):
            optimizer.step()
            optimizer.zero_grad()
    return figures


@row("LocalSGD", _GROUP, refused_by="accelerate", **_REFUSED)
def _local(side: Side) -> Figures:
    accelerator = side.accelerator()
    model = gpt2()
    model, optimizer, loader = accelerator.prepare(model, _adamw(model), _loader(side))
    figures: Figures = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local:
        for _, batch in zip(range(STEPS), loader, strict=False):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            figures.append({"loss": mean_over_ranks(loss)})
    return figures


@row("find_executable_batch_size", _GROUP)
def _finder(side: Side) -> Figures:
    accelerator = side.accelerator()

    @find_executable_batch_size(starting_batch_size=side.samples)
    def inner(batch_size: int) -> Figures:
        accelerator.free_memory()
        model = gpt2()
        prepared = accelerator.prepare(model, _adamw(model), _loader(side, size=batch_size))
        return _loop(side, accelerator, *prepared)

    return inner()


@row("accelerator.no_sync by hand", _GROUP)
def _no_sync(side: Side) -> Figures:
    from contextlib import nullcontext

    accelerator = side.accelerator()
    model = gpt2()
    model, optimizer, loader = accelerator.prepare(model, _adamw(model), _loader(side))
    figures: Figures = []
    for number, batch in zip(range(2 * STEPS), loader, strict=False):
        last = number % 2 == 1
        with nullcontext() if last else accelerator.no_sync(model):
            loss = model(**batch).loss / 2
            accelerator.backward(loss)
        entry = {"loss": mean_over_ranks(loss)}
        if last:
            entry["grad_norm"] = _norm(accelerator, model)
            optimizer.step()
            optimizer.zero_grad()
        figures.append(entry)
    return figures


def _head_read(model: Any, batch: Any) -> torch.Tensor:
    """Return a loss that reads the head's weight."""
    inner = getattr(model, "module", model)
    hidden = model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states[-1]
    logits = hidden @ inner.lm_head.weight.T
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


_entered("the loss reads the head's weight", make=llama, loss_of=_head_read, about={"daily": True})
_entered("the loss reads the head's weight, other layouts", make=llama, loss_of=_head_read, about={"shift": 1})


def _penalised(model: Any, batch: Any) -> torch.Tensor:
    inner = getattr(model, "module", model)
    embedded = inner.get_input_embeddings()(batch["input_ids"])
    logits = model(inputs_embeds=embedded).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    (slope,) = torch.autograd.grad(loss, embedded, create_graph=True)
    return loss + slope.pow(2).sum()


_entered(
    "gradient penalty by autograd.grad",
    make=partial(llama, attn_implementation="eager"),
    loss_of=_penalised,
    about=_REFUSED,
)
