"""Plan a run: from a model and its job, find the one plan that every process runs, and how it evaluates under it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..distributed.consensus import on_rank_zero, require_same_run
from ..distributed.mesh import find_topology, rank
from ..errors import DescriptionError, PlanError, PreflightError, refuse_first
from ..modeling.batch import training_batch
from ..modeling.quantized import pack
from ..planner.cost.evaluate import PlanEstimate
from ..planner.cost.timing import price_micro_batches
from ..planner.description import ModelDescription, UnitDescription
from ..planner.grouping import joined
from ..planner.hardware import Hardware
from ..planner.plan import Plan
from ..planner.search.compare import StrategyResult
from ..planner.token_budget import TokenBudget
from ..planner.training_job import OptimizerSpec, formats_up_to
from ..quantities import format_bytes
from ..report.plan_file import PlanInputs
from ..sharding.environment import uses_host
from .config import OSDPConfig
from .evaluation import FittedEvaluation, fit_evaluation, fit_rollouts
from .find_plan import Describer, find_plan, plan_from_rank_zero
from .job import Evaluation, Job
from .preflight import Finding, find_problems
from .samples import Batches

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A plan and the values from which it was made."""

    plan: Plan
    """The plan, the same on every process."""
    units: tuple[UnitDescription, ...]
    """The model's units after the plan's split."""
    inputs: PlanInputs
    """The planner's inputs; without hardware for a given plan."""
    comparison: tuple[StrategyResult, ...] | None = None
    """Other strategies at their own best batch sizes; on rank 0 only, and None unless requested."""
    planning_s: float = 0.0
    """Seconds for describing, measuring and searching."""
    findings: tuple[Finding, ...] = ()
    """Findings of the preflight checks."""
    trains: bool = True
    """The model is trained, not only evaluated."""
    shards_beside: bool = False
    """Models beside the trained one are sharded."""
    evaluation: FittedEvaluation | None = None
    """How the run evaluates; None if that is not known."""
    budget: TokenBudget | None = None
    """How the loop cuts a step's samples by length; None runs the plan's micro-batches."""

    @property
    def outside_bytes(self) -> int:
        """Of each device, outside tensors; 0 for a given plan."""
        return self.inputs.outside_bytes(self.plan)

    @property
    def hardware(self) -> Hardware | None:
        """The hardware of the search; None for a given plan."""
        return self.inputs.hardware

    @property
    def estimate(self) -> PlanEstimate | None:
        """The plan's estimated memory and time; None for a given plan."""
        return None if self.hardware is None else self.inputs.estimate(self.plan)


def plan_run(model: nn.Module, job: Job) -> PlannedRun:
    """Describe the model, measure the hardware, search on rank 0, and return the same plan, checked, on every process.
    Collective.

    The model must not be sharded; its parameters may be on the meta device.

    Raises:
        InfeasibleError: no plan meets the memory limit.
        PlanError: a given plan cannot be read, or is not for this model and run.
        PlanMismatchError: ranks have different versions, models, plans or options.
        PreflightError: the run would fail, or not train what was meant.
        ValueError: sizes or options contradict each other, or a name is not known.
    """
    pack(model)
    if job.trains and not any(parameter.requires_grad for parameter in model.parameters()):
        raise PreflightError(
            "All parameters are frozen: there is nothing to train; set requires_grad=True on some of them."
        )
    require_same_run(model, job.config, job)
    if any(getattr(one, "peft_type", "") == "ADALORA" for one in getattr(model, "peft_config", {}).values()):
        # it reads its matrices whole in forward, and prunes them between steps
        whole = replace(job.optimizer, name=f"{job.optimizer.name} beside AdaLoRA", needs_whole=True)
        job = replace(job, optimizer=whole)
    run = _planned(model, job)
    plan, peak_bytes = run.plan, run.plan.peak_bytes
    is_searched = run.hardware is not None and peak_bytes is not None
    needed_bytes = (peak_bytes or 0) - run.outside_bytes if is_searched else _peak_bytes(plan, run.inputs)
    findings = find_problems(model, job, run.units, run.inputs.description.block_classes, run.hardware, needed_bytes)
    return replace(run, findings=findings)


