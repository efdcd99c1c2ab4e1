"""From a model and a configuration to the one plan that every process runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.allocator_settings import expands_segments
from ..distributed.consensus import broadcast_plan, on_rank_zero, require_same_run
from ..distributed.device import own_gpu
from ..distributed.mesh import Meshes
from ..distributed.restart import limit_after_oom
from ..errors import HardwareError, InfeasibleError, PlanError
from ..measurement.machine import hardware_of_run
from ..modeling.batch import Inputs, Loss, check_inputs, training_batch
from ..planner.cost.evaluate import estimate_plan
from ..planner.description import Activations, DType, ModelDescription
from ..planner.hardware import Hardware
from ..planner.job import OptimizerSpec, Precision, TrainingJob
from ..planner.plan import Plan
from ..planner.profile import Profile, with_block_times
from ..planner.search.search import SearchResult, StrategyResult, compare_strategies
from ..planner.split import WHOLE_BLOCKS, ModelSplit
from ..quantities import format_bytes
from ..sharding.host_offload import uses_host
from .config import OSDPConfig
from .describing import Describer
from .given import check_given, refuse_a_host_of_the_cpu, warn_of_other_nodes
from .preflight.devices import limit_within
from .preflight.findings import Finding
from .preflight.folder import RunFolder
from .preflight.model import check_model
from .probe import Trial, probe
from .recalibrate import Problem, Round, recalibrate
from .run_checks import checked

_log = logging.getLogger(__name__)


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
    """The plan's estimates; on rank 0 only, and None where a plan was given."""
    comparison: tuple[StrategyResult, ...] | None
    """Other strategies at their own best batch sizes; on rank 0 only, where they were asked for."""
    planning_s: float
    """Seconds that describing, measuring, searching and trying took."""
    rounds: tuple[Round, ...] = ()
    """Plans that were tried; description, job and hardware have the corrections in them on rank 0."""
    meshes: Meshes | None = None
    """Made for the trials, for training to use again."""
    findings: tuple[Finding, ...] = ()
    """What is to be said of the run before it starts."""

    @property
    def problem(self) -> Problem | None:
        """What the plan was searched for; None where it was given."""
        if self.hardware is None or self.memory_limit_bytes is None:
            return None
        return Problem(
            description=self.description,
            hardware=self.hardware,
            job=self.job,
            memory_limit_bytes=self.memory_limit_bytes,
            strategy=self.plan.strategy,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the caller knows about the run that is being planned."""

    world_size: int
    device_type: str
    """`cpu` or `cuda`."""
    precision: Precision
    sequence_length: int
    """Tokens of one sample; 1 where samples have none."""
    inputs: Inputs | None = None
    """From a number of samples to a batch, as the data gives them; None makes one for a transformers model."""
    loss: Loss | None = None
    """How the loop makes the loss of a batch, where it is not the model's own."""
    other_models: Mapping[str, int] = field(default_factory=dict)
    """Bytes that models beside the trained one take on the device throughout, by name."""
    global_batch_size: int
    """Samples of one optimizer step over all processes."""
    micro_batch_size: int | None
    """Samples of one batch where the data loader has fixed it."""
    reduce_every_micro_step: bool | None
    optimizer: OptimizerSpec
    holds_outputs: bool
    """The training loop may keep the model's outputs through backward."""
    clips_gradients: bool = False
    """Each step clips the norm of all gradients."""
    activation_checkpointing: bool = False
    """Blocks will be recomputed in backward; a model that has it switched on already needs no word of it here."""
    checkpoint_wrapper: bool = False
    """It is Accelerate that will recompute them, in torch's wrapper; else the model does it."""
    reads_loss_alone: bool = False
    """The loop gives labels to forward and takes the loss from it, and nothing else, in training."""
    cpu_offload: bool = False
    """Every unit's parameters, gradients and optimizer states are to live in the host's memory; else as many as the plan needs."""
    trains: bool = True
    """The model is there to be trained, and not to be evaluated alone."""
    frozen_in_optimizer: int = 0
    """Frozen parameters that the optimizer was given."""
    folder: RunFolder | None = None
    """Where the run writes; None where nobody has said."""

    def job(self, config: OSDPConfig) -> TrainingJob:
        """The job to search for, with what the user has fixed.

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
            clips_gradients=self.clips_gradients,
            micro_batch_size=self.micro_batch_size,
            reduce_every_micro_step=self.reduce_every_micro_step,
            recompute=config.recompute,
            host_offload=True if self.offloads_all else config.host_offload,
            offload_activations=config.offload_activations,
            expandable_segments=expands_segments(),
        )
        job.micro_batch_sizes(self.world_size)
        return job

    @property
    def offloads_all(self) -> bool:
        """All states are to leave the device; the CPU has no other memory than its own."""
        return self.cpu_offload and self.device_type != "cpu"


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
        LaunchError: ranks run different versions.
        PlanError: a given plan cannot be read, or is not for this model and run.
        PlanMismatchError: ranks have different models, plans or options.
        PreflightError: the run would fail, or train something else than was meant.
        ValueError: sizes do not fit together, or a name is not known.
    """
    if facts.precision.autocast and not (facts.offloads_all or config.host_offload):
        try:
            run = _plan_run(model, config if config.plan is not None else replace(config, host_offload=False), facts)
            if not uses_host(run.plan):
                return run
        except InfeasibleError:
            if facts.device_type == "cpu" or config.host_offload is False:
                raise
    # units on the host are FSDP2's to run, in its own mixed precision
    return _plan_run(model, config, replace(facts, precision=replace(facts.precision, autocast=False)))


def _plan_run(model: nn.Module, config: OSDPConfig, facts: RunFacts) -> PlannedRun:
    """`plan_run` in the precision of the facts."""
    started = time.perf_counter()
    require_same_run(model, config, facts)
    job = facts.job(config)
    _check_checkpointing(config, facts)
    check_model(model, trains=facts.trains)
    if config.recalibrate:
        _check_recalibration(facts)
    if config.inputs is not None:
        check_inputs(config.inputs, model)

    described = Describer(model, config, facts).describe
    if config.plan is not None:
        run = _given(config, facts, job, described, started)
        return replace(run, findings=checked(run, model, config, facts))
    description = described(WHOLE_BLOCKS)
    profile = _profile(config)
    if profile is not None:
        description = with_block_times(description, profile)
    hardware = _hardware(config, facts, profile)
    _check_host(hardware, config, facts)
    limit = _memory_limit(config, hardware)
    problem = Problem(description=description, hardware=hardware, job=job, memory_limit_bytes=limit, strategy=config.strategy)
    splits = config.operator_splitting and _may_split(facts, profile)
    vocabulary = facts.reads_loss_alone if config.split_vocabulary is None else config.split_vocabulary
    plan = broadcast_plan(
        on_rank_zero(lambda: (problem.with_best_split(model, described, vocabulary=vocabulary) if splits else problem).solve())
    )
    if plan.split != description.split:
        problem = replace(problem, description=described(plan.split))
    plan.check(problem.description, facts.world_size)
    rounds: tuple[Round, ...] = ()
    meshes: Meshes | None = None
    if config.recalibrate:
        inputs = config.inputs or facts.inputs or training_batch(model, facts.sequence_length)
        plan, rounds, problem, meshes = _tried(model, plan, problem, facts, inputs)
    first = not dist.is_initialized() or dist.get_rank() == 0
    run = PlannedRun(
        plan=plan,
        description=problem.description,
        job=problem.job,
        memory_limit_bytes=limit,
        hardware=problem.hardware,
        search=problem.result(plan) if first else None,
        comparison=_comparison(problem, description) if first and config.compare else None,
        planning_s=time.perf_counter() - started,
        rounds=rounds,
        meshes=meshes,
    )
    return replace(run, findings=checked(run, model, config, facts))


def _tried(
    model: nn.Module, plan: Plan, problem: Problem, facts: RunFacts, inputs: Inputs
) -> tuple[Plan, tuple[Round, ...], Problem, Meshes | None]:
    """The plan that stands after trials; what the problem is by what was seen, on rank 0; meshes of the plan."""
    device = own_gpu() if facts.device_type == "cuda" else torch.device(facts.device_type)
    meshes = Meshes(facts.device_type) if dist.is_initialized() else None
    trial = Trial(
        model=model,
        units=problem.description.units,
        job=problem.job,
        inputs=inputs,
        device=device,
        block_classes=problem.description.block_classes,
        activation_checkpointing=facts.activation_checkpointing,
        checkpoint_wrapper=facts.checkpoint_wrapper,
    )
    plan, rounds, corrected = recalibrate(plan, problem, lambda tried: probe(tried, trial, meshes))
    if meshes is not None:
        meshes.keep(plan)
    return plan, rounds, corrected or problem, meshes


def _check_host(hardware: Hardware, config: OSDPConfig, facts: RunFacts) -> None:
    """Refuse to offload to a host that is not known; tell where there is none.

    Raises:
        HardwareError: nothing is known of the host.
        ValueError: there is no memory beside the device's.
    """
    refuse_a_host_of_the_cpu(facts.device_type, host_offload=config.host_offload, offload_activations=config.offload_activations)
    if (facts.offloads_all or config.host_offload or config.offload_activations) and hardware.host is None:
        what = "Saved activations" if config.offload_activations else "All states"
        raise HardwareError(
            f"{what} are to move to the host, but the host of {hardware.device.name} is not known;"
            " leave hardware out to have it measured, or give a profile or Hardware(host=...)."
        )
    if facts.cpu_offload and not facts.offloads_all:
        _log.warning("cpu_offload has no effect on the CPU: there is no other memory to move states to.")


def _check_checkpointing(config: OSDPConfig, facts: RunFacts) -> None:
    """Refuse options about activations where something else has decided on them.

    Raises:
        ValueError: checkpointing was switched on outside of the plan.
    """
    asked = {
        "recompute=False": config.recompute is False, "split_vocabulary=True": bool(config.split_vocabulary),
        "offload_activations=True": bool(config.offload_activations),
    }  # fmt: skip
    if facts.activation_checkpointing and (clash := next((name for name, set_ in asked.items() if set_), None)):
        raise ValueError(f"{clash} has no effect beside activation checkpointing of all blocks; leave one of the two out.")
    if facts.cpu_offload and config.host_offload is False:
        raise ValueError("host_offload=False, but cpu_offload moves all states to the host; leave one of the two out.")


def _check_recalibration(facts: RunFacts) -> None:
    """Refuse trials that would not be of what then runs.

    Raises:
        ValueError: for low precision in one process without a process group.
    """
    if facts.loss is not None:
        raise ValueError("recalibrate=True tries the model's own loss, but this trainer computes its own; leave recalibrate out.")
    if not dist.is_initialized() and facts.precision.compute is not None:
        raise ValueError(
            f"recalibrate=True in one process without a process group cannot try {facts.precision.compute.value};"
            " start the program with accelerate launch or torchrun, or leave recalibrate out."
        )


def _memory_limit(config: OSDPConfig, hardware: Hardware) -> int:
    """Bytes of each device for tensors and what the device reserves: what was asked for, or all that it has.

    Raises:
        ValueError: more was asked for than there is.
    """
    limit = config.memory_limit_bytes
    if limit is None:
        return limit_after_oom(hardware.device.memory_bytes)
    return limit_after_oom(limit_within(hardware.device, limit, said=f"memory_limit={format_bytes(limit)}"))


def _comparison(problem: Problem, plain: ModelDescription) -> tuple[StrategyResult, ...]:
    """The plan's strategy on the model as it is split, single ones on the model as it came."""
    return compare_strategies(replace(problem.question, description=plain), split=problem.description)


def _may_split(facts: RunFacts, profile: Profile | None) -> bool:
    """Whether split models can be described here: blocks that are recomputed by others are whole, and so are those of a profile."""
    return not facts.activation_checkpointing and (profile is None or not profile.segments)


def _given(
    config: OSDPConfig, facts: RunFacts, job: TrainingJob, described: Callable[[ModelSplit], ModelDescription], started: float
) -> PlannedRun:
    """Run the plan that the user gave, after checking that it is for this run."""

    def load() -> Plan:
        plan = config.plan if isinstance(config.plan, Plan) else Plan.load(Path(str(config.plan)))
        _check_given(plan, config, facts, described(plan.split), job)
        return plan

    plan = broadcast_plan(on_rank_zero(load))
    description = described(plan.split)
    plan.check(description, facts.world_size)
    warn_of_other_nodes(plan)
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
    if facts.offloads_all and (stay := sum(not unit.on_host for unit in plan.units)):
        raise PlanError(
            f"cpu_offload asks for every unit on the host, but {stay} of the plan's stay on the device; leave it out, or plan again."
        )
    if facts.activation_checkpointing and any(unit.activations is not Activations.SAVE for unit in plan.units):
        raise PlanError(
            "The plan recomputes or offloads blocks, and activation checkpointing would recompute them too; switch it off, or plan again."
        )
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


def _profile(config: OSDPConfig) -> Profile | None:
    """The profile that the user named, from rank 0's file.

    Raises:
        ProfileError: it cannot be read.
    """
    if config.profile is None or isinstance(config.profile, Profile):
        return config.profile
    text = on_rank_zero(lambda: Profile.load(config.profile).to_json())
    return Profile.from_json(text, source=str(config.profile))


def _hardware(config: OSDPConfig, facts: RunFacts, profile: Profile | None) -> Hardware:
    """The hardware that the user named, or what this machine turns out to be.

    Raises:
        ValueError: the hardware has another number of devices or nodes than this run.
    """
    wanted = config.hardware if profile is None else profile.hardware
    return hardware_of_run(wanted, device_type=facts.device_type, nodes=config.nodes).with_margin(config.memory_margin)
