"""Plan a run: from a model, a configuration and the caller's facts, find the one plan that every process runs."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.consensus import on_rank_zero, require_same_run
from ..distributed.device import own_gpu
from ..distributed.mesh import Meshes, find_topology, rank
from ..distributed.said_once import say_while_planning
from ..errors import InfeasibleError, OSDPError, PlanError
from ..modeling.batch import check_inputs
from ..modeling.build import without_checkpointing
from ..modeling.quantized import pack
from ..modeling.split_candidates import split_units
from ..planner.description import Activations, DType, UnitDescription
from ..planner.hardware import Hardware
from ..planner.plan import Plan
from ..planner.problem import PlanningProblem
from ..planner.search.compare import StrategyResult
from ..planner.search.search import SearchResult, search
from ..quantities import format_bytes
from ..report.plan_file import PlanInputs
from ..sharding.environment import uses_host
from ..tracing.pictures import UsualBatch
from .compilation import Compilation, weigh
from .config import OSDPConfig
from .facts import RunFacts, check_communication, check_whole, training_job
from .preflight import Finding, KnownRun, check_model, check_run
from .probe import Trial, probe
from .problem import Describer, FoundPlan, find_plan, plan_from_rank_zero
from .recalibrate import Round, estimated, recalibrate

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A plan and the values from which it was made."""

    plan: Plan
    """The plan, the same on every process."""
    units: tuple[UnitDescription, ...]
    """The model's units after the plan's split."""
    inputs: PlanInputs | None = None
    """The planner's inputs, on rank 0 corrected by the trials; None if a given plan runs without an estimate."""
    search: SearchResult | None = None
    """The plan's estimates; on rank 0 only, and None for a given plan."""
    comparison: tuple[StrategyResult, ...] | None = None
    """Other strategies at their own best batch sizes; on rank 0 only, and None unless requested."""
    planning_s: float = 0.0
    """Seconds for describing, measuring, searching and trying."""
    open_step_s: float | None = None
    """Estimated seconds of a step if the planner decided about recomputation; None if it does, or without an
    estimate.
    """
    compilation: Compilation | None = None
    """Estimated gain of compiled blocks, if requested; None if it was not or cannot be estimated."""
    rounds: tuple[Round, ...] = ()
    """Plans that were tried."""
    meshes: Meshes | None = None
    """Meshes that the trials made, for training to use again."""
    findings: tuple[Finding, ...] = ()
    """Findings of the preflight checks."""
    trains: bool = True
    """The model is trained, not only evaluated."""

    @property
    def hardware(self) -> Hardware | None:
        """The hardware of the search; None for a given plan."""
        return None if self.inputs is None else self.inputs.hardware

    @property
    def problem(self) -> PlanningProblem | None:
        """The problem that the plan solves; None for a given plan."""
        inputs, limit = self.inputs, self.plan.memory_limit_bytes
        if inputs is None or inputs.hardware is None or limit is None:
            return None
        return inputs.problem(limit, self.plan.strategy)


def plan_run(model: nn.Module, config: OSDPConfig, facts: RunFacts) -> PlannedRun:
    """Describe the model, measure the hardware, search on rank 0, and return the same plan, checked, on every process.
    Collective.

    The model must not be sharded; its parameters may be on the meta device.

    Raises:
        InfeasibleError: no plan meets the memory limit.
        LaunchError: ranks run different versions.
        PlanError: a given plan cannot be read, or is not for this model and run.
        PlanMismatchError: ranks have different models, plans or options.
        PreflightError: the run would fail, or not train what was meant.
        ValueError: sizes or options contradict each other, or a name is not known.
    """
    started = time.perf_counter()
    pack(model)
    require_same_run(model, config, facts)
    _check_options(config, facts)
    check_model(model, trains=facts.trains)
    if config.inputs is not None:
        check_inputs(config.inputs, model)

    with say_while_planning():
        run = _searched(model, config, facts) if config.plan is None else _given(model, config, facts)
    planning_s = time.perf_counter() - started
    findings = check_run(_known(run, config, facts), model)
    return replace(run, planning_s=planning_s, findings=findings, trains=facts.trains)


