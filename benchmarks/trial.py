"""A sharded copy of a model with random weights, to measure plans one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hf_osdp.distributed.mesh import Meshes
from hf_osdp.measurement.model_copies import empty_copy, fill
from hf_osdp.modeling.batch import Inputs
from hf_osdp.modeling.wrapping import under_autocast
from hf_osdp.planner.description import UnitDescription
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.sharding.apply import apply_plan, needs_process_group
from hf_osdp.sharding.environment import move_to_device, mp_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Model and batches to try plans with."""

    model: nn.Module
    """The unsharded model, which is copied and not changed; it may be on the meta device."""
    units: tuple[UnitDescription, ...]
    job: TrainingJob
    inputs: Inputs
    """Returns forward's keyword arguments for a number of samples."""
    device: torch.device


def sharded_copy(plan: Plan, trial: Trial, meshes: Meshes) -> nn.Module:
    """Return a copy of the model, sharded by the plan, on the device, with small random weights.

    No device holds the whole model: the copy is sharded on the meta device, and only then allocated.
    """
    policy = mp_policy(trial.job.precision)
    is_sharded = needs_process_group(plan, policy)
    model = empty_copy(trial.model, torch.device("meta") if is_sharded else trial.device)
    apply_plan(model, plan, trial.units, meshes=meshes, mp_policy=policy, broadcast=False)
    if is_sharded:
        move_to_device(model, trial.device, empty=True)
    fill(model, trial.model)
    precision = trial.job.precision
    if precision.autocast and precision.compute is not None:
        model.forward = under_autocast(model.forward, getattr(torch, precision.compute.value), trial.device.type)
    return model
