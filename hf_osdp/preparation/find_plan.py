"""Build a planning problem from a model and the run's job, and search it.

All plans of runs are found here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from ..distributed.consensus import on_rank_zero
from ..distributed.fsdp_internals import JOINS_BLOCKS
from ..distributed.mesh import rank
from ..distributed.restart import limit_after_oom
from ..errors import (
    CheckpointingError,
    DescriptionError,
    DescriptionTimeoutError,
    InfeasibleError,
    ProfileError,
    Remedy,
    refuse_first,
)
from ..measurement.block_times import TimedModel
from ..measurement.machine import bytes_of_others
from ..measurement.timing import over_ranks
from ..modeling.batch import training_batch
from ..modeling.build import drops_layers
from ..modeling.split.candidates import possible_splits
from ..planner.cost.collectives import sharded_seconds
from ..planner.cost.placement import host_of
from ..planner.cost.timing import price_micro_batches
from ..planner.description import DType, ModelDescription
from ..planner.grouping import grouped
from ..planner.hardware import Collective, Hardware
from ..planner.plan import Plan
from ..planner.problem import PlanningProblem, Strategy
from ..planner.profile import BlockTimes, Profile
from ..planner.search.compare import (
    StrategyResult,
    choose_blocks_per_unit,
    choose_description,
    compare_strategies,
)
from ..planner.search.search import search
from ..planner.shared_policies import with_policies_of
from ..planner.split import WHOLE_BLOCKS, ModelSplit
from ..quantities import format_bytes
from ..tracing.describe import describe
from ..tracing.options import ModelRun
from ..tracing.pictures import UsualBatch
from .cache import describe_once
from .job import OTHER_TENSORS, Evaluation, Job
from .run_profile import hardware_of_run, times_of_run

_log = logging.getLogger(__name__)
_GAIN = 0.05
"""Share of a step that cutting by length has to save, if it was not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """Result of the search for a run's plan."""

    builder: ProblemBuilder
    """Holds the run's job."""
    whole: ModelDescription
    """The model before it is split."""
    problem: PlanningProblem
    """The problem that was searched, of the whole or the split model, whichever trains faster."""
    outcome: Plan | InfeasibleError

    @property
    def plan(self) -> Plan:
        """The plan, the same on every process; raise InfeasibleError if no plan fits."""
        if isinstance(self.outcome, InfeasibleError):
            raise self.outcome
        return self.outcome

    @property
    def least_bytes(self) -> int:
        """The least limit under which a plan would fit, where none does; else 0."""
        return self.outcome.least_peak_bytes if isinstance(self.outcome, InfeasibleError) else 0

    @property
    def step_s(self) -> float:
        """Seconds of a step, with gathers of models beside, which may not be hidden; infinite without a plan."""
        if isinstance(self.outcome, InfeasibleError):
            return math.inf
        job, hardware = self.builder.job, self.problem.hardware
        gathered = job.models_beside.gathered_bytes if job.models_beside is not None and job.shards_beside else ()
        gathers = (sharded_seconds(hardware, Collective.ALL_GATHER, hardware.world_size, 1, n) for n in gathered)
        return (self.outcome.step_s or 0.0) + self.outcome.accumulation_steps * sum(gathers)

    def compared(self) -> Iterator[StrategyResult]:
        """Yield every strategy at its own best batch, OSDP first."""
        return compare_strategies(replace(self.problem, description=self.whole), split=self.problem.description)

    @property
    def of_single_blocks(self) -> ModelDescription:
        """The model that was searched, with each block in a unit of its own."""
        return self.builder.describe(self.problem.description.split.of_single_blocks)


def find_plan(model: nn.Module, job: Job, *, hardware: Hardware | None = None) -> FoundPlan:
    """Search on rank 0 for the run's fastest plan that fits. Collective; arguments and errors are those of
    `ProblemBuilder`.

    Models beside the trained one are sharded where that makes a plan fit, or saves more than their gathers take.
    A single process can run under autocast without FSDP2 if all units stay on the device; that is tried first. Units
    on the host need FSDP2 and its mixed precision.
    """
    builder = partial(ProblemBuilder, model, hardware=hardware)
    asked, found = job.config.host_offload, None
    if job.precision.autocast and not asked:
        found = builder(job.asking(host_offload=False)).find()
    if found is None or not (isinstance(found.outcome, Plan) or job.device_type == "cpu" or asked is False):
        found = builder(job.under_fsdp).find()
    if job.models_beside is not None and not job.shards_beside:
        sharded = found.builder.for_job(replace(found.builder.job, shards_beside=True)).find()
        if (sharded.least_bytes, sharded.step_s) < (found.least_bytes, found.step_s):
            found = sharded
    device = found.problem.hardware.device
    known = DType.BFLOAT16 in device.flops_per_s
    if job.precision.compute is DType.BFLOAT16 and known and not device.native_bf16 and rank() == 0:
        _log.warning(
            "%s has no units for bfloat16: products run at %.1f TFLOP/s, in float16 at %.0f; use fp16.",
            device.name, *(device.flops_per_s[dtype] / 1e12 for dtype in (DType.BFLOAT16, DType.FLOAT16)),
        )  # fmt: skip
    return found


