"""The optimizer that will run, as the planner counts it: tensors of state, and how the step goes through memory."""

from __future__ import annotations

import torch

from ..planner.job import OptimizerSpec, OptimizerStep
from ..sharding.optimizer_check import reason_against, unwrapped

_STATES = {"adamw": 2, "adam": 2, "adamax": 2, "nadam": 2, "radam": 2, "sgd": 0, "adagrad": 1, "rmsprop": 1, "adadelta": 2}
"""State tensors for each parameter, as `torch.optim` keeps them by default."""
_TRAINER_NAMES = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd", "adagrad": "adagrad", "rmsprop": "rmsprop"}
"""`TrainingArguments.optim` → the optimizer of `torch.optim` behind it."""


def spec_of_optimizer(optimizer: torch.optim.Optimizer | None, *, device_type: str) -> OptimizerSpec:
    """Return what a known optimizer of `torch.optim` will hold, plain or wrapped by Accelerate; None stands for AdamW's defaults.

    Raises:
        ValueError: its memory is not known.
    """
    if optimizer is None:
        return spec_of_trainer_name("adamw_torch", device_type=device_type)
    optimizer = unwrapped(optimizer)
    name = type(optimizer).__name__.lower()
    if name not in _STATES or type(optimizer) is not getattr(torch.optim, type(optimizer).__name__, None):
        raise ValueError(
            f"The memory of the optimizer {type(optimizer).__name__} is not known; use one of torch.optim's {', '.join(sorted(_STATES))}."
        )
    options = optimizer.defaults
    states = _STATES[name] + sum(bool(options.get(option)) for option in ("amsgrad", "momentum", "centered"))
    return OptimizerSpec(name=name, states=states, step=_step(options.get("fused"), options.get("foreach"), device_type))


def spec_of_trainer_name(name: str, *, device_type: str) -> OptimizerSpec:
    """Return what the optimizer that `TrainingArguments(optim=...)` names will hold.

    Raises:
        ValueError: the optimizer is not known to work on sharded parameters, or its memory is not known.
    """
    if name not in _TRAINER_NAMES:
        reason = reason_against(name)
        why = f"{reason}, which shards of a parameter do not allow" if reason else "is not known to work on sharded parameters"
        raise ValueError(f"optim={name!r} {why}; use one of {', '.join(_TRAINER_NAMES)}.")
    optimizer = _TRAINER_NAMES[name]
    return OptimizerSpec(name=optimizer, states=_STATES[optimizer], step=_step(name.endswith("_fused") or None, None, device_type))


def _step(fused: bool | None, foreach: bool | None, device_type: str) -> OptimizerStep:
    """Return how the step runs; torch's default is foreach on accelerators and one tensor after the other on the CPU."""
    if fused:
        return OptimizerStep.FUSED
    if foreach or (foreach is None and fused is None and device_type != "cpu"):
        return OptimizerStep.FOREACH
    return OptimizerStep.FOR_LOOP


def frozen_parameters(optimizer: object) -> int:
    """Return how many frozen parameters an optimizer was given; 0 where there is none yet."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    return sum(not parameter.requires_grad for group in groups for parameter in group["params"])
