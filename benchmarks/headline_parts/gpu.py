"""The real sizes on one GPU as rank 0 of as many as a case has, its memory limit enforced by torch's allocator, the link emulated."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import torch

from benchmarks.cuda_memory import CudaMemory, Memory
from benchmarks.headline_parts.cases import Case
from benchmarks.headline_parts.emulated import CudaHold, Hold, hold_link
from benchmarks.headline_parts.lineup import Lineup, job_of, line_up
from benchmarks.headline_parts.machines import as_one_of
from benchmarks.headline_parts.rows import Measured, Row, rows_of
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.measurement.block_times import TimedModel
from hf_osdp.measurement.machine import measure_profile
from hf_osdp.modeling.batch import training_batch
from hf_osdp.modeling.build import build_on_meta
from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.hardware import Hardware
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.profile import with_block_times
from hf_osdp.planning.probe import Trial, sharded_copy
from hf_osdp.planning.simulate import fake_process_group
from hf_osdp.sharding.steps import batch_on, make_optimizer, train_step
from hf_osdp.tracing.describe import describe


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEffort:
    """How much is measured."""

    profile_s: float = 20.0
    samples: tuple[int, ...] = (1, 2, 4)
    """Of a device, at which blocks are timed."""
    untimed_steps: int = 2
    """The first makes the optimizer's states."""
    steps: int = 5


QUICK = GpuEffort(profile_s=6.0, steps=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFound:
    """What one case gave."""

    rows: tuple[Row, ...]
    machine: str
    worst_hold_error: float
    """By how much a plan's holds were too long, together, as a part; the worst of the plans."""


def measure_on_cuda(case: Case, effort: GpuEffort) -> GpuFound:
    """All entries of a case on this machine's first GPU; run it in a process of its own."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    memory = CudaMemory(case.compute)
    description, hardware = measured_machine(case, effort, memory)
    lineup = line_up(case, description, hardware)
    with fake_process_group(case.devices):
        hold = CudaHold(memory.device)
        runner, measured, worst = Runner(lineup, description, hardware, memory, hold, effort), {}, 0.0
        for name, plan in lineup.distinct_plans().items():
            measured[name] = runner.run(plan)
            worst = max(worst, hold.error(), key=abs)
    return GpuFound(rows=rows_of(lineup, measured), machine=torch.cuda.get_device_name(), worst_hold_error=worst)


def measured_machine(case: Case, effort: GpuEffort, memory: CudaMemory) -> tuple[ModelDescription, Hardware]:
    """The model with its blocks' times on this device, and the machine of several such devices."""
    config, options = case.config(), {"sequence_length": case.sequence_length, "block_classes": case.block_classes}
    profile = measure_profile(
        device_type="cuda", seconds=effort.profile_s,
        model=TimedModel(model_or_config=config, micro_batch_sizes=effort.samples, compute_dtype=case.compute.compute, **options),
    )  # fmt: skip
    description = describe(config, compute_dtype=case.compute.compute, device_type="cuda", **options)
    hardware = as_one_of(profile.hardware, case.devices, workspace_bytes=memory.workspace_bytes)
    return with_block_times(description, profile), hardware


class Runner:
    """Runs plans of one case, one after the other: two models would not fit."""

    def __init__(
        self, lineup: Lineup, description: ModelDescription, hardware: Hardware, memory: Memory, hold: Hold, effort: GpuEffort
    ) -> None:
        """
        Args:
            lineup: the plans, and the limit.
            description: of the model.
            hardware: whose links are emulated.
            memory: that it trains in.
            hold: what keeps streams busy.
            effort: steps.
        """
        self._lineup, self._hardware, self._memory, self._hold, self._effort = lineup, hardware, memory, hold, effort
        case = lineup.case
        model = build_on_meta(case.config())
        self._trial = Trial(
            model=model, units=description.units, job=job_of(case, case.devices), device=memory.device,
            inputs=training_batch(model, case.sequence_length), block_classes=description.block_classes,
        )  # fmt: skip
        self._meshes = Meshes(memory.device.type)

    def run(self, plan: Plan) -> Measured:
        """A plan's steps under the limit; without any where memory did not suffice. Nothing is left behind."""
        measured = Measured()
        try:
            with self._memory.limited(self._lineup.limit_bytes):
                measured = self._steps(plan)
        except torch.OutOfMemoryError:
            pass  # cleaned up below, when the traceback no longer keeps the tensors
        gc.collect()
        return measured

    def _steps(self, plan: Plan) -> Measured:
        """Everything dies with this frame."""
        trial, effort = self._trial, self._effort
        model = sharded_copy(plan, trial, self._meshes)
        hold_link(model, plan, self._hardware, self._hold)
        optimizer = make_optimizer(model, trial.job.optimizer, plan, trial.units)
        batch = batch_on(trial.inputs, plan.micro_batch_size, trial.device)
        steps = []
        for number in range(effort.untimed_steps + effort.steps):
            if number == effort.untimed_steps:
                self._memory.last_step_begins()
                self._hold.settle()
            self._memory.wait()
            began = time.perf_counter()
            train_step(model, optimizer, batch, plan, trial.job)
            self._memory.wait()
            steps.append(time.perf_counter() - began)
        return Measured(steps_s=tuple(steps[effort.untimed_steps :]), peak_bytes=self._memory.reading().allocated)