def _searched(model: nn.Module, config: OSDPConfig, facts: RunFacts) -> PlannedRun:
    """Search on rank 0, and try the plan if requested. Collective."""
    eager = replace(config, compile=False)
    found = find_plan(model, config, facts)
    if config.compile == "auto" and isinstance(found.outcome, InfeasibleError):
        return _searched(model, eager, facts)
    plan, problem = found.plan, found.problem
    plan.check(problem.description, facts.world_size)
    compilation = None
    if config.compile == "auto" or (config.compare and config.compile):
        compilation = on_rank_zero(lambda: weigh(found, facts.steps))
        if compilation is not None and config.compile == "auto" and not compilation.pays:
            return replace(_searched(model, eager, facts), compilation=compilation)
    rounds: tuple[Round, ...] = ()
    meshes = Meshes(facts.device_type) if config.recalibrate and dist.is_initialized() else None
    if config.recalibrate:
        trial = _trial(model, config, facts, problem)
        plan, rounds, problem = recalibrate(plan, problem, lambda tried: probe(tried, trial, meshes))
        found = replace(found, problem=problem)
        if meshes is not None:
            meshes.keep(plan)
    run = PlannedRun(
        plan=plan, units=problem.description.units, inputs=PlanInputs.of(problem), compilation=compilation,
        rounds=rounds, meshes=meshes,
    )  # fmt: skip
    if rank() != 0:
        return run
    comparison = tuple(found.compared()) if config.compare else None
    return replace(
        run,
        search=estimated(problem, plan),
        comparison=comparison,
        open_step_s=None if rounds else _open_step_s(found),
    )


def _open_step_s(found: FoundPlan) -> float | None:
    """Return the estimated seconds of a step if the planner decided what is recomputed; None if it does, or without
    an estimate.
    """
    config, facts, model = found.builder.config, found.builder.facts, found.builder.model
    if not (facts.trains and found.problem.description.recomputed_by_others):
        return None
    open_facts = replace(facts, activation_checkpointing=False)
    try:
        with without_checkpointing(model):
            builder = found.builder.with_changes(replace(config, recompute=None), open_facts)
            return search(replace(builder.build(), memory_limit_bytes=found.problem.memory_limit_bytes)).time.step_s
    except (OSDPError, ValueError):  # the estimate is only advice
        return None


def _trial(model: nn.Module, config: OSDPConfig, facts: RunFacts, problem: PlanningProblem) -> Trial:
    return Trial(
        model=model,
        units=problem.description.units,
        job=problem.job,
        inputs=config.inputs or facts.inputs or UsualBatch(model, problem.description.sequence_length, config.images),
        device=own_gpu() if facts.device_type == "cuda" else torch.device(facts.device_type),
        block_classes=problem.description.block_classes,
        activation_checkpointing=facts.activation_checkpointing,
    )


def _given(model: nn.Module, config: OSDPConfig, facts: RunFacts) -> PlannedRun:
    """Load and check the plan that the user gave. Collective."""
    given = config.plan
    assert given is not None
    plan = plan_from_rank_zero(lambda: given if isinstance(given, Plan) else Plan.load(Path(given)))
    if facts.offloads_all and (on_device := sum(not unit.on_host for unit in plan.units)):
        raise PlanError(
            f"cpu_offload moves every unit to the host, but the plan keeps {on_device} on the device; leave it out, or"
            " plan again."
        )
    if facts.activation_checkpointing and any(unit.activations != Activations.SAVE for unit in plan.units):
        raise PlanError(
            "The plan recomputes or offloads blocks, and activation checkpointing would recompute them too; switch it"
            " off, or plan again."
        )
    check_communication(plan, config.wire)
    inputs = peak_bytes = None
    if facts.estimates_given_plan:
        if uses_host(plan):
            facts = facts.under_fsdp
        as_planned = replace(config, plan=None, compile=bool(plan.compiled_classes))
        description = Describer(model, as_planned, facts).describe(plan.split, micro_batch_size=plan.micro_batch_size)
        plan.check(description, facts.world_size)
        check_whole(plan, description, facts.optimizer)
        inputs = PlanInputs(description=description, job=training_job(config, facts), hardware=None)
        if config.memory_limit is not None:
            peak_bytes = inputs.estimate(plan).memory.peak_bytes
    check_given_plan(plan, config, peak_bytes)
    here = find_topology().ranks_per_node
    if plan.devices_per_node not in (None, here) and rank() == 0:
        _log.warning(
            "The plan was made for %d devices per node, but this run has %d; plan again.", plan.devices_per_node, here
        )
    if inputs is not None:
        return PlannedRun(plan=plan, units=inputs.description.units, inputs=inputs)
    low_precision = facts.precision.compute is not None
    return PlannedRun(
        plan=plan, units=split_units(model, plan.split, config.block_classes, low_precision=low_precision)
    )


