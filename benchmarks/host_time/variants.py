"""Trainings whose steps are compared: one model in bf16, AdamW, clipped gradients, one sample a micro-step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpu_memory import MODELS
from hf_osdp import OptimalShardedDataParallel
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.modeling.units import find_units, modules_by_name
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep, Precision
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.environment import move_to_device, mp_policy, prepare_model
from hf_osdp.sharding.gradients import clip_grad_norm_
from hf_osdp.sharding.steps import micro_step
from tests.helpers.layouts import _is_block, joined, plan_of
from tests.helpers.steps import make_optimizer

NAMES = ("GPT-2 medium", "BERT large", "Llama 1B")
TOKENS = 512
BF16 = Precision.named("bf16")
_DROPOUT = {
    "GPT2Config": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "BertConfig": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "LlamaConfig": (),
}


def built(name: str) -> nn.Module:
    """Return a model of `MODELS` on the device, without dropout; its weights are never computed."""
    model = MODELS[name]
    sizes = {**model.sizes, **dict.fromkeys(_DROPOUT[model.config], 0.0)}
    config = getattr(transformers, model.config)(**sizes, architectures=[model.architecture])
    with torch.device("cuda"):
        return getattr(transformers, model.architecture)(config).train()


class Plain:
    """Plain autocast."""

    autocasts = True
    untimed = 3
    """Steps to warm up."""

    def __init__(self, name: str) -> None:
        self.model = self.wrapped(built(name))
        self.optimizer = self.made_optimizer()
        ids = torch.randint(0, 300, (1, TOKENS), device="cuda")
        self.batch = {"input_ids": ids, "labels": ids}

    def wrapped(self, model: nn.Module) -> nn.Module:
        return model

    def made_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def micro_step(self, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def step(self, micro_steps: int) -> None:
        """Take one optimizer step."""
        for number in range(1, micro_steps + 1):
            with self.micro_step(number == micro_steps):
                with torch.autocast("cuda", torch.bfloat16, enabled=self.autocasts):
                    loss = self.model(**self.batch).loss / micro_steps
                loss.backward()
                del loss
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()


class DDP(Plain):
    """DistributedDataParallel under autocast."""

    def wrapped(self, model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])

    def micro_step(self, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if is_last else self.model.no_sync()


class StockFSDP2(Plain):
    """`fully_shard` of each block and the root, as Accelerate wraps a model."""

    autocasts = False

    def __init__(self, name: str, *, keep: bool) -> None:
        self.keep = keep
        super().__init__(name)

    def wrapped(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
        modules, units = modules_by_name(model), find_units(model)
        for block in [modules[unit.fqn] for unit in units if _is_block(unit)]:
            fully_shard(block, reshard_after_forward=not self.keep, **how)
        return fully_shard(model, reshard_after_forward=False if self.keep else None, **how)

    def micro_step(self, is_last: bool) -> AbstractContextManager[Any]:
        self.model.set_requires_gradient_sync(is_last)
        return nullcontext()


class Ours(Plain):
    """A plan whose units take these layouts in turn: whether a unit is sharded, and whether it is freed."""

    autocasts = False
    plan: Plan

    def __init__(self, name: str, *, layouts: Sequence[tuple[bool, bool]], blocks: int = 1) -> None:
        self.layouts, self.blocks = layouts, blocks
        super().__init__(name)

    def wrapped(self, model: nn.Module) -> nn.Module:
        prepare_model(model, BF16)
        self.units, world = joined(self.blocks, model), dist.get_world_size()
        plan = plan_of(self.units, world, "zero3", reduce_every_micro_step=False)
        decisions = tuple(
            replace(decision, shard_size=world if shards else 1, reshard_after_forward=frees)
            for decision, (shards, frees) in zip(plan.units, itertools.cycle(self.layouts))
        )
        self.plan = replace(plan, units=decisions)
        apply_plan(model, self.plan, self.units, meshes=Meshes("cuda"), mp_policy=mp_policy(BF16), broadcast=False)
        return move_to_device(model, torch.device("cuda", torch.cuda.current_device()))

    def made_optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model, OptimizerSpec(step=OptimizerStep.FUSED), self.plan, self.units)

    def micro_step(self, is_last: bool) -> AbstractContextManager[Any]:
        return micro_step(self.model, is_last=is_last)

    def clip(self) -> None:
        clip_grad_norm_(self.model.parameters(), 1.0)


class PlainLoop(Plain):
    """`OptimalShardedDataParallel` in one process, with memory for all."""

    autocasts = False
    untimed = 10  # more than its meter measures
    model: OptimalShardedDataParallel

    def wrapped(self, model: nn.Module) -> nn.Module:
        options = {"hardware": "a100-80", "sequence_length": TOKENS, "global_batch_size": 1}
        return OptimalShardedDataParallel(model, options, mixed_precision="bf16")

    def micro_step(self, is_last: bool) -> AbstractContextManager[Any]:
        return self.model.micro_step(is_last=is_last)

    def clip(self) -> None:
        self.model.clip_grad_norm_(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A row of the table."""

    title: str
    make: Callable[[str], Plain]
    """From a model's name."""
    ranks: int = 2
    launched: bool = True
    """Whether the processes have the variables of torchrun."""
    against: str = ""
    """Title of the row that this one is compared with."""
    aim: float | None = None
    """Highest ratio."""


_PLAIN, _DDP = "plain autocast, one process", "DDP under autocast"
_KEPT, _FREED = "stock FSDP2, kept", "stock FSDP2, freed"
_MIXED = ((False, False), (True, False), (True, True))
VARIANTS = (
    Variant(title=_PLAIN, make=Plain, ranks=1, launched=False),
    Variant(title="plain loop", make=PlainLoop, ranks=1, launched=False, against=_PLAIN, aim=1.05),
    Variant(title="the same, torchrun", make=PlainLoop, ranks=1, against=_PLAIN, aim=1.05),
    Variant(title=_DDP, make=DDP),
    Variant(title="all replicated", make=partial(Ours, layouts=((False, False),)), against=_DDP, aim=1.0),
    Variant(title=_KEPT, make=partial(StockFSDP2, keep=True)),
    Variant(title="sharded, kept", make=partial(Ours, layouts=((True, False),)), against=_KEPT),
    Variant(title=_FREED, make=partial(StockFSDP2, keep=False)),
    Variant(title="sharded, freed", make=partial(Ours, layouts=((True, True),)), against=_FREED, aim=0.85),
    Variant(title="1 in 3 replicated", make=partial(Ours, layouts=_MIXED), against=_FREED, aim=0.7),
    Variant(title="4 blocks a unit", make=partial(Ours, layouts=((True, True),), blocks=4), against=_FREED, aim=0.6),
)  # fmt: skip
