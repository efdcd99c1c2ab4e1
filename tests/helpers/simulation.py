"""Estimates beside FSDP2's real step on fake tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import transformers
import yaml
from torch import nn

from hf_osdp.modeling.build import build_on_meta
from hf_osdp.planner.cost.memory import MemoryEstimate, estimate_memory
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.description import GatherSpan, ModelDescription
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.split import WHOLE_BLOCKS, ModelSplit
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep, Precision, TrainingJob
from hf_osdp.planner.wire import WireFormat
from hf_osdp.tracing.describe import describe
from tests.helpers.fake_step import Simulation, simulate

LAYOUTS = ("ddp", "zero2", "zero3", "two_stage", "hsdp", "mixed")


def choices_of_layout(layout: str, description: ModelDescription, world: int) -> list[UnitLayout]:
    """One choice a unit: one layout for all, or in `mixed` six that take turns.

    Two stages take the world as pairs of ranks.
    """
    half = max(1, world // 2)
    turns = {
        "ddp": [(1, False, 1)], "zero2": [(world, True, 1)], "zero3": [(world, False, 1)],
        "two_stage": [(world, False, 2)], "hsdp": [(half, False, 1)],
        "mixed": [
            (1, False, 1), (world, False, 1), (half, True, 1), (2, False, 1), (world, True, 1), (half, False, 2),
        ],
    }[layout]  # fmt: skip
    choices = []
    for index, unit in enumerate(description.units):
        shard_size, keep, stage_size = turns[index % len(turns)]
        kept = unit.span is GatherSpan.STEP or (unit.span is GatherSpan.USE and (keep or world == 1))
        choices.append(UnitLayout(shard_size=shard_size, reshard_after_forward=not kept, stage_size=stage_size))
    return choices


MODELS = yaml.safe_load(Path(__file__).with_name("tiny.yaml").read_text(encoding="utf-8"))["simulated"]


@lru_cache
def built(name: str) -> nn.Module:
    """Return a model on the meta device; of `frozen`, norms and embedding alone are trained."""
    sizes = dict(MODELS[name])
    architecture = sizes.pop("of")
    config_class = getattr(transformers, architecture).config_class
    model = build_on_meta(config_class(**sizes, architectures=[architecture]))
    if name == "frozen":
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in parameter_name or "embed" in parameter_name)
    return model


@lru_cache
def _described(name: str, **options: Any) -> ModelDescription:
    return describe(built(name), **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A plan of one of the models above; tuples are taken in turns by the units, of activations by the blocks."""

    model: str = "gpt2"
    layout: str = "zero3"
    world: int = 8
    length: int = 128
    samples: int = 4
    steps: int = 1
    """Micro-steps."""
    precision: str = "no"
    optimizer: OptimizerStep = OptimizerStep.FUSED
    holds_outputs: bool = False
    device_type: str = "cuda"
    split: ModelSplit = WHOLE_BLOCKS
    checkpointing: bool = False
    activations: tuple[Activations, ...] = (Activations.SAVE,)
    turn: int | None = None
    """Number of the way to recompute, or none, that the first block takes; the others take the ways in turn."""
    on_host: tuple[bool, ...] = (False,)
    hold: tuple[bool, ...] = (False,)
    states_on_host: tuple[bool, ...] = (False,)
    wires: tuple[dict[str, WireFormat], ...] = ({},)
    """What units send in fewer bits, as fields of `UnitLayout`; replicated units send to replicas alone."""

    def __str__(self) -> str:
        """Only what differs from the defaults, for the names of tests."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = {name: value.describe() if isinstance(value, ModelSplit) else value for name, value in values.items()}
        return ", ".join(f"{f.name} {shown[f.name]}" for f in fields(self) if values[f.name] != f.default)

    @property
    def _precision(self) -> Precision:
        return Precision.named(self.precision, autocast=self.world == 1 and not any(self.on_host))

    @property
    def description(self) -> ModelDescription:
        return _described(
            self.model, sequence_length=self.length, compute_dtype=self._precision.compute,
            autocast=self._precision.autocast, device_type=self.device_type, split=self.split,
            activation_checkpointing=self.checkpointing, partial_recomputation=self.turn is not None,
            recomputation=self.turn is not None or self.activations != (Activations.SAVE,),
        )  # fmt: skip

    @property
    def job(self) -> TrainingJob:
        return TrainingJob(
            global_batch_size=self.world * self.samples * self.steps, precision=self._precision,
            optimizer=OptimizerSpec(step=self.optimizer), holds_outputs=self.holds_outputs,
        )  # fmt: skip

    @property
    def batch(self) -> Batch:
        return Batch(micro_batch_size=self.samples, accumulation_steps=self.steps)

    @property
    def layouts(self) -> list[UnitLayout]:
        description = self.description
        found = choices_of_layout(self.layout, description, self.world)
        for index, unit in enumerate(description.units):
            hold, away, states, wires = (
                each[index % len(each)] for each in (self.hold, self.on_host, self.states_on_host, self.wires)
            )
            shards = found[index].shard_size
            sends_to = {"gather_wire": shards, "reduce_wire": shards, "replica_wire": self.world // shards}
            found[index] = replace(
                found[index], reduce_every_micro_step=not hold, on_host=away,
                states_on_host=bool(states and unit.trainable_numel and not away),
                **{name: wire for name, wire in wires.items() if sends_to[name] > 1},
            )  # fmt: skip
        for number, index in enumerate(sorted(description.recomputable)):
            choices = self.activations
            if self.turn is not None:
                ways = (*description.recomputations[index], None)
                number, choices = number + self.turn, tuple(Activations(recomputation=way) for way in ways)
            found[index] = replace(found[index], activations=choices[number % len(choices)])
        missing = set(self.activations) - {layout.activations for layout in found} - {Activations.SAVE}
        assert not missing, "the case is not what it is called"
        return found

    def run(self) -> tuple[MemoryEstimate, Simulation]:
        """Return the estimate and the simulation."""
        return estimate_and_simulation(
            built(self.model), self.description, self.layouts, job=self.job, batch=self.batch, world=self.world,
            device_type=self.device_type, activation_checkpointing=self.checkpointing,
        )  # fmt: skip

    def check(self, *, under: float, over: float) -> tuple[MemoryEstimate, Simulation]:
        """Run, and hold (estimate - simulated) / simulated between these bounds; falling short runs out of memory."""
        estimate, simulated = self.run()
        error = estimate.peak_bytes / simulated.peak_bytes - 1
        assert -under <= error <= over, f"{error:+.2%}"
        return estimate, simulated


def estimate_and_simulation(
    model: Any, description: ModelDescription, layouts: list[UnitLayout], *, job: TrainingJob, batch: Batch,
    world: int, **options: Any,
) -> tuple[MemoryEstimate, Simulation]:  # fmt: skip
    """Return the estimate of a plan, and its step on fake tensors; `options` are those of `simulate`."""
    plan = Plan.of(description, layouts, batch, world_size=world)
    simulated = simulate(model, plan, description=description, job=job, **options)
    return estimate_memory(description, layouts, world, job, batch), simulated