def _planned(model: nn.Module, job: Job) -> PlannedRun:
    """Return the run with all that it does under the plan; raise PreflightError if a part of it does not fit.
    Collective.
    """
    started, plans = time.perf_counter(), _searched if job.config.plan is None else _given
    run = plans(model, job)
    planning_s = time.perf_counter() - started
    budget, lengths = None, run.inputs.job.lengths
    if job.cuts_by_length and (job.config.batch_by_tokens or (lengths and lengths.budget)):
        budget = on_rank_zero(lambda: _token_budget(run, job, model))
        if budget is None:
            job = replace(job, cuts_by_length=False)
            run = _searched(model, job) if job.config.plan is None else run
            if rank() == 0 and job.config.batch_by_tokens:
                _log.warning("batch_by_tokens=True has no effect: the limit leaves no room for a step's batches.")
    job = replace(job, shards_beside=run.shards_beside)

    def described(asked: Evaluation) -> ModelDescription | None:
        try:
            found = Describer(model, job).describe_evaluation(asked, run.plan.split.of_single_blocks)
        except DescriptionError as error:
            _log.warning("The memory of evaluation is not known (%s).", str(error).rstrip("."))
            return None
        found = grouped_as_planned(found, run.plan)
        alike = [unit.fqn for unit in found.units] == [unit.fqn for unit in run.units]
        return replace(found, units=run.units) if alike else None

    try:
        evaluation = fit_evaluation(job, run.plan, run.inputs, described)
        others = fit_rollouts(job, run.plan, run.inputs)
    except PreflightError:
        if job.models_beside is None or job.shards_beside or job.config.plan is not None:
            raise
        return _planned(model, replace(job, shards_beside=True))
    others += () if evaluation is None else (evaluation.phase,)
    return replace(
        run, inputs=replace(run.inputs, others=others), planning_s=planning_s, trains=job.trains,
        evaluation=evaluation, budget=budget,
    )  # fmt: skip


