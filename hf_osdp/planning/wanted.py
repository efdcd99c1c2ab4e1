"""What the user of a plain loop asks for → the one plan that every rank runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from ..distributed.allocator_settings import expands_segments
from ..distributed.consensus import broadcast_plan, on_rank_zero
from ..distributed.mesh import Meshes, world_size
from ..distributed.restart import limit_after_oom
from ..modeling.split_candidates import split_units
from ..planner.description import ModelDescription
from ..planner.hardware import Hardware, check_margin
from ..planner.job import OptimizerSpec, OptimizerStep, Precision, TrainingJob
from ..planner.plan import Plan
from ..planner.profile import Profile, with_block_times
from ..planner.split import WHOLE_BLOCKS, ModelSplit
from ..quantities import parse_bytes
from ..sharding.environment import training_device
from .given import check_given, refuse_a_host_of_the_cpu, warn_of_other_nodes
from .preflight.devices import limit_within

if TYPE_CHECKING:
    from ..modeling.batch import Inputs
    from .recalibrate import Problem, Round

_DECISIONS = ("recompute", "host_offload", "offload_activations", "reduce_every_micro_step")
_PLANNING_ONLY = (
    "strategy",
    "hardware",
    "optimizer",
    "inputs",
    "profile",
    "recalibrate",
    "memory_margin",
    *_DECISIONS,
    "operator_splitting",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan, the same on every rank, with what it was found for."""

    plan: Plan
    hardware: Hardware
    problem: Problem | None
    """Rank 0's, with corrections in it where plans were tried."""
    rounds: tuple[Round, ...]
    """Plans that were tried."""
    meshes: Meshes | None
    """Made for the trials, for training to use again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The arguments of `OptimalShardedDataParallel`, which explains them; None is what was not said."""

    memory_limit: int | float | str | None
    memory_margin: float | None
    sequence_length: int | None
    global_batch_size: int | None
    micro_batch_size: int | None
    strategy: str | None
    block_classes: tuple[str, ...] | None
    precision: Precision
    hardware: Hardware | str | None
    optimizer: OptimizerSpec | None
    inputs: Inputs | None
    profile: Profile | str | Path | None = None
    recalibrate: bool | None = None
    recompute: bool | None = None
    host_offload: bool | None = None
    offload_activations: bool | None = None
    reduce_every_micro_step: bool | None = None
    operator_splitting: bool | None = None

    def check(self, *, planning: bool) -> None:
        """Refuse what is missing for planning, or of no use without; before anything is changed.

        Raises:
            ValueError: an argument is missing, of no use, or not of its type.
        """
        if self.optimizer is not None and not isinstance(self.optimizer, OptimizerSpec):
            kind = type(self.optimizer).__name__
            raise ValueError(
                f"optimizer is of type {kind}; give an OptimizerSpec, and make the optimizer from the sharded model's parameters."
            )
        if self.memory_limit is not None:
            parse_bytes(self.memory_limit)
        if self.memory_margin is not None:
            check_margin(self.memory_margin)
        if planning:
            if missing := [name for name in ("sequence_length", "global_batch_size") if getattr(self, name) is None]:
                raise ValueError(f"Planning needs {' and '.join(missing)}; pass them, or give a plan.")
            if self.profile is not None and self.hardware is not None:
                raise ValueError("profile already says what the hardware is; leave hardware out.")
        elif unused := [name for name in _PLANNING_ONLY if getattr(self, name) is not None]:
            left = "it" if len(unused) == 1 else "them"
            raise ValueError(f"A given plan leaves no use for {' and '.join(unused)}; leave {left} out, or leave plan out to plan here.")

    def load(self, plan: Plan | str | Path) -> Plan:
        """The plan that was given, checked, the same on every rank. Collective.

        Raises:
            PlanError: it cannot be read, differs between ranks, or is not what is asked for.
        """

        def read() -> Plan:
            given = plan if isinstance(plan, Plan) else Plan.load(plan)
            check_given(
                given,
                memory_limit_bytes=None if self.memory_limit is None else parse_bytes(self.memory_limit),
                global_batch_size=self.global_batch_size,
                micro_batch_size=self.micro_batch_size,
                sequence_length=self.sequence_length,
            )
            return given

        given = broadcast_plan(on_rank_zero(read))
        warn_of_other_nodes(given)
        return given

    def search(self, model: nn.Module) -> Found:
        """Measure together, describe and search on rank 0, and give every rank the plan. Collective.

        Raises:
            InfeasibleError: no plan meets the limit.
            HardwareError: the hardware's name is not known.
            ProfileError: the profile cannot be read, or is of another model.
            ValueError: sizes, limit and hardware do not fit together, or there is no memory beside the device's.
        """
        from .recalibrate import Problem

        device_type = training_device().type
        refuse_a_host_of_the_cpu(device_type, host_offload=self.host_offload, offload_activations=self.offload_activations)
        job = self._job(device_type)
        profile = self._profile()
        hardware = self._hardware(device_type, profile)
        limit = self._limit_bytes(hardware)
        problems: list[Problem] = []

        def find() -> Plan:
            description = self._describe(model, device_type)
            if profile is not None:
                description = with_block_times(description, profile)
            problem = Problem(
                description=description, hardware=hardware, job=job, memory_limit_bytes=limit, strategy=self.strategy or "osdp"
            )
            if self.operator_splitting is not False and (profile is None or not profile.segments):  # which are times of whole blocks
                problem = problem.with_best_split(model, lambda split: self._describe(model, device_type, split), vocabulary=False)
            problems.append(problem)
            return problem.solve()

        plan = broadcast_plan(on_rank_zero(find))
        problem = problems[0] if problems else None
        rounds: tuple[Round, ...] = ()
        meshes: Meshes | None = None
        if self.recalibrate:
            plan, rounds, problem, meshes = self._tried(model, plan, problem, job)
        return Found(plan=plan, hardware=hardware, problem=problem, rounds=rounds, meshes=meshes)

    def _tried(
        self, model: nn.Module, plan: Plan, problem: Problem | None, job: TrainingJob
    ) -> tuple[Plan, tuple[Round, ...], Problem | None, Meshes | None]:
        """The plan that stands after trials on a copy of the model."""
        from ..modeling.batch import training_batch
        from .probe import Trial, probe
        from .recalibrate import recalibrate

        device = training_device()
        units = split_units(model, plan.split, self.block_classes, low_precision=self.precision.compute is not None)
        meshes = Meshes(device.type) if dist.is_initialized() else None
        inputs = self.inputs or training_batch(model, self.sequence_length)
        trial = Trial(model=model, units=units, job=job, inputs=inputs, device=device)
        plan, rounds, corrected = recalibrate(plan, problem, lambda tried: probe(tried, trial, meshes))
        if meshes is not None:
            meshes.keep(plan)
        return plan, rounds, corrected, meshes

    def _describe(self, model: nn.Module, device_type: str, split: ModelSplit = WHOLE_BLOCKS) -> ModelDescription:
        from ..tracing.describe import describe

        return describe(
            model,
            sequence_length=self.sequence_length,
            block_classes=self.block_classes,
            compute_dtype=self.precision.compute,
            device_type=device_type,
            inputs=self.inputs,
            split=split,
        )

    def _profile(self) -> Profile | None:
        """The profile that was named, from rank 0's file."""
        if self.profile is None or isinstance(self.profile, Profile):
            return self.profile
        text = on_rank_zero(lambda: Profile.load(self.profile).to_json())
        return Profile.from_json(text, source=str(self.profile))

    def _job(self, device_type: str) -> TrainingJob:
        job = TrainingJob(
            global_batch_size=self.global_batch_size,
            precision=self.precision,
            optimizer=self.optimizer or plain_adamw(device_type),
            micro_batch_size=self.micro_batch_size,
            expandable_segments=expands_segments(),
            **{name: getattr(self, name) for name in _DECISIONS},
        )
        job.micro_batch_sizes(world_size())
        return job

    def _hardware(self, device_type: str, profile: Profile | None) -> Hardware:
        from ..measurement.machine import hardware_of_run

        hardware = hardware_of_run(self.hardware if profile is None else profile.hardware, device_type=device_type)
        return hardware.with_margin(self.memory_margin)

    def _limit_bytes(self, hardware: Hardware) -> int:
        """The limit over tensors and what the device reserves; `search` takes the latter off."""
        device = hardware.device
        if self.memory_limit is None:
            return limit_after_oom(device.memory_bytes)
        limit = parse_bytes(self.memory_limit)
        return limit_after_oom(limit_within(device, limit, said=f"memory_limit={self.memory_limit!r}"))


def plain_adamw(device_type: str) -> OptimizerSpec:
    """What `torch.optim.AdamW(model.parameters())` does: foreach kernels on CUDA, one tensor after the other on the CPU."""
    return OptimizerSpec(name="adamw", states=2, step=OptimizerStep.FOR_LOOP if device_type == "cpu" else OptimizerStep.FOREACH)
