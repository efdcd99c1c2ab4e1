"""The one road to a plan: from a model, a configuration and what is known of the run to a planning problem, and its search."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from ..distributed.consensus import on_rank_zero
from ..distributed.device import expands_segments
from ..distributed.mesh import rank
from ..distributed.restart import limit_after_oom
from ..errors import CheckpointingError, DescriptionError, HardwareError, InfeasibleError, PlanError
from ..measurement.machine import hardware_of_run
from ..modeling.batch import Inputs, Loss, training_batch
from ..modeling.split_candidates import possible_splits
from ..planner.description import DType, ModelDescription
from ..planner.hardware import DeviceSpec, Hardware
from ..planner.job import OptimizerSpec, Precision, TrainingJob
from ..planner.plan import Plan
from ..planner.problem import PlanningProblem, Strategy
from ..planner.profile import Profile, with_block_times
from ..planner.search.compare import LOCAL_STEPS, StrategyResult, best_of, choose_description, compare_strategies
from ..planner.search.search import search
from ..planner.split import WHOLE_BLOCKS, ModelSplit
from ..planner.wire import EXACT, WireFormat, formats_up_to
from ..quantities import format_bytes
from ..tracing.describe import TRACED_MICRO_BATCH, describe, is_by_formula
from .cache import measured_once
from .config import OSDPConfig
from .local_steps import of_one_machine

Trace: TypeAlias = Callable[..., ModelDescription]
"""`describe`, or what is called as it is."""
_log = logging.getLogger(__name__)
_BESIDE_CHECKPOINTING = (("recompute", False), ("split_vocabulary", True), ("offload_activations", True))
"""Options that have no effect where all blocks are recomputed."""
_MOST_DESCRIPTIONS = 3
"""Of a model with compiled blocks, each at another micro-batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The folder that a run writes to, and what it writes there."""

    path: str | Path
    saves: bool = True
    """Whether checkpoints are written while it trains."""
    limit: int | None = None
    """How many are kept (`save_total_limit`); None keeps all."""
    states: bool = True
    """Whether they hold the optimizer's states."""
    adapters: bool = False
    """Whether they hold trained parameters alone, as those of peft do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the caller knows about the run that is being planned."""

    world_size: int
    device_type: str
    """`cpu` or `cuda`."""
    precision: Precision
    """With `autocast` where one process can run without FSDP2."""
    optimizer: OptimizerSpec
    optimizer_choices: tuple[tuple[str, OptimizerSpec], ...] = ()
    """Names with what they hold, of which one may run, `optimizer` first; empty where there is no choice."""
    sequence_length: int | None
    """Tokens of one sample, 1 where samples have none; None only where a given plan runs without an estimate."""
    global_batch_size: int | None
    """Samples of one optimizer step over all processes; None only beside a given plan."""
    micro_batch_size: int | None = None
    """Samples of one batch where the data loader has fixed it."""
    reduce_every_micro_step: bool | None = None
    inputs: Inputs | None = None
    """From a number of samples to a batch, as the data gives them; None makes one for a transformers model."""
    loss: Loss | None = None
    """How the loop makes the loss of a batch, where it is not the model's own."""
    other_models: Mapping[str, int] = field(default_factory=dict)
    """Bytes that models beside the trained one take on the device throughout, by name."""
    holds_outputs: bool = False
    """The training loop may keep the model's outputs through backward."""
    clips_gradients: bool = False
    """Each step clips the norm of all gradients."""
    against_backward_step: str | None = "this loop may read gradients before the optimizer steps"
    """Why units are not to step in backward unless that is asked for; None where nothing speaks against it."""
    against_unit_steps: str | None = None
    """Why the optimizer cannot step unit by unit; None where it can."""
    activation_checkpointing: bool = False
    """Blocks will be recomputed in backward; not needed for a model that has it switched on already."""
    checkpoint_wrapper: bool = False
    """Accelerate recomputes them, in torch's wrapper; else the model does it."""
    reads_loss_alone: bool = False
    """The loop gives labels to forward and reads only the loss from it in training."""
    cpu_offload: bool = False
    """Every unit's parameters, gradients and optimizer states are to live in the host's memory; else as many as the plan needs."""
    steps: int | None = None
    """Optimizer steps of the run; None where they are not known."""
    trains: bool = True
    """The model is trained, and not evaluated alone."""
    frozen_in_optimizer: int = 0
    """Frozen parameters that the optimizer was given."""
    folder: RunFolder | None = None
    """Where the run writes; None where that is not known."""
    estimates_given_plan: bool = True
    """Describe the model and estimate a given plan; False takes the plan's own figures."""
    capability: tuple[int, int] | None = None
    """Compute capability of the device; None is that of this machine's GPU."""
    expandable_segments: bool = field(default_factory=expands_segments)
    """As torch's allocator for CUDA is set in the run."""

    @property
    def offloads_all(self) -> bool:
        return self.cpu_offload and self.device_type != "cpu"  # which has no memory but its own

    @property
    def under_fsdp(self) -> RunFacts:
        """The same with FSDP2's mixed precision, under which alone units can live on the host, in place of autocast."""
        return replace(self, precision=replace(self.precision, autocast=False))


