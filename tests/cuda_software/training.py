"""Small trainings of ours, on the device or on the host, in processes with a group of both kinds."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_osdp import OSDPGradScaler
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.training_job import Precision
from hf_osdp.sharding.apply import apply_plan
from hf_osdp.sharding.environment import move_to_device, mp_policy
from hf_osdp.sharding.gradients import clip_grad_norm_
from hf_osdp.sharding.host import host_parameters
from hf_osdp.sharding.optimizer_steps import bind_optimizer, step_by_device
from hf_osdp.sharding.state import full_state_dict
from hf_osdp.sharding.steps import micro_step
from tests.helpers.distributed import run_ranks
from tests.helpers.models import tiny_batch
from tests.helpers.read_back import verify_applied
from tests.helpers.training import MAX_NORM, Case, Trained, plan_for

# Else the question whether there is a device, asked before ranks are forked, forbids them to use one.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
LATE_MS = 200


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant(Case):
    """A training: what is trained, under which plan, how."""

    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = _adamw
    max_norm: float = MAX_NORM
    precision: str = "no"
    """As Accelerate names it; fp16 scales the loss."""


def train(variant: Variant, device_type: str) -> Trained:
    """Train this rank's part on `"cuda"` or `"cpu"`; rank 0 has the parameters."""
    model, world, rank = variant.model(), dist.get_world_size(), dist.get_rank()
    if variant.prepare:
        variant.prepare(model)
    units, parts = find_units(model), variant.accumulation_steps
    plan = plan_for(replace(variant, world=world), units)
    apply_plan(model, plan, units, meshes=Meshes(device_type), mp_policy=mp_policy(Precision.named(variant.precision)))
    verify_applied(model, plan, units)
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    move_to_device(model, device)
    optimizer = variant.optimizer(model)
    step_by_device(optimizer, host_parameters(model))
    if any(unit.states_on_host for unit in plan.units):
        bind_optimizer(model, plan, units, [optimizer])
    scaler = OSDPGradScaler(device=device_type, enabled=variant.precision == "fp16", init_scale=2.0**10)
    losses, norms = [], []
    for step in range(variant.steps):
        optimizer.zero_grad()
        for part in range(parts):
            with micro_step(model, is_last=part == parts - 1):
                batch = tiny_batch(step, part=part * world + rank, parts=world * parts)
                loss = variant.loss(model, {name: value.to(device) for name, value in batch.items()}) / parts
                scaler.scale(loss).backward()
                losses.append(loss.detach())
        scaler.unscale_(optimizer)
        norms.append(clip_grad_norm_(model.parameters(), variant.max_norm).detach())
        scaler.step(optimizer)
        scaler.update()
    return Trained(
        losses=tuple(loss.item() for loss in losses),
        norms=tuple(norm.item() for norm in norms),
        parameters=full_state_dict(model),
    )


def on_devices(
    fn: Callable[..., Any], processes: int, *args: Any, late: str = "", sanitizes: bool = False, eager: bool = False,
    joins: bool = True, memory: str = "8G",
    env: Mapping[str, str] | None = None, timeout_s: float = 120.0,
) -> list[Any]:  # fmt: skip
    """Call `fn(*args)` as `run_ranks` does, in processes with a device each, in a group that is NCCL's on devices and
    gloo's on the host; without `joins` the group is not formed.

    `late` says which streams are late by LATE_MS (README.md): "all", "main", "side", or none. With `sanitizes` torch's
    CUDA sanitizer raises where it sees a race; with `eager` communicators are made at once and split. Raises
    RankFailure also where the device could not compute an operator's values.
    """
    variables = {
        "FAKE_CUDA_DEVICES": str(processes), "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(processes))),
        "FAKE_CUDA_LATENCY_MS": str(LATE_MS if late else 0), "FAKE_CUDA_LATE": late, "FAKE_CUDA_MEM": memory,
        **(env or {}),
    }  # fmt: skip
    how = {"sanitizes": sanitizes, "eager": eager, "joins": joins, "timeout_s": timeout_s}
    return run_ranks(_in_group, processes, fn, args, how, init=False, env=variables, timeout_s=timeout_s)


def _in_group(fn: Callable[..., Any], args: tuple[Any, ...], how: dict[str, Any]) -> Any:
    import cuda_software

    if how["sanitizes"]:
        from torch.cuda._sanitizer import enable_cuda_sanitizer

        enable_cuda_sanitizer()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if how["joins"]:
        timeout = datetime.timedelta(seconds=how["timeout_s"] + 60)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device if how["eager"] else None)
    result = fn(*args)
    missing = cuda_software.failures()
    assert not missing, f"the device has no values of:\n{missing}"
    return result