def _token_budget(run: PlannedRun, job: Job, model: nn.Module) -> TokenBudget | None:
    """Return the budget of the plan's micro-batch, or of less samples, under which no micro-batch needs more than the
    limit; None if even micro-batches of one sample do not fit beside what is loaded.
    """
    plan, hardware = run.plan, run.hardware
    room_bytes = None if hardware is None else run.inputs.room_bytes(plan, job.config.memory_limit_bytes)
    inputs_of = job.inputs.with_rows if isinstance(job.inputs, Batches) else None
    samples, longest = plan.micro_batch_size * plan.accumulation_steps, plan.sequence_length
    loaded = dict(inputs_of(longest)(1)) if inputs_of is not None else training_batch(model, longest)(1)
    if room_bytes is None:
        room_bytes = _peak_bytes(plan, run.inputs)
    else:
        loaded_bytes = sum(t.nbytes for t in tree_leaves(loaded) if isinstance(t, torch.Tensor))
        gathered = 2 * job.world_size if job.deals else 0
        room_bytes -= loaded_bytes * (3 + gathered) * samples  # as they are loaded, joined and cut; and to be dealt

    def fits(length: int, tokens: int) -> bool:
        """Return whether micro-batches of so many tokens, in rows of this length, fit."""
        size = min(samples, tokens // length)
        length = min(longest, tokens // size)  # the longest rows of which so many run
        again = replace(plan, micro_batch_size=size, accumulation_steps=max(2, plan.accumulation_steps))
        inputs = run.inputs
        if length != longest:
            of_length = replace(job.asking(sequence_length=length), inputs=inputs_of and inputs_of(length))
            description = Describer(model, of_length).describe(plan.split.of_single_blocks)
            inputs = replace(inputs, description=grouped_as_planned(description, plan))
        return inputs.estimate(again).memory.peak_bytes <= room_bytes

    sizes = range(plan.micro_batch_size, 0, -1)
    if (size := next((size for size in sizes if fits(longest, size * longest)), None)) is None:
        return None
    budget = TokenBudget(tokens=longest, shortest=longest, longest=longest, overhead=longest)
    if hardware is not None:
        description, job_ = run.inputs.description, run.inputs.job
        budget = price_micro_batches(description, plan.layouts(description), hardware, job_)
    budget = replace(budget, deals=job.deals).holding(tokens := size * longest, samples)
    shortest = budget.shortest
    while not fits(shortest, tokens):
        shortest = min(longest, 2 * shortest)
    return replace(budget, shortest=shortest)


def _searched(model: nn.Module, job: Job) -> PlannedRun:
    """Search on rank 0. Collective."""
    found = find_plan(model, job)
    plan, problem = found.plan, found.problem
    plan.check(problem.description, job.world_size)
    return PlannedRun(
        plan=plan, units=problem.description.units, inputs=PlanInputs.of(problem),
        comparison=tuple(found.compared()) if job.config.compare and rank() == 0 else None,
        shards_beside=found.builder.job.shards_beside,
    )  # fmt: skip


def _given(model: nn.Module, job: Job) -> PlannedRun:
    """Load and check the plan that the user gave. Collective."""
    config, given = job.config, job.config.plan
    assert given is not None
    plan = plan_from_rank_zero(lambda: given if isinstance(given, Plan) else Plan.load(Path(given)))
    if job.activation_checkpointing and any(unit.activations.describe() for unit in plan.units):
        raise PlanError(
            "The plan recomputes or offloads blocks, and activation checkpointing would recompute them too; switch it"
            " off, or plan again."
        )
    if uses_host(plan):
        job = job.under_fsdp
    job = job.asking(
        global_batch_size=config.global_batch_size or plan.global_batch_size,
        sequence_length=config.sequence_length or plan.sequence_length,
    )
    as_planned = job.asking(plan=None, compile=bool(plan.compiled_classes))
    description = grouped_as_planned(Describer(model, as_planned).describe(plan.split.of_single_blocks), plan)
    plan.check(description, job.world_size)
    check_whole(plan, description, job.optimizer)
    inputs = PlanInputs(description=description, job=job.training(), hardware=None)
    limit, beside = config.memory_limit_bytes or plan.memory_limit_bytes, job.models_beside
    if shards := beside is not None and limit is not None and _peak_bytes(plan, inputs) > limit:
        inputs = replace(inputs, description=replace(job, shards_beside=True).with_others(description))
    check_given_plan(plan, config, _peak_bytes(plan, inputs))
    here = find_topology().ranks_per_node
    if plan.devices_per_node not in (None, here) and rank() == 0:
        _log.warning(
            "The plan was made for %d devices per node, but this run has %d; plan again.", plan.devices_per_node, here
        )
    return PlannedRun(plan=plan, units=description.units, inputs=inputs, shards_beside=shards)


def grouped_as_planned(description: ModelDescription, plan: Plan) -> ModelDescription:
    """Return the model with the plan's units of several blocks: which neighbours are equal may depend on the batch
    that a trace has seen.
    """
    index = {unit.fqn: number for number, unit in enumerate(description.units)}
    several = [unit.module_names for unit in plan.units if unit.fqn not in index]
    parts = [[index[name] for name in names] for names in several if all(name in index for name in names)]
    return joined(replace(description, split=plan.split), parts)


def _peak_bytes(plan: Plan, inputs: PlanInputs) -> int:
    """Return the estimated peak of a given plan's tensors; of compiled blocks, which were measured for it, at most the
    plan's own.
    """
    as_eager = inputs.estimate(plan).memory.peak_bytes
    return min(as_eager, plan.peak_bytes or as_eager) if plan.compiled_classes else as_eager


def check_whole(plan: Plan, description: ModelDescription, optimizer: OptimizerSpec) -> None:
    """Refuse a given plan that shards, slices or offloads parameters or operators that the optimizer needs whole."""
    decisions = [
        plan.decision(unit.fqn) for unit in description.units if unit.trainable_numel and optimizer.looks_at_whole
    ]
    sharded = (d.label for d in decisions if d.away or (d.shard_size > 1 and optimizer.needs_whole))
    problem = next((f"has {label} sharded or on the host" for label in sharded), None)
    if problem or (plan.split.cuts_parameters and not optimizer.steps_parts):
        problem = problem or f"splits the model into {plan.split.describe()}"
        needed = "parameters" if optimizer.looks_at_whole else "operators"
        raise PlanError(
            f"{optimizer.name} needs whole {needed}, and the plan {problem}; plan again for it, or use AdamW."
        )


def check_given_plan(plan: Plan, config: OSDPConfig, peak_bytes: int) -> None:
    """Raise PlanError if a plan contradicts the configuration, or its peak is more than the limit."""
    reduces, limit = config.reduce_every_micro_step, config.memory_limit_bytes
    refused = {
        f"The plan sends parameters or gradients in {plan.communication}, but"
        f" communication={config.communication!r}.": plan.communication not in formats_up_to(config.communication),
        f"The plan takes {plan.global_batch_size} samples a step, but {config.global_batch_size} are asked for.":
            config.global_batch_size not in (None, plan.global_batch_size),
        f"The plan runs {plan.micro_batch_size} samples at once, but batches hold {config.micro_batch_size}.":
            config.micro_batch_size not in (None, plan.micro_batch_size),
        f"The plan has units with reduce_every_micro_step={not reduces}, but the configuration says the opposite.":
            reduces is not None and any(unit.reduce_every_micro_step is not reduces for unit in plan.units),
        f"The plan is for {plan.sequence_length} tokens a sample, but samples have {config.sequence_length}.":
            (config.sequence_length or 0) > plan.sequence_length,
        f"The plan needs {format_bytes(peak_bytes)}, more than memory_limit={format_bytes(limit or 0)}.":
            limit is not None and peak_bytes > limit,
    }  # fmt: skip
    refuse_first({f"{text} Plan again, or change the arguments.": holds for text, holds in refused.items()}, PlanError)