def _reason_against_backward_step(facts: RunFacts) -> str | None:
    """Return what needs all gradients at once, whatever is asked for."""
    if facts.clips_gradients:
        return "gradients are clipped by the norm of all of them (max_grad_norm=0 does not clip)"
    return "fp16 scales the loss and may skip a step" if facts.precision.compute is DType.FLOAT16 else facts.against_unit_steps


def _steps_in_backward(config: OSDPConfig, facts: RunFacts) -> bool:
    """Return whether units may step in backward: where that is asked for, else where nothing is known against it."""
    against = _reason_against_backward_step(facts) or facts.against_backward_step
    return against is None if config.step_in_backward is None else config.step_in_backward


def check_backward_step(plan: Plan, config: OSDPConfig, facts: RunFacts) -> None:
    """Refuse a given plan that steps in backward where something may read gradients before the step, and an option without effect."""
    planned = any(unit.step_in_backward for unit in plan.units)
    if planned and (reason := _reason_against_backward_step(facts)):
        raise PlanError(f"The plan steps in backward, but {reason}; change that, or plan again.")
    if planned and not _steps_in_backward(config, facts):
        reason = facts.against_backward_step if config.step_in_backward is None else "step_in_backward=False"
        raise PlanError(f"The plan steps in backward, but {reason}; set step_in_backward=True where none is read, or plan again.")
    if config.step_in_backward and not planned:
        raise ValueError("plan runs a given plan as it is, so step_in_backward=True would have no effect; leave one of the two out.")


def check_whole(plan: Plan, description: ModelDescription, optimizer: OptimizerSpec) -> None:
    """Refuse a given plan that shards, cuts or offloads what the optimizer needs whole."""
    decisions = [plan.decision(unit.fqn) for unit in description.units if unit.trainable_numel and optimizer.needs_whole]
    parted = next((f"has {d.label} sharded or on the host" for d in decisions if d.shard_size > 1 or d.on_host), None)
    if parted or (plan.split.sliced and not optimizer.takes_slices):
        what = parted or "cuts operators in slices"
        raise PlanError(f"{optimizer.name} needs whole parameters, and the plan {what}; plan again for it, or use AdamW.")


def check_communication(plan: Plan, allowed: WireFormat | None) -> None:
    """Refuse a given plan that sends coarser formats than the user allows, which trains with other rounding."""
    sent = plan.communication
    if sent not in (EXACT, *formats_up_to(allowed)):
        asked = EXACT if allowed is None else allowed.value
        raise PlanError(
            f"The plan sends parameters or gradients in {sent}, but communication={asked!r}; set"
            f" communication={sent!r} where that is meant, or plan again."
        )


