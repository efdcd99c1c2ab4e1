"""Weights that are read without a call of their module, and parts of the model that are called alone."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.compatibility import losses
from tests.helpers.layouts import LAYOUTS
from tests.helpers.models import tiny_batch, tiny_loss, tiny_model
from tests.helpers.training import Case, Loop

from .layouts import wrap_blocks

Batch = dict[str, torch.Tensor]


def blocks(model: nn.Module) -> nn.ModuleList:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def weight_of(module: nn.Module) -> torch.Tensor:
    """Read a weight as careful code does, which takes a shard for a part of something to be put together."""
    weight = module.weight
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def matrix(model: nn.Module) -> nn.Module:
    mlp = blocks(model)[1].mlp
    return mlp.down_proj if hasattr(mlp, "down_proj") else mlp.c_fc


def cross_entropy(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def with_forward(model: nn.Module, forward: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    """Have the model return these logits."""

    def replaced(self: nn.Module, input_ids: torch.Tensor) -> types.SimpleNamespace:
        return types.SimpleNamespace(logits=forward(self, input_ids))

    model.forward = types.MethodType(replaced, model)


def hidden_of(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    return model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state


def fused_forward(model: nn.Module) -> None:
    """Have forward read the head's weight and never call the head, as fused losses do."""
    with_forward(model, lambda self, input_ids: hidden_of(self, input_ids) @ weight_of(self.lm_head).T)


def read_first(model: nn.Module) -> None:
    """Have forward read the second block's matrix before any block runs, and call the head twice."""

    def logits(self: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
        scale, hidden = weight_of(matrix(self)).mean(), hidden_of(self, input_ids)
        return self.lm_head(hidden) * (1 + scale) + self.lm_head(hidden.tanh())

    with_forward(model, logits)


class Reversible(torch.autograd.Function):
    """Runs a part again in backward, and its backward inside of it, as Reformer's layers do."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, part: nn.Module) -> torch.Tensor:
        ctx.part = part
        ctx.save_for_backward(hidden)
        return part(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.part(hidden).backward(gradient, retain_graph=True)
        return hidden.grad, None


def reversible(model: nn.Module) -> None:
    """Have forward run a part of each block alone."""

    def logits(self: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.get_input_embeddings()(input_ids)
        for block in blocks(self):
            hidden = hidden + Reversible.apply(hidden, block.mlp)
        return self.lm_head(30 * hidden)

    with_forward(model, logits)


def loss_reads_head(model: nn.Module, batch: Batch) -> torch.Tensor:
    hidden = model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states[-1]
    return cross_entropy(hidden @ weight_of(model.get_output_embeddings()).T, batch)


def loss_calls_backbone(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The model itself is never called."""
    return cross_entropy(hidden_of(model, batch["input_ids"]) @ weight_of(model.lm_head).T, batch)


def loss_with_penalties(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The head, the embedding, the last norm, a block's norm and matrix: called in forward, and read in the loss."""
    loss = tiny_loss(model, batch)
    norm = getattr(blocks(model)[1], "ln_1", None) or blocks(model)[1].input_layernorm
    last = getattr(model.base_model, "ln_f", None) or model.base_model.norm
    read = (model.lm_head, model.get_input_embeddings(), norm, matrix(model), last)
    return loss + 0.3 * sum(weight_of(module).pow(2).mean() for module in read)


def add_parameters(model: nn.Module) -> None:
    """Parameters that no forward uses, one of them without dimensions."""
    model.temperature = nn.Parameter(torch.full((3,), 1.2, dtype=torch.float64))
    model.logit_scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))


def loss_uses_parameters(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return cross_entropy(logits * model.logit_scale.exp() / model.temperature.sum(), batch)


def add_empty(model: nn.Module) -> None:
    """As MobileBERT has where hidden size and embedding size are equal; FSDP2 cannot reduce it."""
    blocks(model)[0].empty = nn.Parameter(torch.zeros(4, 0, dtype=torch.float64))


def loss_with_empty(model: nn.Module, batch: Batch) -> torch.Tensor:
    return tiny_loss(model, batch) + blocks(model)[0].empty.sum()


def nothing(model: nn.Module) -> None:
    """The model as it is."""


def as_users_write(loss: Callable[[Any, Any, Any], torch.Tensor]) -> Callable[[nn.Module, Batch], torch.Tensor]:
    return lambda model, batch: loss(model, model, batch)


KINDS: dict[str, tuple[Callable[[nn.Module], None], Callable[[nn.Module, Batch], torch.Tensor]]] = {
    "forward reads head": (fused_forward, tiny_loss),
    "loss reads head": (nothing, loss_reads_head),
    "penalties": (nothing, loss_with_penalties),
    "read first": (read_first, tiny_loss),
    "reversible": (reversible, tiny_loss),
    "two forwards": (nothing, as_users_write(losses.model_called_twice)),
    "loss calls backbone": (nothing, loss_calls_backbone),
    "loss calls embedding": (nothing, as_users_write(losses.embedded_outside)),
    "head called twice": (nothing, as_users_write(losses.head_called_twice)),
    "own parameters": (add_parameters, loss_uses_parameters),
    "empty parameter": (add_empty, loss_with_empty),
}


@cache
def reading(name: str, kind: str) -> Any:
    """Return what makes a model of a kind."""

    def make() -> nn.Module:
        model = tiny_model(name)
        KINDS[kind][0](model)
        return model

    return make


def evaluates_first(loop: Loop, number: int) -> None:
    """Evaluate twice, the second time after what the first has left gathered; shards stay."""
    for _ in range(2):
        with torch.no_grad():
            loss = loop.loss_of(loop.model, loop.moved(tiny_batch(number))).reshape(())
        assert float(loop.more.setdefault(f"evaluated {number}", loss)) == float(loss)
        loop.model.to(torch.float64)
    if loop.plan is not None:
        assert all(isinstance(p, DTensor) for p in loop.model.parameters() if p.dim() and p.numel())
    loop.step(number)


def _case(name: str, kind: str, layout: str, **options: Any) -> Case:
    return Case(model=reading(name, kind), loss=KINDS[kind][1], layout=layout, max_norm=0.1, **options)


_WITH_LAYOUTS = ("forward reads head", "penalties", "own parameters")
"""Daily under every layout, with accumulation; the others under one."""
CASES = {
    f"llama, {kind}": _case("llama", kind, "zero3", step=evaluates_first)
    for kind in KINDS if kind not in (*_WITH_LAYOUTS, "read first")
}  # fmt: skip
CASES |= {"gpt2, read first, checkpointing": _case("gpt2", "read first", "mixed", prepare=wrap_blocks)}
_WAYS: dict[str, dict[str, Any]] = {
    "": {}, "accumulates": {"accumulation_steps": 2, "reduce": None}, "checkpointing": {"prepare": wrap_blocks},
}  # fmt: skip
CASES |= {
    f"{name}, {kind}, {layout} on {world} {way}": _case(
        name, kind, layout, world=world, **options,
        slow=kind not in _WITH_LAYOUTS or (name, layout, world, way) != ("llama", "everything", 2, "accumulates"),
    )
    for world in (2, 4) for name in ("gpt2", "llama") for kind in KINDS for layout in LAYOUTS
    for way, options in _WAYS.items() if not options or layout in ("mixed", "everything")
}  # fmt: skip
CASES = {f"read, {name}": case for name, case in CASES.items()}