def check_given_plan(plan: Plan, config: OSDPConfig, peak_bytes: int | None = None) -> None:
    """Raise PlanError if a plan contradicts the configuration or does not fit; `peak_bytes=None` uses the peak that
    the plan states.
    """
    problem, reduces, limit = None, config.reduce_every_micro_step, config.memory_limit_bytes
    if config.global_batch_size not in (None, plan.global_batch_size):
        problem = (
            f"The plan takes {plan.global_batch_size} samples a step, but {config.global_batch_size} are asked for."
        )
    elif config.micro_batch_size not in (None, plan.micro_batch_size):
        problem = f"The plan runs {plan.micro_batch_size} samples at once, but batches hold {config.micro_batch_size}."
    elif reduces is not None and any(unit.reduce_every_micro_step is not reduces for unit in plan.units):
        problem = (
            f"The plan has units with reduce_every_micro_step={not reduces}, but the configuration says the opposite."
        )
    elif (config.sequence_length or 0) > plan.sequence_length:
        problem = f"The plan is for {plan.sequence_length} tokens a sample, but samples have {config.sequence_length}."
    elif limit is not None:
        peak, shown = plan.peak_bytes if peak_bytes is None else peak_bytes, format_bytes(limit)
        if peak is None:
            raise PlanError(
                f"The plan states no peak to compare with memory_limit={shown}. Plan again, or leave memory_limit out."
            )
        if peak > limit:
            problem = f"The plan needs {format_bytes(peak)}, more than memory_limit={shown}."
    if problem is not None:
        raise PlanError(f"{problem} Plan again, or change the arguments.")


def _check_options(config: OSDPConfig, facts: RunFacts) -> None:
    """Refuse a precision that cannot run, options without effect in this run, and trials that would differ from the
    training.
    """
    if facts.precision.compute is DType.FLOAT16 and facts.device_type == "cpu" and facts.world_size == 1:
        raise ValueError(
            "fp16 in a single process on the CPU is not supported; use bf16, or start two processes or more."
        )
    if facts.cpu_offload and config.host_offload is False:
        raise ValueError("host_offload=False, but cpu_offload moves all states to the host; leave one of the two out.")
    if config.recalibrate and facts.loss is not None:
        raise ValueError(
            "recalibrate=True tries the model's own loss, but this trainer computes its own; leave recalibrate out."
        )
    if config.recalibrate and not dist.is_initialized() and facts.precision.compute is not None:
        raise ValueError(
            f"recalibrate=True in one process without a process group cannot try {facts.precision.compute.value};"
            " start the program with accelerate launch or torchrun, or leave recalibrate out."
        )


def _known(run: PlannedRun, config: OSDPConfig, facts: RunFacts) -> KnownRun:
    """Return the values that the preflight checks need."""
    needed, classes, plan = None, tuple(dict.fromkeys(unit.class_name for unit in run.units)), run.plan
    if run.inputs is not None:
        classes = run.inputs.description.block_classes
        if run.hardware is not None and plan.peak_bytes is not None:
            needed = plan.peak_bytes - run.hardware.outside_bytes(plan.communicators)
        else:
            needed = run.inputs.estimate(plan).memory.peak_bytes
    return KnownRun(
        facts=facts,
        units=run.units,
        asked_classes=config.block_classes if run.inputs is not None or not run.plan.split.operators else None,
        found_classes=classes,
        plan=run.plan,
        hardware=run.hardware,
        time=None if run.search is None or config.strategy == "osdp" else run.search.time,
        others=run.comparison or (),
        needed_bytes=needed,
    )
