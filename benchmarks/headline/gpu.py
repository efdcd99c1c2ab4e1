"""The real sizes on one GPU as rank 0 of the case's devices, with a limit enforced by torch's allocator and an
emulated link.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import torch

from benchmarks.cuda_memory import CudaMemory, Memory
from benchmarks.trial import Trial, sharded_copy
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.measurement.block_times import TimedModel
from hf_osdp.measurement.machine import measure_profile
from hf_osdp.modeling.batch import training_batch
from hf_osdp.modeling.build import build_on_meta
from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.hardware import Hardware
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.profile import with_block_times
from hf_osdp.tracing.describe import describe
from tests.helpers.fake_step import fake_process_group
from tests.helpers.steps import batch_on, make_optimizer, train_step

from .cases import Case, as_one_of
from .emulated import CudaHold, Hold, hold_link
from .lineup import Lineup, job_of, line_up
from .rows import Measured, Row, rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEffort:
    """Amount of measurement."""

    profile_s: float = 20.0
    samples: tuple[int, ...] = (1, 2, 4)
    """Micro-batch sizes at which blocks are timed."""
    untimed_steps: int = 2
    """Warm-up steps; the first creates the optimizer's states."""
    steps: int = 5


QUICK = GpuEffort(profile_s=6.0, steps=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFound:
    """The results of one case."""

    rows: tuple[Row, ...]
    machine: str
    worst_hold_error: float
    """Relative error of the total hold time of a plan; the worst of the plans."""


def measure_on_cuda(case: Case, effort: GpuEffort) -> GpuFound:
    """Measure all entries of a case on the first GPU; run this in a separate process."""
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
    """Return the model with block times measured on this device, and the hardware of several such devices."""
    config, options = case.config(), {"sequence_length": case.sequence_length, "block_classes": case.block_classes}
    profile = measure_profile(
        device_type="cuda", seconds=effort.profile_s,
        model=TimedModel(model_or_config=config, micro_batch_sizes=effort.samples, compute_dtype=case.compute.compute,
                         **options),
    )  # fmt: skip
    description = describe(config, compute_dtype=case.compute.compute, device_type="cuda", **options)
    hardware = as_one_of(profile.hardware, case.devices, workspace_bytes=memory.workspace_bytes)
    return with_block_times(description, profile), hardware


class Runner:
    """Run the plans of one case one after the other, because two models would not fit."""

    def __init__(
        self,
        lineup: Lineup,
        description: ModelDescription,
        hardware: Hardware,
        memory: Memory,
        hold: Hold,
        effort: GpuEffort,
    ) -> None:
        """
        Args:
            lineup: the plans and the limit.
            description: description of the model.
            hardware: its links are emulated.
            memory: the device memory.
            hold: keeps the streams busy.
            effort: number of steps.
        """
        self._lineup, self._hardware, self._memory, self._hold, self._effort = lineup, hardware, memory, hold, effort
        case = lineup.case
        model = build_on_meta(case.config())
        self._trial = Trial(
            model=model, units=description.units, job=job_of(case, case.devices), device=memory.device,
            inputs=training_batch(model, case.sequence_length),
        )  # fmt: skip
        self._meshes = Meshes(memory.device.type)

    def run(self, plan: Plan) -> Measured:
        """Run a plan's steps under the limit and free everything; the result has no steps if memory did not
        suffice.
        """
        measured = Measured()
        try:
            with self._memory.limited(self._lineup.limit_bytes):
                measured = self._steps(plan)
        except torch.OutOfMemoryError:
            pass  # memory is freed below, because the traceback still holds the tensors here
        gc.collect()
        return measured

    def _steps(self, plan: Plan) -> Measured:
        """Build and train; all tensors are freed on return."""
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
