"""Every layout, model and way to accumulate, recompute and offload; operators in slices, the loss in chunks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hf_osdp.modeling.split.loss_chunks import chunk_loss
from hf_osdp.modeling.split.operators import split_operators
from hf_osdp.planner.split import OperatorSplit
from tests.helpers.layouts import LAYOUTS, joined
from tests.helpers.models import MODELS, tiny_loss, tiny_model
from tests.helpers.training import Case, Change, adamw


@cache
def of(name: str, **options: Any) -> partial[nn.Module]:
    """Return what makes a tiny model; equal arguments make equal cases, whose reference is trained once."""
    return partial(tiny_model, name, **options)


def wrap_blocks(model: nn.Module) -> None:
    """Add activation checkpointing around every block, as Accelerate does it."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

    blocks = {"GPT2Block", "BertLayer", "LlamaDecoderLayer"}
    wrapper.apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ in blocks)


def gathers_without_waiting(model: nn.Module) -> None:
    """Let FSDP2 wait for the works that all-gathers return."""
    model._set_unshard_async_op(True)


def on_host(every: int) -> Change:
    """Each so many-th unit is on the host."""
    return lambda number, decision, unit: {"on_host": number % every == 0}


# Compiled blocks take minutes to generate code on two cores.
CASES = {
    f"{model}, {layout}": Case(model=of(model), layout=layout, world=4, slow=(model, layout) != ("gpt2", "everything"))
    for model in MODELS for layout in LAYOUTS
}  # fmt: skip
CASES |= {
    f"gpt2, {layout}, accumulates, {name}": Case(
        layout=layout, world=4, accumulation_steps=2, reduce=reduce,
        slow=(layout, name) != ("everything", "reduces by unit"),
    )
    for layout in ("zero3", "everything")
    for name, reduce in (("reduces", True), ("holds", False), ("reduces by unit", None))
}  # fmt: skip
CASES |= {
    "gpt2, mixed, checkpointing, async": Case(world=4, prepare=wrap_blocks, applied=gathers_without_waiting),
    "llama, mixed, checkpointing": Case(model=of("llama"), world=4, prepare=wrap_blocks, slow=True),
    **{f"{model}, everything on 2": Case(model=of(model), layout="everything") for model in ("bert", "llama")},
}  # fmt: skip


# ---- modules under several names


def shared_modules() -> nn.Module:
    """Two neighbours share their MLP, two others a norm, and the decoder has a second name."""
    model = tiny_model("llama")
    layers = model.model.layers
    layers[1].mlp, layers[3].input_layernorm = layers[0].mlp, layers[2].input_layernorm
    model.backbone = model.model
    return model


CASES |= {
    f"llama, shared modules, {layout}": Case(model=shared_modules, layout=layout, slow=layout == "replicate")
    for layout in ("zero3", "everything", "replicate")
}
CASES |= {
    "llama, shared modules, accumulates": Case(
        model=shared_modules, layout="zero3", accumulation_steps=2, prepare=wrap_blocks, reduce=False, slow=True,
    ),
}  # fmt: skip


# ---- several blocks in a unit


def early_loss(model: nn.Module, batch: dict[str, torch.Tensor], *, last: int) -> torch.Tensor:
    """A loss of the outputs of the first block and of a later one; no loss reads those of the blocks after it."""
    states = model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states
    return states[1].square().mean() + states[last].pow(3).mean()


