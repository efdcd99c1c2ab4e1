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
from ..planner.cost.evaluation import EvaluatedModel, EvaluationLoop
from ..planner.cost.phases import Phase
from ..planner.cost.timing import price_micro_batches
from ..planner.description import ModelDescription, UnitDescription
from ..planner.grouping import joined
from ..planner.hardware import Hardware
from ..planner.placement import Activations
from ..planner.plan import Plan
from ..planner.search.compare import StrategyResult
from ..planner.token_budget import TokenBudget
from ..planner.training_job import OptimizerSpec, formats_up_to
from ..quantities import format_bytes
from ..report.plan_file import PlanInputs
from ..sharding.environment import uses_host
from .config import OSDPConfig
from .find_plan import Describer, find_plan, plan_from_rank_zero
from .job import Evaluation, Job
from .preflight import Finding, find_problems
from .samples import Batches

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedEvaluation:
    """An evaluation under a plan, which fits under the limit if there is one."""

    asked: Evaluation
    model: EvaluatedModel
    loop: EvaluationLoop
    """As it runs."""
    room_bytes: int | None
    """For tensors; None without a limit."""
    outside_bytes: int
    """Of the device, outside tensors."""

    def of(self, loop: EvaluationLoop) -> FittedEvaluation:
        """Return the evaluation with this loop, or with one that fits and has equal results; raise PreflightError if
        there is none.
        """
        room, cuts, moves = self.room_bytes, self.asked.against_cuts is None, self.asked.moves and loop.keeps_outputs
        if room is not None and not self.model.fits(loop, room):
            fitting = self.model.fitting(loop, room, cuts=cuts, moves=moves)
            if fitting is None:
                raise PreflightError(self._refusal(loop, room, cuts=cuts, moves=moves))
            loop = fitting
        return replace(self, loop=loop)

    def _refusal(self, loop: EvaluationLoop, room: int, *, cuts: bool, moves: bool) -> str:
        needed, moment = self.model.peak(loop)
        needed_text, room_text = (format_bytes(nbytes + self.outside_bytes) for nbytes in (needed, room))
        size = self.model.largest(loop, room, cuts=cuts, moves=moves)
        earlier = None if moves else self.model.fitting(loop, room, cuts=cuts, moves=loop.keeps_outputs)
        ways = [f"per_device_eval_batch_size={size}"] if size else []
        if earlier is not None:
            ways.append(f"eval_accumulation_steps={earlier.moved_after}")
        why = "" if cuts else f" Batches are not cut: {self.asked.against_cuts}."
        return (
            f"Evaluation in batches of {loop.batch_size} needs {needed_text} ({moment}), and the limit leaves"
            f" {room_text}; set {' or '.join(ways) or 'a higher memory_limit: a single sample needs more'}.{why}"
        )

    @property
    def phase(self) -> Phase:
        nbytes, moment = self.model.peak(self.loop)
        return Phase(name="evaluation", peak_bytes=nbytes, moment=moment)

    @property
    def line(self) -> str:
        """What is said before a run of the evaluation that its arguments ask for."""
        loop, phase = self.loop, self.phase
        ways = {
            f"batches of {loop.batch_size} run in parts of at most {loop.micro_batch_size} samples":
                loop.micro_batch_size < loop.batch_size,
            f"eval_accumulation_steps is {loop.moved_after}": loop.moved_after != self.asked.loop.moved_after,
        }  # fmt: skip
        said = " and ".join(way for way, holds in ways.items() if holds)
        changes = f"; to fit, {said}, with equal results" if said else ""
        return f"Evaluation: peak {format_bytes(phase.peak_bytes + self.outside_bytes)} in {phase.moment}{changes}."


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
        return 0 if self.hardware is None else self.hardware.outside_bytes(self.plan.communicators)

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
    try:
        evaluation, others = fit_evaluation(model, job, run), fit_rollouts(job, run)
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
    room_bytes = None if hardware is None else _room(job, run)
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


def fit_rollouts(job: Job, run: PlannedRun) -> tuple[Phase, ...]:
    """Return what a step's generation needs under a plan, if it generates; raise PreflightError if it does not fit."""
    if job.rollouts is None:
        return ()
    made, samples = job.rollouts
    needed, room = _evaluated(job, run, run.inputs.description).generating(made, samples), _room(job, run)
    if room is not None and needed > room:
        needed_text, room_text = (format_bytes(nbytes + run.outside_bytes) for nbytes in (needed, room))
        raise PreflightError(
            f"Generating {samples} completions at once needs {needed_text}, and the limit leaves {room_text}; lower"
            " steps_per_generation, per_device_train_batch_size or max_completion_length."
        )
    return (Phase(name="generation", peak_bytes=needed, moment="the last token"),)


def _evaluated(job: Job, run: PlannedRun, description: ModelDescription) -> EvaluatedModel:
    return EvaluatedModel(
        description=description, world_size=run.plan.world_size, job=run.inputs.job, trains=job.trains,
        layouts=tuple(replace(one, activations=Activations.SAVE) for one in run.plan.layouts(description)),
        gathers_in_lists=job.device_type == "cpu",
    )  # fmt: skip


def _room(job: Job, run: PlannedRun) -> int | None:
    """Return the bytes that the limit leaves for tensors; None without a limit."""
    limit, hardware = run.plan.memory_limit_bytes or job.config.memory_limit_bytes, run.hardware
    return limit if hardware is None or limit is None else hardware.room_bytes(limit) - run.outside_bytes


def fit_evaluation(model: nn.Module, job: Job, run: PlannedRun) -> FittedEvaluation | None:
    """Return how a run evaluates under a plan; None if it does not, or if its memory cannot be estimated; raise
    PreflightError if no loop with equal results fits. Collective.
    """
    asked, units = job.evaluation, run.units
    if asked is None:
        return None

    def described() -> ModelDescription | None:
        try:
            found = Describer(model, job).describe_evaluation(asked, run.plan.split.of_single_blocks)
        except DescriptionError as error:
            _log.warning("The memory of evaluation is not known (%s).", str(error).rstrip("."))
            return None
        found = grouped_as_planned(found, run.plan)
        alike = [unit.fqn for unit in found.units] == [unit.fqn for unit in units]
        return replace(found, units=units) if alike else None

    if (description := on_rank_zero(described)) is None:
        return None
    return FittedEvaluation(
        asked=asked, model=_evaluated(job, run, description), loop=asked.loop, room_bytes=_room(job, run),
        outside_bytes=run.outside_bytes,
    ).of(asked.loop)  # fmt: skip
