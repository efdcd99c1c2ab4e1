"""Run a few real steps of a plan on a temporary copy of the model, to measure its memory and time before training
starts.

No rank holds a second whole model: the copy is made and sharded on the meta device, and only then allocated. Weights
are small random numbers; peak and time do not depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from ..distributed.device import free_workspaces
from ..distributed.mesh import Meshes, destroy_mesh, find_topology
from ..measurement.model_copies import empty_copy, fill
from ..measurement.step_meter import Observation, StepMeter, training_tensors
from ..measurement.timing import over_ranks
from ..modeling.batch import Inputs, random_states_kept
from ..modeling.build import checkpoint_blocks
from ..planner.description import UnitDescription
from ..planner.plan import Plan
from ..planner.training_job import TrainingJob
from ..sharding.apply import apply_plan, needs_process_group
from ..sharding.environment import move_to_device, mp_policy
from ..sharding.steps import batch_on, make_optimizer, train_step
from .out_of_memory import is_out_of_memory

TIMED_STEPS = 3
"""Steps whose time is measured, and as many more whose collectives are measured; results are medians."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Model and batches to try plans with. They are the same on every rank."""

    model: nn.Module
    """The unsharded model, which is copied and not changed. On any rank it may be on the meta device."""
    units: tuple[UnitDescription, ...]
    job: TrainingJob
    inputs: Inputs
    """Returns forward's keyword arguments for a number of samples, as for `describe`."""
    device: torch.device
    block_classes: tuple[str, ...] = ()
    """Blocks that are recomputed in backward."""
    activation_checkpointing: bool = False


def probe(plan: Plan, trial: Trial, meshes: Meshes | None, *, timed_steps: int = TIMED_STEPS) -> Observation:
    """Run a plan for a few steps and return only the observation; the copy is freed. Collective.

    Random number generators keep their states. On CUDA each rank first takes steps alone, with collectives that send
    nothing but allocate the same memory, so that no other rank waits for a rank that runs out of memory. `timed_steps`
    (at least 1) steps are timed, and as many more for their collectives. `meshes` is None without a process group.
    """
    find_topology()  # collective and cached; call it before ranks may fail one by one
    with random_states_kept([trial.device] if trial.device.type == "cuda" else []):
        seen = (_on_cuda if trial.device.type == "cuda" else _observe)(plan, trial, meshes, timed_steps)
    clear_device_cache(garbage_collection=True)
    return seen


def _on_cuda(plan: Plan, trial: Trial, meshes: Meshes | None, timed_steps: int) -> Observation:
    """Measure memory with each rank alone first, then time with all ranks."""
    free_workspaces(trial.device)  # the meter does not count them either
    (before,) = over_ranks([torch.cuda.memory_allocated(trial.device)], dist.ReduceOp.MIN)
    alone = None if meshes is None else SilentMeshes(meshes.device_type)
    silent = replace(trial, job=replace(trial.job, clips_gradients=False))  # a norm would be summed over the world
    failed = False
    try:
        _observe(plan, silent, alone, timed_steps=1, summed=False)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failed = True  # leave the handler before freeing memory: the traceback keeps the copy alive
    finally:
        if alone is not None:
            alone.close()
    clear_device_cache(garbage_collection=True)
    if over_ranks([failed])[0]:
        return Observation(steps=0, median_step_s=None, out_of_memory=True)
    seen = _observe(plan, trial, meshes, timed_steps)
    return (
        seen
        if seen.peak_bytes is None
        else replace(seen, peak_bytes=seen.peak_bytes - int(before), reserved_bytes=None)
    )


def _observe(plan: Plan, trial: Trial, meshes: Meshes | None, timed_steps: int, *, summed: bool = True) -> Observation:
    """Measure steps on a copy that is freed on return; with `summed=False` return no figures, and communicate with
    no other rank.
    """
    model = sharded_copy(plan, trial, meshes)
    optimizer = make_optimizer(model, trial.job.optimizer, plan, trial.units)
    batch = batch_on(trial.inputs, plan.micro_batch_size, trial.device)
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    held = lambda: [*training_tensors(model, optimizer), *tensors]  # noqa: E731
    meter = StepMeter(trial.device, held, clocked_steps=timed_steps)
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
    """Return a copy of the model, sharded by the plan, on the device, with random weights. Collective."""
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
    """Meshes of the same shapes whose collectives send nothing: a rank can run alone, with the same allocations as
    among all ranks.
    """

    is_silent = True

    def __init__(self, device_type: str) -> None:
        from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

        super().__init__(device_type)

    def form(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        """Make a mesh with the backend `fake`."""
        return init_device_mesh(
            self.device_type, shape, mesh_dim_names=names, backend_override=dict.fromkeys(names, "fake")
        )

    def close(self) -> None:
        """Destroy the process groups. Collective."""
        while self._formed:
            destroy_mesh(self._formed.popitem()[1])
