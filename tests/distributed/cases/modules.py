"""Ranks that run different modules, as DDP trains them with `find_unused_parameters`: one process takes the ranks'
batches in turn. Dropped layers, tasks, pictures, experts without tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from hf_osdp.modeling.build import disable_cache
from hf_osdp.modeling.units import find_units
from hf_osdp.tracing.pictures import UsualBatch
from tests.compatibility.models import of
from tests.helpers.architectures import TINY, VISION, tiny_architecture, tiny_vision
from tests.helpers.layouts import joined
from tests.helpers.small_models import InDouble
from tests.helpers.training import Case, Loop

WIDTH, STEPS = 8, 4
Batch = dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None = None, uses: bool | None = False) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x + seen if uses else x)))


class Parts(nn.Module):
    """A tower for pictures, layers that may be dropped, one for each task, parameters that some losses use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.picture = nn.Linear(4, WIDTH)
        self.tower = nn.ModuleList(Block() for _ in range(2))
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.tasks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.first, self.second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(
        self, x: torch.Tensor, *, picture: bool = False, layers: tuple[int, ...] = (0, 1, 2), task: int = 0,
        own: str | None = None, uses: bool | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Add what the tower sees, or give it to the layers, which use it or not."""
        hidden, seen = self.embed(x), None
        if picture:
            seen = self.picture(x)
            for block in self.tower:
                seen = block(seen)
            hidden = hidden + seen if uses is None else hidden
        for number in layers:
            hidden = self.layers[number](hidden, seen, uses)
        scale = 1 if own is None else getattr(self, own)
        return (self.head(self.tasks[task](hidden)) * scale).square().mean()


def parts() -> nn.Module:
    torch.manual_seed(0)
    return Parts().double()


units_of_parts = partial(find_units, block_classes=["Block"])


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


# What a rank's model does at a step.


def pictures(step: int, rank: int) -> Batch:
    return {"picture": step > 1 and (step + rank) % 2 == 0}


def dropped_layers(step: int, rank: int) -> Batch:
    drawn = torch.rand(3, generator=torch.Generator().manual_seed(10 * step + rank)) > 0.4
    return {"layers": tuple(drawn.nonzero().flatten().tolist())}


def tasks(step: int, rank: int) -> Batch:
    return {"task": rank % 2 if step % 3 else 0}


def parameters(step: int, rank: int) -> Batch:
    return {"own": ("first", "second")[rank] if step % 2 else None}


def orders(step: int, rank: int) -> Batch:
    return {"layers": ((0, 1, 2), (2, 0, 1), (1, 1, 0))[(step + rank) % 3], "picture": rank == step % 2}


def several(step: int, rank: int) -> Batch:
    return {**pictures(step, rank), **dropped_layers(step, rank), **tasks(step, rank)}


def passed_on(step: int, rank: int) -> Batch:
    """What layers do not use gets no gradient: with zeros, as FSDP2 gives, AdamW would decay the tower."""
    return {"picture": True, "uses": step % 2 == 1}


def micro_steps(step: int, part: int) -> Batch:
    """Two ranks' micro-steps, one after the other."""
    number = 2 * step + part // 2
    return {**pictures(number, part % 2), **parameters(number, part % 2)}


def pictures_early(step: int, part: int) -> Batch:
    """Only in the first micro-step, on both ranks, on none, on rank 1."""
    return {"picture": part < 2 and ((True, True), (False, False), (False, True))[step % 3][part]}


@cache
def batches(kind: Callable[[int, int], Batch]) -> Any:
    def made(model: nn.Module) -> Any:
        return lambda step, *, part=0, parts=1: {"x": inputs(step, part), **kind(step, part)}

    return made


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch)


def adamw(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, weight_decay=0.1, eps=1e-4, foreach=False)


def evaluates(loop: Loop, number: int) -> None:
    """Evaluate after each step, this rank by its own modules."""
    loop.step(number)
    rank, world = loop.place
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for other in range(2) if world == 1 else (rank,):
            total += loop.loss_of(loop.model, loop.batch_of(number + 50, part=other, parts=2))
    if world > 1:
        torch.distributed.all_reduce(total)
    loop.more[f"evaluated {number}"] = total


