"""Run a few real steps of a plan on a throw-away copy of the model, to measure what it needs before training starts.

No rank holds a second whole model: the copy is made on the meta device, sharded there, and only then given memory. Weights are
small random numbers; peak and time do not depend on them.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from ..distributed.mesh import Meshes, destroy_mesh, find_topology
from ..measurement.model_copies import empty_copy, fill
from ..measurement.step_meter import Observation, StepMeter, training_tensors
from ..measurement.timing import over_ranks
from ..modeling.batch import Inputs, random_states_kept
from ..modeling.build import checkpoint_blocks
from ..planner.description import UnitDescription
from ..planner.job import TrainingJob
from ..planner.plan import Plan
from ..sharding.apply import apply_plan, needs_process_group
from ..sharding.environment import move_to_device, mp_policy
from ..sharding.steps import batch_on, make_optimizer, train_step
from .out_of_memory import is_out_of_memory

TIMED_STEPS = 3
"""Steps whose time is measured, and as many whose collectives are; medians count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Model and batches that a plan is tried with. Every rank has the same."""

    model: nn.Module
    """Unsharded; it is copied and stays as it is. On any rank it may be on the meta device."""
    units: tuple[UnitDescription, ...]
    job: TrainingJob
    inputs: Inputs
    """From a number of samples to forward's keyword arguments, as `describe` takes them."""
    device: torch.device
    block_classes: tuple[str, ...] = ()
    """Blocks that are recomputed in backward."""
    activation_checkpointing: bool = False


def probe(plan: Plan, trial: Trial, meshes: Meshes | None, *, timed_steps: int = TIMED_STEPS) -> Observation:
    """Run a plan for a few steps and throw everything away but the observation. Collective.

    Random number generators are left as they were found. On CUDA each rank first takes its steps alone, with collectives that
    send nothing (the same allocations): a rank that runs out of memory there keeps no other waiting. So many steps are timed, at least 1,
    and as many others for their collectives. `meshes` is None where there is no process group.
    """
    find_topology()  # now, while all ranks are here: what follows looks it up, and ranks may fail one by one
    with random_states_kept([trial.device] if trial.device.type == "cuda" else []):
        seen = (_on_cuda if trial.device.type == "cuda" else _observe)(plan, trial, meshes, timed_steps)
    _give_back(trial.device)
    return seen


def _on_cuda(plan: Plan, trial: Trial, meshes: Meshes | None, timed_steps: int) -> Observation:
    """Measure memory with each rank alone first, then time with all."""
    (before,) = over_ranks([torch.cuda.memory_allocated(trial.device)], dist.ReduceOp.MIN)
    alone = None if meshes is None else SilentMeshes(meshes.device_type)
    silent = replace(trial, job=replace(trial.job, clips_gradients=False))  # a norm would be summed over the world
    failed = False
    try:
        _observe(plan, silent, alone, timed_steps=1, summed=False)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failed = True  # what follows must not run inside the handler: the traceback keeps the copy alive
    finally:
        if alone is not None:
            alone.close()
    _give_back(trial.device)
    if over_ranks([failed])[0]:
        return Observation(steps=0, median_step_s=None, out_of_memory=True)
    seen = _observe(plan, trial, meshes, timed_steps)
    return seen if seen.peak_bytes is None else replace(seen, peak_bytes=seen.peak_bytes - int(before), reserved_bytes=None)


def _observe(plan: Plan, trial: Trial, meshes: Meshes | None, timed_steps: int, *, summed: bool = True) -> Observation:
    """Measure steps on a copy that is freed on return, over all ranks; `summed=False` returns no figures, and asks no other rank."""
    model = sharded_copy(plan, trial, meshes)
    optimizer = make_optimizer(model, trial.job.optimizer, plan, trial.units)
    batch = batch_on(trial.inputs, plan.micro_batch_size, trial.device)
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    held, compiled = lambda: [*training_tensors(model, optimizer), *tensors], bool(plan.compiled_classes)
    meter = StepMeter(trial.device, held, clocked_steps=timed_steps, compiled=compiled)
    try:
        for _ in range(meter.untimed + timed_steps):
            meter.step_begins()
            train_step(model, optimizer, batch, plan, trial.job)
            meter.step_ends()
        return meter.summary() if summed else Observation(steps=0, median_step_s=None)
    finally:
        meter.abandon()
        optimizer.zero_grad()
        optimizer.state.clear()


def sharded_copy(plan: Plan, trial: Trial, meshes: Meshes | None) -> nn.Module:
    """Return a copy of the model under the plan, on the device, with random weights. Collective."""
    policy = mp_policy(trial.job.precision)
    model = empty_copy(trial.model, torch.device("meta") if needs_process_group(plan, policy) else trial.device)
    if trial.activation_checkpointing:
        checkpoint_blocks(model, trial.block_classes)
    apply_plan(model, plan, trial.units, meshes=meshes, mp_policy=policy, broadcast=False)
    if isinstance(model, FSDPModule):
        move_to_device(model, trial.device, empty=True)
    fill(model, trial.model)
    return model


class SilentMeshes(Meshes):
    """Meshes of the same shapes whose collectives send nothing: a rank runs alone, and allocates as it does among all."""

    def __init__(self, device_type: str) -> None:
        from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

        super().__init__(device_type)

    def form(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        """Form a mesh on the backend `fake`."""
        return init_device_mesh(self.device_type, shape, mesh_dim_names=names, backend_override=dict.fromkeys(names, "fake"))

    def close(self) -> None:
        """Destroy the process groups. Collective."""
        while self._formed:
            destroy_mesh(self._formed.popitem()[1])


def _give_back(device: torch.device) -> None:
    """Free the copy, whose modules and hooks refer to each other, and torch's cache of it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