class ProblemBuilder:
    """Build planning problems of one model: hardware, job and limit once, a description for each way to split the
    model.
    """

    def __init__(
        self,
        model: nn.Module,
        job: Job,
        *,
        hardware: Hardware | None = None,
        times: Mapping[ModelSplit, BlockTimes] = MappingProxyType({}),
    ) -> None:
        """Find out job, limit and hardware; for `hardware=None` use the configuration's, or measure this machine.
        Collective if None.

        `times` are those of the model's blocks, if they are known, by the split of the loss. Raise
        HardwareError if offload needs a host that the hardware does not describe, ProfileError if the profile cannot
        be read, ValueError if sizes, limit and hardware contradict each other.
        """
        self.model, self.job, config = model, job, job.config
        self._describer = Describer(model, job)
        self._training = job.training()
        self._profile = _profile(config.profile)
        self.times, self._untimed = dict(times), "estimated"
        after_oom = hardware is None
        self._measures = config.time_blocks and job.trains and not (config.hardware or self._profile or hardware)
        if hardware is None:
            named = config.hardware if self._profile is None else self._profile.hardware
            hardware = hardware_of_run(named, device_type=job.device_type, nodes=config.nodes)
            hardware = hardware.with_margin(config.memory_margin)
            hardware = replace(hardware, beside_bytes=self._beside_bytes(hardware))
        refuse_first({
            f"{name}=True, but the CPU trains in the host's own memory; leave {name} out.": job.device_type == "cpu"
            for name in config.asked
        })  # fmt: skip
        if config.asked:
            host_of(hardware, config.asked[0])
        self.hardware = hardware
        limit = hardware.check_limit(config.memory_limit_bytes, given=f"memory_limit={config.memory_limit!r}")
        self.limit_bytes = limit_after_oom(limit) if after_oom else limit
        if limit < (config.memory_limit_bytes or 0) and not hardware.beside_bytes and rank() == 0:
            _log.warning(
                "memory_limit=%s means all of the %s that torch states of %s.",
                config.memory_limit, format_bytes(limit), hardware.device.name,
            )  # fmt: skip

    def _beside_bytes(self, hardware: Hardware) -> int:
        """Return what other programs take of each device: as asked, or as they have it now. Collective."""
        used = int(over_ranks([bytes_of_others(self.job.device_type)])[0])
        if used and rank() == 0:
            _log.warning("Other programs use %s of the device: plans leave them that.", format_bytes(used))
        asked = self.job.config.beside_bytes(hardware.device.memory_bytes)
        return max(used, asked - self.job.other_models.get(OTHER_TENSORS, 0))

    def build(self, split: ModelSplit = WHOLE_BLOCKS) -> PlanningProblem:
        """Return the problem of the model with a split; raise DescriptionError or ProfileError. Collective if it
        times the blocks.
        """
        if split.is_none and not self.times:
            self._take_times()
        return PlanningProblem(
            description=self.describe(split),
            hardware=self.hardware,
            job=self._training,
            memory_limit_bytes=self.limit_bytes,
            strategy=Strategy.parse(self.job.config.strategy),
            simplicity=self.job.config.simplicity,
        )

    def describe(self, split: ModelSplit) -> ModelDescription:
        """Describe the model with a split, with the times of its blocks if they were measured."""
        description = self._describer.describe(split.of_single_blocks)
        times = self.times.get(split.of_loss, self.times.get(WHOLE_BLOCKS))
        timed = replace(description, timing=self._untimed) if times is None else times.on(description)
        return grouped(timed, split.blocks_per_unit)

    def _take_times(self) -> None:
        """Take the profile's times of the blocks, or measure them where the run measures."""
        if self._profile is not None and self._profile.segments:
            whole = self._describer.describe()
            found = BlockTimes.of(self._profile.segments, whole, self.hardware, "from the profile")
            self.times[WHOLE_BLOCKS] = found
        elif self._measures and not self._time_blocks(WHOLE_BLOCKS):
            self._measures = False

    def _time_blocks(self, split: ModelSplit) -> bool:
        """Measure the blocks with the loss whole or split; return whether that was possible. Collective."""
        try:
            timed = self._describer.timed_model(self._training.micro_batch_sizes(self.job.world_size))
            new = times_of_run(
                self._describer.describe(split), timed, self.hardware, device_type=self.job.device_type,
                room_bytes=self.hardware.tensor_bytes(self.limit_bytes),
            )  # fmt: skip
        except ProfileError as error:
            self._untimed = f"estimated. {error}"
            return False
        known = self.times[WHOLE_BLOCKS].segments if self.times else ()
        segments = (*new.segments, *known)  # the first of a kind counts
        for timed_split in (WHOLE_BLOCKS, split):
            description = self._describer.describe(timed_split)
            self.times[timed_split] = BlockTimes.of(segments, description, self.hardware, new.source)
        return True

    def for_job(self, job: Job) -> ProblemBuilder:
        """Return a builder for the same model, hardware, limit and times with another job; it measures nothing."""
        job = job.asking(profile=None)  # its times are known
        builder = ProblemBuilder(self.model, job, hardware=self.hardware, times=self.times)
        builder.limit_bytes = self.limit_bytes  # may be lower after an out-of-memory error
        return builder

    def find(self) -> FoundPlan:
        """Search on rank 0, also for a step that is cut by length if the loop can do so. Collective."""
        found, lengths, asked = self._find(), self._training.lengths, self.job.config.batch_by_tokens
        plan, problem = found.outcome, found.problem
        if lengths is None or not self.job.cuts_by_length or asked is False or isinstance(plan, InfeasibleError):
            return found
        layouts, as_loaded = plan.layouts(problem.description), self._training
        budget = on_rank_zero(lambda: price_micro_batches(problem.description, layouts, problem.hardware, problem.job))
        budget = replace(budget, deals=self.job.deals)
        self._training = replace(self._training, lengths=replace(lengths, budget=budget))
        cut = self._find()
        if asked or cut.step_s < (1 - _GAIN) * found.step_s:
            return cut
        self._training = as_loaded
        return found

    def _find(self) -> FoundPlan:
        whole = self.build()
        split = on_rank_zero(lambda: self._best_split(whole))
        if self._measures and split.of_loss not in self.times:
            self._measures = self._time_blocks(split.of_loss)
            whole = self.build()
            split = on_rank_zero(lambda: self._best_split(whole))
        problem = whole if split == whole.description.split else self.build(split)
        found = partial(FoundPlan, builder=self, whole=whole.description, problem=problem)
        try:
            return found(outcome=plan_from_rank_zero(lambda: search(problem).plan))
        except InfeasibleError as error:
            return found(outcome=error.with_remedies(self._split_remedy()))

    def _split_remedy(self) -> tuple[Remedy, ...]:
        """Return the split of the vocabulary as a remedy, if it was not allowed, and some plan fits with it.
        Collective.
        """
        config = self.job.config
        impossible = self._splits_vocabulary or self.job.activation_checkpointing
        if impossible or not config.operator_splitting or config.strategy != Strategy.OSDP.value:
            return ()
        split = self.for_job(self.job.asking(split_vocabulary=True)).find()
        script = "split_vocabulary=True in a loop that reads only the loss"
        return () if isinstance(split.outcome, InfeasibleError) else (Remedy(script, "--split-vocabulary"),)

    @property
    def _splits_vocabulary(self) -> bool:
        allowed = self.job.config.split_vocabulary
        return self.job.reads_loss_alone if allowed is None else allowed

    def _best_split(self, whole: PlanningProblem) -> ModelSplit:
        """Return the split with which the model trains fastest, or none."""
        fastest = self._fastest_split(whole)
        problem = whole if fastest == whole.description.split else replace(whole, description=self.describe(fastest))
        description = choose_blocks_per_unit(problem, self.blocks_per_unit)
        if (asked := self.job.config.blocks_per_unit or 1) > description.split.blocks_per_unit:
            _log.warning("blocks_per_unit=%d has no effect: this run has no units of equal neighbours.", asked)
        return description.split

    @property
    def blocks_per_unit(self) -> int | None:
        """Most blocks in a unit; None lets the search choose."""
        config = self.job.config
        if drops_layers(self.model):
            refuse_first({
                f"blocks_per_unit={config.blocks_per_unit} gathers blocks together, and this model leaves out some at"
                " random (LayerDrop); leave blocks_per_unit out.": (config.blocks_per_unit or 1) > 1,
            })  # fmt: skip
            return 1
        alone = not JOINS_BLOCKS or config.offload_activations  # units of several blocks offload nothing
        return config.blocks_per_unit or (1 if alone else None)

    def _fastest_split(self, whole: PlanningProblem) -> ModelSplit:
        job = self.job
        if not job.config.operator_splitting:
            return whole.description.split
        operators = not (
            job.activation_checkpointing or job.config.recompute or whole.description.compiled_classes
        )  # such blocks cannot be cut into units
        splits = partial(
            possible_splits, self.model, whole.description, vocabulary=self._splits_vocabulary, operators=operators,
            parts=job.optimizer.steps_parts,
        )  # fmt: skip
        return choose_description(whole, splits, self.describe).split