def case(kind: Callable[[int, int], Batch], layout: str, world: int = 2, k: int = 1, **options: Any) -> Case:
    return Case(
        model=parts, units=units_of_parts, batches=batches(kind), loss=loss, optimizer=adamw, layout=layout,
        world=world, accumulation_steps=k, parts_alone=world * k, max_norm=None,
        **{"steps": 6 // k, "step": evaluates if world * k == 2 else Loop.step, **options},
    )  # fmt: skip


_LAYOUTS = ("everything", "zero3", "zero2", "replicate", "mixed")
CASES = {
    f"{kind.__name__}, {layout}": case(kind, layout, slow=layout != "everything" and kind is not passed_on)
    for kind in (pictures, dropped_layers, tasks, parameters, orders, passed_on) for layout in _LAYOUTS
}  # fmt: skip
CASES |= {f"several, {layout} on 4": case(several, layout, world=4, slow=True)
          for layout in ("hsdp", "mixed", "two_stage")}  # fmt: skip
CASES |= {
    f"micro-steps, {layout}, {name}": case(
        micro_steps, layout, k=2, reduce=reduce, steps=4, slow=(layout, name) != ("mixed", "by unit")
    )
    for layout in ("zero3", "replicate", "mixed")
    for name, reduce in (("holds", False), ("reduces", True), ("by unit", None))
}
CASES |= {
    f"{kind.__name__}, {layout}, blocks joined": replace(
        case(kind, layout), units=partial(joined, 3, block_classes=["Block"]),
        slow=layout != "zero3" or kind in (pictures, dropped_layers),
    )
    for kind in (pictures, dropped_layers, tasks, orders) for layout in ("zero3", "mixed")
}  # fmt: skip
# Replicas wait for the last micro-step with their all-reduce, for which FSDP2 needs a gradient there.
CASES |= {"early micro-steps": case(pictures_early, "mixed", k=2)}


# ---- models of transformers

_DROPS = {"encoder_layers": 3, "decoder_layers": 3, "encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}


@cache
def made(name: str, *frozen: str) -> Any:
    """Return what makes a model, with parts of these names frozen."""

    def make() -> nn.Module:
        if name in VISION:
            model = tiny_vision(name)
        else:
            model = tiny_architecture(name, **_DROPS) if name in TINY else of(name).double().train()
        for part, parameter in model.named_parameters():
            parameter.requires_grad_(not part.startswith(frozen) if frozen else True)
        disable_cache(model)
        return model

    return make


def random_batches(model: nn.Module) -> Any:
    """Random inputs, in every second batch of a rank with pictures; in the first step no rank has any."""

    def random_batch(step: int, part: int) -> Batch:
        made = torch.Generator().manual_seed(100 * step + part)
        images = int(step > 0 and (step + part) % 2 == 0) if hasattr(model.config, "vision_config") else None
        batch = UsualBatch(model, 24, images)(2)
        batch.pop("labels")
        for name, value in batch.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                batch[name] = torch.randn(value.shape, generator=made, dtype=torch.float64)
            elif name in ("input_ids", "decoder_input_ids"):
                random = torch.randint(3, 90, value.shape, generator=made)
                batch[name] = torch.where(value < 99, random, value)
        return batch

    drawn = {(step, part): random_batch(step, part) for step in range(STEPS) for part in range(2)}

    def batch_of(step: int, *, part: int = 0, parts: int = 1) -> Batch:
        torch.manual_seed(10 * step + part)  # LayerDrop's
        return dict(drawn[step, part])

    return batch_of


def logits_squared(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).logits.square().mean()


MODELS = {
    "llava": made("LlavaForConditionalGeneration"),
    "llava, frozen tower": made("LlavaForConditionalGeneration", "model.vision_tower"),
    "whisper": made("WhisperForConditionalGeneration"),
    "switch": made("SwitchTransformersForConditionalGeneration"),
}
CASES |= {
    f"{name}, {layout}": Case(
        model=make, batches=random_batches, loss=logits_squared, optimizer=partial(adamw, lr=0.01), layout=layout,
        parts_alone=2, steps=STEPS, max_norm=None, within=InDouble,
        slow=(layout, name) != ("mixed", "switch"),
    )
    for name, make in MODELS.items() for layout in ("mixed", "zero3", "everything")
}  # fmt: skip
CASES = {f"modules, {name}": case for name, case in CASES.items()}
