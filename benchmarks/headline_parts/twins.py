"""Small versions (twins) of the cases on gloo ranks of this machine's CPU: real collectives, one step of every plan
per round.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.headline_parts.cases import Case
from benchmarks.headline_parts.lineup import Lineup, job_of, line_up
from benchmarks.headline_parts.rows import Measured, rows_of
from hf_osdp.distributed.consensus import on_rank_zero
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.measurement.block_times import TimedModel
from hf_osdp.measurement.machine import measure_profile
from hf_osdp.measurement.step_meter import StepMeter, training_tensors
from hf_osdp.modeling.batch import training_batch
from hf_osdp.modeling.build import build_on_meta
from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.hardware import Hardware
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.profile import with_block_times
from hf_osdp.preparation.probe import Trial, sharded_copy
from hf_osdp.sharding.optimizer_steps import bind_optimizer, step_by_device
from hf_osdp.sharding.steps import batch_on, make_optimizer, train_step
from hf_osdp.tracing.describe import describe

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinEffort:
    """Amount of measurement."""

    rounds: int = 9
    """Number of rounds; each has one step of every plan."""
    profile_s: float | None = 6.0
    """Seconds to measure before planning; None measures nothing and takes the preset `cpu`, which describes another
    machine.
    """
    rounds_a_profile: int = 3
    """Rounds between measurements of the machine, whose speed drifts."""
    samples: tuple[int, ...] = (1, 2, 4, 8)
    """Samples per device to try for the own best batch; steps with more samples take long."""


QUICK = TwinEffort(rounds=3, profile_s=2.0, samples=(1, 2, 4))


def measure_twin(case: Case, effort: TwinEffort) -> list[dict]:
    """Return all rows of a twin as plain values. Collective over as many gloo ranks as the case has devices."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    description, hardware = measured_machine(case, effort)
    lineup = on_rank_zero(lambda: line_up(case, description, hardware, samples=effort.samples))
    plans = lineup.distinct_plans()
    contestants = _contestants(lineup, description)
    peaks = {name: contestant.peak_bytes() for name, contestant in contestants.items()}
    steps, estimates = ({name: [] for name in plans} for _ in range(2))
    names = list(plans)
    for number in range(effort.rounds):
        if number and number % effort.rounds_a_profile == 0:
            description, hardware = measured_machine(case, effort)
        for name in (
            names[number % len(names) :] + names[: number % len(names)]
        ):  # a different plan is first in each round
            steps[name].append(contestants[name].step_s())
            job = job_of(case, plans[name].global_batch_size)
            estimates[name].append(estimate_plan(plans[name], description, job, hardware).time.step_s)
        say(f"{case.name}: round {number + 1} of {effort.rounds}")
    found = {
        name: Measured(steps_s=tuple(steps[name]), peak_bytes=peaks[name],
                       estimated_s=tuple(estimates[name])) for name in plans
    }  # fmt: skip
    return [asdict(row) for row in rows_of(lineup, found)]


def measured_machine(case: Case, effort: TwinEffort) -> tuple[ModelDescription, Hardware]:
    """Return the model with block times measured on these ranks, and their hardware. Collective."""
    config, options = case.config(), {"sequence_length": case.sequence_length, "block_classes": case.block_classes}
    if effort.profile_s is None:
        return describe(config, **options), preset("cpu", devices_per_node=dist.get_world_size())
    profile = measure_profile(
        device_type="cpu", seconds=effort.profile_s, model=TimedModel(model_or_config=config,
                                                                      micro_batch_sizes=effort.samples, **options)
    )  # fmt: skip
    return with_block_times(describe(config, **options), profile), profile.hardware


def _contestants(lineup: Lineup, description: ModelDescription) -> dict[str, Contestant]:
    """Return one model per plan. Collective."""
    case, meshes = lineup.case, Meshes("cpu")
    model = build_on_meta(case.config())
    trial = Trial(
        model=model, units=description.units, job=job_of(case, case.devices), device=CPU,
        inputs=training_batch(model, case.sequence_length), block_classes=description.block_classes,
    )  # fmt: skip
    return {name: Contestant(plan, replace(trial, job=job_of(case, plan.global_batch_size)), meshes)
            for name, plan in lineup.distinct_plans().items()}  # fmt: skip


class Contestant:
    """A model that takes the steps of a plan."""

    def __init__(
        self,
        plan: Plan,
        trial: Trial,
        meshes: Meshes,
        *,
        make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    ) -> None:
        """Build the model; `make` creates an optimizer other than the job's."""
        self._plan, self._job = plan, trial.job
        self._model = sharded_copy(plan, trial, meshes)
        if make is None:
            self._optimizer = make_optimizer(self._model, trial.job.optimizer, plan, trial.units)
        else:
            self._optimizer = make(self._model.parameters())
            step_by_device(self._optimizer)
            bind_optimizer(self._model, plan, trial.units, [self._optimizer])
        self._batch = batch_on(trial.inputs, plan.micro_batch_size, CPU)

    def peak_bytes(self) -> int:
        """Return the peak bytes of live tensors in the second step, on the rank with the most. Collective."""
        inputs = [value for value in self._batch.values() if isinstance(value, torch.Tensor)]
        meter = StepMeter(CPU, lambda: [*training_tensors(self._model, self._optimizer), *inputs], clocked_steps=0)
        for _ in range(meter.untimed):
            gc.collect()  # free the reference cycles of earlier steps first
            meter.step_begins()
            self._step()
            meter.step_ends()
        return meter.summary().peak_bytes

    def step_s(self) -> float:
        """Return the seconds of one step on the slowest rank. Collective."""
        dist.barrier()
        began = time.perf_counter()
        self._step()
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.item()

    def _step(self) -> None:
        train_step(self._model, self._optimizer, self._batch, self._plan, self._job)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)
