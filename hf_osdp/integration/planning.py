"""From a model and a configuration to the one plan that every process runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..planner.description import DType, ModelDescription
from ..planner.evaluate import estimate_plan
from ..planner.hardware import Hardware
from ..planner.job import OptimizerSpec, Precision, TrainingJob
from ..planner.plan import Plan
from ..planner.presets import preset
from ..planner.search import SearchResult, StrategyResult, compare_strategies, search
from ..profiling.describe import describe
from ..profiling.machine import measure_hardware
from ..quantities import format_bytes
from ..runtime.agree import broadcast_plan, on_rank_zero
from ..runtime.given import check_given
from .config import OSDPConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A plan with all that it was made from."""

    plan: Plan
    """The same on every process."""
    description: ModelDescription
    job: TrainingJob
    memory_limit_bytes: int | None
    """The limit that was searched under; None where a plan without one was given."""
    hardware: Hardware | None
    """None where a plan was given: nothing was measured."""
    search: SearchResult | None
    """The search's estimates; on rank 0 only, and None where a plan was given."""
    comparison: tuple[StrategyResult, ...] | None
    """Other strategies at their own best batch sizes; on rank 0 only, where they were asked for."""
    planning_s: float
    """Seconds that describing, measuring and searching took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the caller knows about the run that is being planned."""

    world_size: int
    device_type: str
    """`cpu` or `cuda`."""
    precision: Precision
    sequence_length: int
    """Tokens of one sample."""
    global_batch_size: int
    """Samples of one optimizer step over all processes."""
    micro_batch_size: int | None
    """Samples of one batch where the data loader has fixed it."""
    reduce_every_micro_step: bool | None
    optimizer: OptimizerSpec
    holds_outputs: bool
    """The training loop may keep the model's outputs through backward."""

    def job(self) -> TrainingJob:
        """The job to search for.

        Raises:
            ValueError: the sizes do not fit together, or the precision is not to be had.
        """
        if self.precision.compute is DType.FLOAT16 and self.device_type == "cpu" and self.world_size == 1:
            raise ValueError("fp16 in a single process on the CPU is not supported; use bf16, or start two processes or more.")
        job = TrainingJob(
            global_batch_size=self.global_batch_size,
            precision=self.precision,
            optimizer=self.optimizer,
            holds_outputs=self.holds_outputs,
            micro_batch_size=self.micro_batch_size,
            reduce_every_micro_step=self.reduce_every_micro_step,
        )
        job.micro_batch_sizes(self.world_size)
        return job


def plan_run(model: nn.Module, config: OSDPConfig, facts: RunFacts) -> PlannedRun:
    """Describe the model, learn the hardware, search on rank 0, and agree on the result.

    Every process of the group calls this with the same arguments; without a process group it runs alone.

    Args:
        model: not yet sharded; parameters may be on the meta device.
        config: what the user asked for.
        facts: what the caller knows about the run.

    Returns:
        The planned run. Its plan has been checked on every process.

    Raises:
        InfeasibleError: no plan meets the memory limit.
        PlanError: a given plan cannot be read, or is not for this model and run.
        ValueError: sizes do not fit together, or a name is not known.
    """
    started = time.perf_counter()
    job = facts.job()
    description = describe(
        model,
        sequence_length=facts.sequence_length,
        block_classes=config.block_classes,
        compute_dtype=facts.precision.compute,
        device_type=facts.device_type,
    )
    if config.plan is not None:
        return _given(config, facts, job, description, started)
    hardware = _hardware(config, facts)
    limit = _memory_limit(config, hardware)

    found: SearchResult | None = None

    def find() -> Plan:
        nonlocal found
        found = search(description, hardware, job, limit, strategy=config.strategy)
        return found.plan

    plan = broadcast_plan(on_rank_zero(find))
    plan.check(description, facts.world_size)
    comparison = compare_strategies(description, hardware, job, limit) if found is not None and config.compare else None
    return PlannedRun(
        plan=plan,
        description=description,
        job=job,
        memory_limit_bytes=limit,
        hardware=hardware,
        search=found,
        comparison=comparison,
        planning_s=time.perf_counter() - started,
    )


def _memory_limit(config: OSDPConfig, hardware: Hardware) -> int:
    """Bytes of each device for tensors and what the device reserves: what was asked for, or all that it has.

    Raises:
        ValueError: more was asked for than there is.
    """
    limit, there = config.memory_limit_bytes, hardware.device.memory_bytes
    if limit is not None and limit > there:
        raise ValueError(
            f"memory_limit={format_bytes(limit)} is more than the {format_bytes(there)} of {hardware.device.name};"
            f" use at most {there} bytes, or leave it out for all of them."
        )
    return there if limit is None else limit


def keep_master_weights(model: nn.Module, precision: Precision) -> None:
    """Hold trainable parameters in float32 where training computes in a lower precision, as Accelerate does.

    The dtype is part of a plan, so this comes before planning.
    """
    if precision.compute in (None, DType.FLOAT32, DType.FLOAT64):
        return
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.to(torch.float32)


def _given(config: OSDPConfig, facts: RunFacts, job: TrainingJob, description: ModelDescription, started: float) -> PlannedRun:
    """Run the plan that the user gave, after checking that it is for this run."""

    def load() -> Plan:
        plan = config.plan if isinstance(config.plan, Plan) else Plan.load(Path(str(config.plan)))
        _check_given(plan, config, facts, description, job)
        return plan

    plan = broadcast_plan(on_rank_zero(load))
    plan.check(description, facts.world_size)
    return PlannedRun(
        plan=plan,
        description=description,
        job=job,
        memory_limit_bytes=config.memory_limit_bytes or plan.memory_limit_bytes,
        hardware=None,
        search=None,
        comparison=None,
        planning_s=time.perf_counter() - started,
    )


def _check_given(plan: Plan, config: OSDPConfig, facts: RunFacts, description: ModelDescription, job: TrainingJob) -> None:
    """Refuse a plan that would not run this training, or not fit it.

    Raises:
        PlanError: model, world, batch, sequence length or memory limit differ.
    """
    plan.check(description, facts.world_size)
    limit = config.memory_limit_bytes
    check_given(
        plan,
        memory_limit_bytes=limit,
        peak_bytes=None if limit is None else estimate_plan(plan, description, job).memory.peak_bytes,
        global_batch_size=facts.global_batch_size,
        micro_batch_size=facts.micro_batch_size,
        reduce_every_micro_step=facts.reduce_every_micro_step,
        sequence_length=facts.sequence_length,
    )


def _hardware(config: OSDPConfig, facts: RunFacts) -> Hardware:
    """The hardware that the user named, or what this machine turns out to be.

    Raises:
        ValueError: the hardware has another number of devices or nodes than this run.
    """
    if config.hardware is None:
        hardware = measure_hardware(device_type=facts.device_type)
        if config.nodes not in (None, hardware.nodes):
            raise ValueError(f"nodes={config.nodes}, but the processes are spread over {hardware.nodes}; leave nodes out.")
        return hardware
    if isinstance(config.hardware, Hardware):
        hardware = config.hardware
    else:
        nodes = config.nodes or 1
        if facts.world_size % nodes:
            raise ValueError(f"nodes={nodes} does not divide the {facts.world_size} processes; use a divisor.")
        hardware = preset(config.hardware, nodes=nodes, devices_per_node=facts.world_size // nodes)
    if hardware.world_size != facts.world_size:
        raise ValueError(
            f"The hardware has {hardware.world_size} devices, but {facts.world_size} processes are running;"
            f" start {hardware.world_size} processes, or describe {facts.world_size} devices."
        )
    return hardware