def plan_from_rank_zero(make: Callable[[], Plan]) -> Plan:
    """Return rank 0's plan on every rank, parsed from its JSON form. Collective."""
    return Plan.from_json(on_rank_zero(lambda: make().to_json()), source="the plan from rank 0")


class Describer:
    """Describe the model with the loop's own batches and loss if these can be traced, else with the model's usual
    batch.
    """

    def __init__(self, model: nn.Module, job: Job) -> None:
        self._model, self._job = model, job
        self._inputs, self._loss = (job.config.inputs, None) if job.config.inputs else (job.inputs, job.loss)
        self._may_fall_back = job.config.inputs is None and job.inputs is not None and _has_usual_batch(model)
        self._describe = cache(self._traced)

    def describe(self, split: ModelSplit = WHOLE_BLOCKS) -> ModelDescription:
        """Describe the model with a split, or raise DescriptionError."""
        try:
            return self._sharing_policies(split) or self._describe(split)
        except DescriptionError as error:
            final = isinstance(error, (CheckpointingError, DescriptionTimeoutError))
            if not final and split.is_none and (of_one := self._of_one_sample()) is not None:
                return of_one
            if not self._may_fall_back or final or not split.is_none:
                raise
            _log.warning(
                "%s cannot be traced with its batches (%s): the estimate uses the model's own loss on %d tokens;"
                " set a lower memory_limit to leave room for what is missing.",
                "The loop's own loss" if self._loss else "The model", str(error).rstrip("."),
                self._job.config.sequence_length,
            )  # fmt: skip
        self._inputs, self._loss, self._may_fall_back = None, None, False
        return self._describe(split)

    def describe_evaluation(self, evaluation: Evaluation, split: ModelSplit) -> ModelDescription:
        """Describe the model with a split as it evaluates, with the outputs that are kept; raise DescriptionError."""
        run = replace(
            self._run, inputs=evaluation.inputs, loss=evaluation.outputs, trains=False,
            sequence_length=evaluation.sequence_length, activation_checkpointing=False,
        )  # fmt: skip
        return self._job.with_others(describe(self._model, **run.keywords, split=split, recomputation=False))

    def _of_one_sample(self) -> ModelDescription | None:
        """Describe a model that may not run more samples at once by one alone; None if the run has larger
        micro-batches, its inputs are not known, or this fails too.
        """
        config, usual = self._job.config, self._inputs
        of_more = config.micro_batch_size != 1 and config.global_batch_size != self._job.world_size
        if of_more or (usual is None and not _has_usual_batch(self._model)):
            return None
        inputs = usual or UsualBatch(self._model, config.sequence_length or 1, config.images)
        self._inputs = lambda samples: inputs(1)
        try:
            return self._describe(WHOLE_BLOCKS)
        except DescriptionError:
            self._inputs = usual
            return None

    def _sharing_policies(self, split: ModelSplit) -> ModelDescription | None:
        """Describe the loss in chunks with the policies to recompute blocks of the model with its loss as a whole;
        None if that is not possible.
        """
        if split.with_whole_loss == split:
            return None
        base = self._describe(split.with_whole_loss)
        return with_policies_of(base, self._describe(split, recomputation=False)) if base.recomputable else None

    def timed_model(self, micro_batch_sizes: tuple[int, ...]) -> TimedModel:
        """Return the model with its batches and loss, as they were described, to be timed. On the CPU, which takes
        minutes to compile a block, none is compiled.
        """
        run = replace(self._run, compile=self._run.compile and self._run.device_type == "cuda")
        return TimedModel(model_or_config=self._model, micro_batch_sizes=micro_batch_sizes, **run.keywords)

    def _traced(self, split: ModelSplit, **options: Any) -> ModelDescription:
        return self._job.with_others(describe_once(self._model, **self._run.keywords, split=split, **options))

    @property
    def _run(self) -> ModelRun:
        """How the model runs, as it is traced and timed."""
        job, config = self._job, self._job.config
        assert config.sequence_length is not None
        return ModelRun(
            sequence_length=config.sequence_length, block_classes=config.block_classes, images=config.images,
            compile=config.compile, compute_dtype=job.precision.compute, autocast=job.precision.autocast,
            device_type=job.device_type, capability=job.capability, inputs=self._inputs, loss=self._loss,
            activation_checkpointing=job.activation_checkpointing,
        )  # fmt: skip


def _has_usual_batch(model: nn.Module) -> bool:
    try:
        training_batch(model, 1)(1)
    except (DescriptionError, AttributeError):
        return False
    return True


def _profile(named: Profile | str | Path | None) -> Profile | None:
    """Return the profile that the user named, from rank 0's file. Collective."""
    if named is None or isinstance(named, Profile):
        return named
    text = on_rank_zero(lambda: Profile.load(named).to_json())
    return Profile.from_json(text, source=str(named))