def training_job(config: OSDPConfig, facts: RunFacts) -> TrainingJob:
    """Return the job to search for, with what the user has fixed; raise ValueError where sizes do not fit together."""
    assert facts.global_batch_size is not None
    host_offload, offload_optimizer = facts.offloads_all or config.host_offload, config.offload_optimizer
    problem = None
    if facts.optimizer.is_quantized and (host_offload or offload_optimizer):
        problem = f"States on the host are plain tensors, and {facts.optimizer.name}'s are quantized; leave the offload out, or use AdamW."
    elif facts.optimizer.needs_whole and host_offload:
        name = facts.optimizer.name
        problem = f"{name} needs whole parameters at once, which host and device do not have; leave host_offload out, or use AdamW."
    elif facts.against_unit_steps and offload_optimizer:
        problem = f"offload_optimizer=True, but {facts.against_unit_steps}; leave it out, or use AdamW."
    elif config.step_in_backward and (reason := _reason_against_backward_step(facts)):
        problem = f"step_in_backward=True, but {reason}; leave one of the two out."
    useless = next((f"{name}={value}" for name, value in _BESIDE_CHECKPOINTING if getattr(config, name) is value), None)
    if facts.activation_checkpointing and useless:
        problem = f"{useless} has no effect beside activation checkpointing of all blocks; leave one of the two out."
    if problem is not None:
        raise ValueError(problem)
    job = TrainingJob(
        global_batch_size=facts.global_batch_size,
        precision=facts.precision,
        optimizer=facts.optimizer,
        holds_outputs=facts.holds_outputs,
        clips_gradients=facts.clips_gradients,
        step_in_backward=_steps_in_backward(config, facts),
        micro_batch_size=facts.micro_batch_size,
        reduce_every_micro_step=facts.reduce_every_micro_step,
        recompute=config.recompute,
        host_offload=False if facts.optimizer.is_quantized or facts.optimizer.needs_whole else host_offload,
        offload_optimizer=False if facts.optimizer.is_quantized or facts.against_unit_steps else offload_optimizer,
        offload_activations=config.offload_activations,
        communication=config.wire,
        expandable_segments=facts.expandable_segments,
    )
    job.micro_batch_sizes(facts.world_size)
    return job