def early_and_usual_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Two calls before one backward; the loss of the first ends in the middle of a unit."""
    return early_loss(model, batch, last=3) + tiny_loss(model, batch)


IN_PAIRS, IN_THREES = partial(joined, 2), partial(joined, 3)
CASES |= {
    **{f"{model}, {layout}, two blocks a unit": Case(
        model=of(model), layout=layout, world=4, units=IN_PAIRS, slow=model != "gpt2"
    ) for model, layout in (("gpt2", "everything"), ("bert", "mixed"), ("llama", "zero3"))},
    "gpt2, everything, two blocks a unit, holds": Case(
        layout="everything", units=IN_PAIRS, accumulation_steps=2, reduce=False,
    ),
    "gpt2, zero3, three blocks a unit, accumulates": Case(layout="zero3", units=IN_THREES, accumulation_steps=2),
    "gpt2, replicate, three blocks a unit": Case(layout="replicate", units=IN_THREES),
    "gpt2, mixed, two blocks a unit, checkpointing": Case(world=4, units=IN_PAIRS, prepare=wrap_blocks),
    "gpt2, compiled, two blocks a unit": Case(layout="compiled", units=IN_PAIRS, slow=True),
    "llama, loss of early blocks, two a unit": Case(
        model=of("llama"), layout="zero3", units=IN_PAIRS, loss=partial(early_loss, last=3),
        max_norm=1e-4,
    ),
    "llama, two losses, two blocks a unit": Case(
        model=of("llama"), layout="zero3", units=IN_PAIRS, loss=early_and_usual_loss,
    ),
    "gpt2, loss of early blocks, three a unit": Case(
        layout="zero3", units=IN_THREES, loss=partial(early_loss, last=2), max_norm=1e-4,
    ),
}  # fmt: skip


# ---- the host


def decayed(
    model: nn.Module, kind: str = "AdamW", package: str = "torch.optim", **options: Any
) -> torch.optim.Optimizer:
    """Return an optimizer of two groups: matrices decay, others do not and learn faster."""
    matrices, others = ([p for p in model.parameters() if p.requires_grad and (p.ndim > 1) is is_matrix]
                        for is_matrix in (True, False))  # fmt: skip
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 2e-2}]
    return getattr(import_module(package), kind)(groups, lr=1e-2, **options)


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Halve the learning rate at each step."""
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


CASES |= {
    "host, every unit": Case(change=on_host(1), optimizer=partial(adamw, fused=None), accumulation_steps=2,
                             reduce=False),
    **{f"host, groups bound afterwards, {how} on {ranks}": Case(
        world=ranks, change=on_host(2), optimizer=partial(decayed, **{how: True}), rebinds=True, schedule=halved,
        max_norm=0.3,
    ) for how, ranks in (("foreach", 2), ("fused", 1))},
}  # fmt: skip


# ---- splits

OPERATORS = {
    "gpt2": ("transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj", "transformer.h.1.attn.c_attn"),
    "llama": ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"),
}


def cut(model: nn.Module, slices: int) -> None:
    """Put some operators in slices."""
    operators = OPERATORS[model.config.model_type]
    split_operators(model, [OperatorSplit(fqn=fqn, slices=slices) for fqn in operators])


def cut_and_wrap(model: nn.Module) -> None:
    cut(model, 2)
    wrap_blocks(model)


def sliced(name: str, slices: int, **options: Any) -> Case:
    """The optimizer is made from the whole model."""
    return Case(model=of(name, layers=2), prepare=partial(cut, slices=slices), rebinds=True, **options)


def loss_of_logits(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: object) -> torch.Tensor:
    """Mean cross-entropy in the logits' dtype: transformers' own goes through float32."""
    return F.cross_entropy(logits.view(-1, vocab_size), labels.reshape(-1))


def with_loss(name: str) -> nn.Module:
    model = tiny_model(name, layers=2)
    if name != "bert":
        model.loss_function = loss_of_logits
    return model


def own_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def loss_and_penalty(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss, and a penalty on its logits."""
    out = model(**batch)
    return out.loss + 0.01 * out.logits.square().mean()


def chunked(name: str, layout: str, loss: Any = own_loss, **options: Any) -> Case:
    return Case(
        model=partial(with_loss, name), layout=layout, loss=loss, prepare=partial(chunk_loss, chunks=5), **options
    )


CASES |= {
    "slices, 3": sliced("gpt2", 3),
    "slices, 4, zero3, holds": sliced("gpt2", 4, layout="zero3", accumulation_steps=2, reduce=False),
    "slices, checkpointing": replace(sliced("gpt2", 2, layout="zero3"), prepare=cut_and_wrap),
    "slices, llama": sliced("llama", 4, slow=True),
    "chunks, gpt2": chunked("gpt2", "mixed", accumulation_steps=2),
    "chunks, llama": chunked("llama", "zero3", loss_and_penalty),
    "chunks, compiled": chunked("gpt2", "compiled", tolerance=1e-9, slow=True),
    "chunks, everything": chunked("gpt2", "everything", accumulation_steps=2, reduce=False, slow=True),
    "chunks, bert, mixed": chunked("bert", "mixed", accumulation_steps=2, slow=True),
}
