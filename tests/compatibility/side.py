"""The two sides of a row: their trainer, arguments, accelerator, and wrapper of a plain model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from transformers import TrainingArguments

import hf_osdp
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import SearchResult
from hf_osdp.preparation import find_plan as finding

from . import data as sets
from . import models
from .row import Figures, Oracle

STEPS, SAMPLES = 4, 2
"""Optimizer steps of a row, and micro-batch size of each of two processes."""
_LAYOUTS = ((2, False), (1, True), (2, True), (1, False))
"""Layouts as (shard size, freed after forward): ZeRO-2, replicated, ZeRO-3, replicated and kept."""
_TIMES = ("runtime", "per_second", "_time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The stock side; `Ours` is the other one.

    Attributes:
        folder: folder for the training's files; the same on every rank.
    """

    is_stock: ClassVar[bool] = True
    folder: Path
    oracle: Oracle = Oracle.DDP

    @property
    def samples(self) -> int:
        return SAMPLES * 2 // self.oracle.processes

    def trainer(self, base: type = transformers.Trainer) -> type:
        return base

    def arguments(self, cls: type = TrainingArguments, **changes: Any) -> Any:
        options: dict[str, Any] = {
            "output_dir": str(self.folder), "max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-2,
            "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "seed": 5,
            "per_device_train_batch_size": self.samples, "per_device_eval_batch_size": self.samples,
            "lr_scheduler_type": "linear", "weight_decay": 0.1, "adam_epsilon": 1e-5, "bf16": False,
            "logging_nan_inf_filter": False, "gradient_checkpointing": False,
        }  # fmt: skip
        return cls(**{**options, **self._own(), **changes})

    def _own(self) -> dict[str, Any]:
        if self.oracle is Oracle.FSDP2:
            return {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
        return {}

    def accelerator(self, **options: Any) -> Accelerator:
        return Accelerator(cpu=True, **options)

    def wrapped(self, model: nn.Module, **options: Any) -> nn.Module:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return nn.parallel.DistributedDataParallel(model)

    def prepared(self) -> AbstractContextManager[Any]:
        """Return what a training needs around it."""
        if self.oracle is not Oracle.FSDP2:
            return nullcontext()
        return mock.patch.object(transformers.trainer, "Accelerator", _ShardedOnCpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours(Side):
    """This package's side, under a plan in which neighbouring units have different layouts."""

    is_stock: ClassVar[bool] = False
    shift: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)

    def trainer(self, base: type = transformers.Trainer) -> type:
        return hf_osdp.with_osdp(base)

    def _own(self) -> dict[str, Any]:
        return {"fsdp_config": {"osdp": self.config()}}

    def config(self, **changes: Any) -> dict[str, Any]:
        """Return the options of OSDP that keep the stock side's micro-batch."""
        kept = {"hardware": "cpu", "micro_batch_size": SAMPLES, "operator_splitting": False}
        return {**kept, **changes, **self.changes}

    def accelerator(self, **options: Any) -> Accelerator:
        return hf_osdp.OSDPAccelerator(osdp=self.config(micro_batch_size=None), cpu=True, **options)

    def wrapped(self, model: nn.Module, **options: Any) -> nn.Module:
        return hf_osdp.OptimalShardedDataParallel(model, self.config(**options))

    def prepared(self) -> AbstractContextManager[Any]:
        """Give every plan that a search finds several layouts; only replicated ones if the optimizer needs whole
        parameters.
        """
        stock = finding.search

        def mixed(problem: PlanningProblem) -> SearchResult:
            found, whole = stock(problem), problem.job.optimizer.needs_whole
            return replace(found, plan=with_mixed_layouts(found.plan, self.shift, whole=whole))

        return mock.patch.object(finding, "search", mixed)


def with_mixed_layouts(plan: Plan, shift: int, *, whole: bool = False) -> Plan:
    """Return the plan with layouts in turn, starting from number `shift`; no unit is sharded if parameters stay
    `whole`.
    """
    layouts = islice(cycle(_LAYOUTS), shift, None)
    units = [
        replace(unit, shard_size=1 if whole else size, reshard_after_forward=frees, stage_size=1)
        for unit, (size, frees) in zip(plan.units, layouts, strict=False)
    ]
    return replace(plan, units=tuple(units))


class _ShardedOnCpu(Accelerator):
    """Accelerate's `Accelerator`, made to use FSDP on CPU processes; by default it replicates the model there."""

    def __init__(self, *args: Any, fsdp_plugin: Any = None, **kwargs: Any):
        super().__init__(*args, fsdp_plugin=fsdp_plugin, **kwargs)
        AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def made(spec: Any) -> Any:
    """Return what a row names: a function of `models` or `data` or a class of a tiny model, called without arguments
    or, as `{name: arguments}`, with them; anything else as it is.
    """
    match spec:
        case str():
            name, arguments = spec, {}
        case dict() if len(spec) == 1 and isinstance(next(iter(spec.values())), dict):
            ((name, arguments),) = spec.items()
        case _:
            return spec
    function = getattr(models, name, None) or getattr(sets, name, None)
    return models.tiny(name, **arguments) if function is None else function(**arguments)


def trained(
    side: Side, model: Any = "gpt2", data: Any = "tokens", *,
    base: type = transformers.Trainer, arguments: type = TrainingArguments, collator: str | None = None,
    evaluated: Any = None, given: Mapping[str, Any] | None = None,
    then: Callable[[Side, Any], dict[str, float]] | None = None, **options: Any,
) -> Figures:  # fmt: skip
    """Train under a Trainer; `then` is called with it after training, and its result is compared too.

    `given` holds further arguments of the trainer, `options` those of its `TrainingArguments`.
    """
    given = dict(given or {})
    if model is not None:
        given["model"] = made(model)
    if collator is not None:
        given["data_collator"] = getattr(sets, collator)
    if evaluated is not None:
        given["eval_dataset"] = made(evaluated)
    trainer = side.trainer(base)(args=side.arguments(arguments, **options), train_dataset=made(data), **given)
    trainer.train()
    return [*logged(trainer), *([] if then is None else [then(side, trainer)])]


def logged(trainer: Any) -> Figures:
    def figures(entry: Mapping[str, Any]) -> dict[str, float]:
        numbers = {name: value for name, value in entry.items() if isinstance(value, (int, float))}
        return {name: float(value) for name, value in numbers.items() if not any(time in name for time in _TIMES)}

    return [figures(entry) for entry in trainer.state.log_history]


def mean_over_ranks(value: torch.Tensor | float) -> float:
    total = torch.as_tensor(value, dtype=torch.float64).detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def read_back(folder: Path, like: nn.Module) -> dict[str, float]:
    """Return the sums of a model of this class that was saved in the folder."""
    dist.barrier()
    return sums(type(like).from_pretrained(folder).state_dict())


def sums(state: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the sum of the sizes of each tensor's elements."""
    return {name: float(value.detach().double().abs().sum()) for name, value in state.items()}
