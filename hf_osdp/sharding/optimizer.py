"""What optimizers hold, and whether they can train parameters as a plan lays them out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..distributed.mesh import world_size
from ..errors import OSDPError
from ..planner.optimizers import ADVICE, spec_of_trainer_name
from ..planner.training_job import OptimizerSpec
from .gradients import shard_size
from .optimizers import bare_optimizer, kind_of


def check_optimizer(optimizer: torch.optim.Optimizer, partial: Iterable[nn.Parameter] = ()) -> None:
    """Raise OSDPError if an optimizer cannot train its parameters as the applied plan has laid them out.

    An optimizer that needs whole parameters cannot train sharded ones or those `partial`; one that rounds at random
    cannot train replicas.
    """
    optimizer, kind = bare_optimizer(optimizer), kind_of(optimizer)
    trained = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if isinstance(p, torch.Tensor) and p.requires_grad
    ]
    if getattr(optimizer, "bf16_stochastic_round", False) and any(
        p.dtype is torch.bfloat16 and shard_size(p) < world_size() for p in trained
    ):
        raise OSDPError(
            f"{type(optimizer).__name__} rounds parameters in bf16 at random (bf16_stochastic_round=True), so replicas"
            " would drift apart;"
            " use strategy='fsdp', which has no replicas, or hold parameters in float32 (mixed_precision='bf16')."
        )
    whole, known, partial_ids = kind.needs_whole(), kind.known(), {id(parameter) for parameter in partial}
    split = sum(id(p) in partial_ids or (whole and shard_size(p) > 1) for p in trained)
    if split and (whole or (known and not known.steps_parts)):
        reason = (
            "quantizes blocks of whole parameters"
            if known and not known.looks_at_whole
            else "is not element-wise: it needs whole parameters"
        )
        raise OSDPError(
            f"{type(optimizer).__name__} {reason}, and {split} of {len(trained)} are {'sharded, ' if whole else ''}in"
            f" parts or on the host; plan for this optimizer, which keeps them whole, or {ADVICE}."
        )


def spec_of_optimizer(optimizer: torch.optim.Optimizer | None, *, device_type: str) -> OptimizerSpec:
    """Return what an optimizer will hold, plain or wrapped by Accelerate; None means AdamW with its defaults.

    Raises:
        ValueError: it cannot run under a plan, or its memory cannot be determined.
    """
    if optimizer is None:
        return spec_of_trainer_name("adamw_torch", device_type=device_type)
    try:
        return kind_of(optimizer).spec(device_type)
    except OSDPError as error:
        raise ValueError(str(error)) from error