def check_limit(limit_bytes: int, device: DeviceSpec, *, given: str) -> int:
    """Return a limit that the device has; raise ValueError above it, which quotes the limit as it was `given`: `memory_limit='8GiB'`."""
    if limit_bytes <= (there := device.memory_bytes):
        return limit_bytes
    raise ValueError(
        f"{given} is more than the {format_bytes(there)} of {device.name}; use at most {there // 2**20}MiB, or leave it out for all of"
        " them."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """What the search for a run's plan found."""

    builder: ProblemBuilder
    """With the configuration and the facts that were planned for."""
    whole: ModelDescription
    """The model before it is split."""
    problem: PlanningProblem
    """What was searched: the model whole or split, whichever trains faster."""
    outcome: Plan | InfeasibleError

    @property
    def plan(self) -> Plan:
        """The plan, the same on every process; raise InfeasibleError where none fits."""
        if isinstance(self.outcome, InfeasibleError):
            raise self.outcome
        return self.outcome

    @property
    def eager(self) -> ModelDescription | None:
        """The model without compilation; None where no block is compiled, or times were measured."""
        return self.builder.eager if self.whole.compiled_classes and not self.builder.is_timed else None

    def compared(self, *, compiles: bool = False) -> tuple[StrategyResult, ...]:
        """Return every strategy at its own best batch, OSDP first; `compiles` also describes eager blocks as compiled, in seconds."""
        other = self._compiled() if compiles and not self.whole.compiled_classes else self.eager
        (hardware, job), problem = self.builder.together, replace(self.problem, description=self.whole)
        rows = compare_strategies(replace(problem, hardware=hardware, job=job), split=self.problem.description, other=other)
        return (best_of(self.problem, LOCAL_STEPS), *rows) if self.builder.config.local_steps is not None else rows

    def _compiled(self) -> ModelDescription | None:
        """Return the model whole with compiled blocks, as its best plan runs it; None where none compile, or times were measured."""
        builder = self.builder
        if builder.is_timed:
            return None
        config = replace(builder.config, compile=True, operator_splitting=False)
        whole = ProblemBuilder(builder.model, config, builder.facts, hardware=builder.hardware, trace=builder.trace).find().whole
        return whole if whole.compiled_classes else None


def find_plan(
    model: nn.Module, config: OSDPConfig, facts: RunFacts, *, hardware: Hardware | None = None, trace: Trace = describe
) -> FoundPlan:
    """Search on rank 0 for the run's fastest plan that fits. Collective; arguments and errors are those of `ProblemBuilder`.

    One process runs under autocast, without FSDP2, if all units stay on the device, which is tried first. FSDP2 runs units on the host,
    with its mixed precision.
    """
    builder = partial(ProblemBuilder, model, hardware=hardware, trace=trace)
    if facts.precision.autocast and not (facts.offloads_all or config.host_offload):
        found = builder(config=replace(config, host_offload=False), facts=facts).find()
        if isinstance(found.outcome, Plan) or facts.device_type == "cpu" or config.host_offload is False:
            return found
    return builder(config=config, facts=facts.under_fsdp).find()


class ProblemBuilder:
    """Build planning problems of one model: hardware, job and limit once, a description for each way to split the model."""

    def __init__(
        self, model: nn.Module, config: OSDPConfig, facts: RunFacts, *, hardware: Hardware | None = None, trace: Trace = describe
    ) -> None:
        """Resolve job, limit and, for None, the configuration's hardware or this machine's, measured. Collective where that is None.

        `trace` is `describe`, or keeps what that returns. Raise HardwareError where nothing is known of a host that is asked for,
        ProfileError where the profile cannot be read, ValueError where sizes, limit and hardware do not fit together.
        """
        self.model, self.config, self.facts, self.trace = model, config, facts, trace
        self._describe = cache(Describer(model, config, facts, trace).describe)
        self.job = training_job(config, facts)
        self._profile = _profile(config)
        self.is_timed = self._profile is not None and bool(self._profile.segments)
        after_oom = hardware is None
        if hardware is None:
            named = config.hardware if self._profile is None else self._profile.hardware
            hardware = hardware_of_run(named, device_type=facts.device_type, nodes=config.nodes, measure=measured_once)
            hardware = hardware.with_margin(config.memory_margin)
        _check_host(hardware, config, facts)
        self.together = hardware, self.job
        """Hardware and job where all machines train together in every step."""
        if config.local_steps is not None:
            hardware, self.job = of_one_machine(hardware, self.job, config)
        self.hardware = hardware
        limit = hardware.device.memory_bytes if config.memory_limit_bytes is None else config.memory_limit_bytes
        limit = check_limit(limit, hardware.device, given=f"memory_limit={config.memory_limit!r}")
        self.limit_bytes = limit_after_oom(limit) if after_oom else limit

    def build(self, split: ModelSplit = WHOLE_BLOCKS, *, micro_batch_size: int = TRACED_MICRO_BATCH) -> PlanningProblem:
        """Return the problem of the model with a split, compiled blocks at this size; or raise DescriptionError, ProfileError."""
        description = self._describe(split, micro_batch_size=micro_batch_size)
        if self._profile is not None and split.is_none:
            description = with_block_times(description, self._profile)
        return PlanningProblem(
            description=description,
            hardware=self.hardware,
            job=self.job,
            memory_limit_bytes=self.limit_bytes,
            strategy=Strategy.parse(self.config.strategy),
        )

    def find(self) -> FoundPlan:
        """Search on rank 0; what is compiled is described at the micro-batch size that the plan takes. Collective."""
        found, described = self._find(TRACED_MICRO_BATCH), {1, TRACED_MICRO_BATCH}
        while found.whole.compiled_classes and isinstance(found.outcome, Plan) and len(described) < _MOST_DESCRIPTIONS:
            if (size := found.outcome.micro_batch_size) in described:
                break
            described.add(size)
            found = self._find(size)
        steps = found.outcome.accumulation_steps if isinstance(found.outcome, Plan) else 1
        if self.config.step_in_backward and steps > 1 and rank() == 0:
            said = "step_in_backward=True has no effect: the plan accumulates %d micro-steps; a smaller global batch would let units step."
            _log.warning(said, steps)
        return found

    def _find(self, micro_batch_size: int) -> FoundPlan:
        whole = self.build(micro_batch_size=micro_batch_size)
        split = on_rank_zero(lambda: self._best_split(whole, micro_batch_size))
        problem = whole if split == whole.description.split else self.build(split, micro_batch_size=micro_batch_size)
        found = partial(FoundPlan, builder=self, whole=whole.description, problem=problem)
        try:
            return found(outcome=plan_from_rank_zero(lambda: search(problem).plan))
        except InfeasibleError as error:
            return found(outcome=error)

    def _best_split(self, whole: PlanningProblem, micro_batch_size: int) -> ModelSplit:
        """Return how the model trains fastest, whole or split; a model whose times a profile holds stays whole."""
        config, facts = self.config, self.facts
        if not config.operator_splitting or self.is_timed:
            return whole.description.split
        vocabulary = facts.reads_loss_alone if config.split_vocabulary is None else config.split_vocabulary
        operators = not (facts.activation_checkpointing or whole.description.compiled_classes)  # parts of these are no units
        splits = partial(
            possible_splits, self.model, whole.description, vocabulary=vocabulary, operators=operators,
            slices=facts.optimizer.takes_slices,
        )  # fmt: skip
        return choose_description(whole, splits, partial(self._describe, micro_batch_size=micro_batch_size)).split

    @cached_property
    def eager(self) -> ModelDescription:
        """The model without compilation."""
        return Describer(self.model, replace(self.config, compile=False), self.facts, self.trace).describe()


def plan_from_rank_zero(make: Callable[[], Plan]) -> Plan:
    """Return rank 0's plan on every rank, parsed from its JSON form. Collective."""
    return Plan.from_json(on_rank_zero(lambda: make().to_json()), source="the plan from rank 0")


class Describer:
    """Describe the model with the loop's own batches and loss where these can be traced, else with the model's usual batch."""

    def __init__(self, model: nn.Module, config: OSDPConfig, facts: RunFacts, trace: Trace = describe) -> None:
        self._model, self._config, self._facts, self._trace = model, config, facts, trace
        self._inputs, self._loss = (config.inputs, None) if config.inputs else (facts.inputs, facts.loss)
        self._may_fall_back = config.inputs is None and facts.inputs is not None and _has_usual_batch(model)

    def describe(
        self, split: ModelSplit = WHOLE_BLOCKS, *, micro_batch_size: int = TRACED_MICRO_BATCH, least_memory: bool = False
    ) -> ModelDescription:
        """Describe the model with a split, for the `least_memory` without choices that never need less; or raise DescriptionError."""
        sizes = {
            "micro_batch_size": micro_batch_size if self._config.compile else TRACED_MICRO_BATCH,
            "partial_recomputation": not least_memory,
        }
        if not self._may_fall_back:
            return self._describe(split, **sizes)
        try:
            description = self._describe(split, **sizes)
            if not is_by_formula(description):
                return description
            reason = description.trace
        except DescriptionError as error:
            if isinstance(error, CheckpointingError) or not split.is_none:
                raise
            reason = str(error)
        _log.warning(
            "What %s computes from its batches cannot be traced (%s): the estimate is that of the model's own loss on %d tokens;"
            " a lower memory_limit leaves room for what is missing.",
            "the loop's own loss" if self._loss else "the model", reason, self._facts.sequence_length,
        )  # fmt: skip
        self._inputs, self._loss, self._may_fall_back = None, None, False
        return self._describe(split, **sizes)

    def _describe(self, split: ModelSplit, **sizes: Any) -> ModelDescription:
        facts = self._facts
        assert facts.sequence_length is not None
        description = self._trace(
            self._model,
            sequence_length=facts.sequence_length,
            block_classes=self._config.block_classes,
            compute_dtype=facts.precision.compute,
            autocast=facts.precision.autocast,
            device_type=facts.device_type,
            capability=facts.capability,
            activation_checkpointing=facts.activation_checkpointing,
            inputs=self._inputs,
            loss=self._loss,
            compile=bool(self._config.compile),
            split=split,
            **sizes,
        )
        return replace(description, other_bytes=sum(facts.other_models.values()))


def _has_usual_batch(model: nn.Module) -> bool:
    try:
        training_batch(model, 1)
    except (DescriptionError, AttributeError):
        return False
    return True


def _profile(config: OSDPConfig) -> Profile | None:
    """Return the profile that the user named, from rank 0's file. Collective."""
    named = config.profile
    if named is None or isinstance(named, Profile):
        return named
    text = on_rank_zero(lambda: Profile.load(named).to_json())
    return Profile.from_json(text, source=str(named))


def _check_host(hardware: Hardware, config: OSDPConfig, facts: RunFacts) -> None:
    """Refuse to offload to a host that is not there or not known."""
    name = next((name for name in ("host_offload", "offload_optimizer", "offload_activations") if getattr(config, name)), None)
    if facts.device_type == "cpu":
        if name:
            raise ValueError(f"{name}=True, but the CPU trains in the host's own memory; leave {name} out.")
        if facts.cpu_offload:
            _log.warning("cpu_offload has no effect on the CPU: there is no other memory to move states to.")
    elif (facts.cpu_offload or name) and hardware.host is None:
        what = "Saved activations" if config.offload_activations else "All states"
        raise HardwareError(
            f"{what} are to move to the host, but the host of {hardware.device.name} is not known;"
            " leave hardware out to have it measured, or give a profile or Hardware(host=...)."
        )
