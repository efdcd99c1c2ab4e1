"""Training steps on a batch that is made up: what simulations, trials and benchmarks run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..modeling.batch import Inputs, Loss, loss_of, output_of
from ..planner.job import OptimizerSpec, OptimizerStep, TrainingJob
from ..planner.plan import Plan
from .accumulation import micro_step
from .clip import clip_grad_norm_
from .host_offload import host_parameters
from .mixed_step import step_by_place

_LEARNING_RATE = 1e-6


def make_optimizer(model: nn.Module, spec: OptimizerSpec) -> torch.optim.Optimizer:
    """An optimizer of torch that holds and steps as the description says; what lives on the host steps by itself.

    Raises:
        ValueError: torch has no element-wise optimizer with so many states.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = _optimizer_of(parameters, spec)
    step_by_place(optimizer, host_parameters(model))
    return optimizer


def _optimizer_of(parameters: list[nn.Parameter], spec: OptimizerSpec) -> torch.optim.Optimizer:
    step = spec.step
    match spec.states:
        case 0 | 1:
            if step is OptimizerStep.FUSED:
                step = OptimizerStep.FOR_LOOP  # torch has no fused SGD for sharded tensors; in place, neither needs scratch
            return torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=0.9 * spec.states, **step.options)
        case 2 | 3:
            return torch.optim.AdamW(parameters, lr=_LEARNING_RATE, amsgrad=spec.states == 3, **step.options)
    raise ValueError(f"An optimizer with {spec.states} states a parameter is not known to torch; 0 to 3 can be tried and simulated.")


def batch_on(inputs: Inputs, samples: int, device: torch.device) -> dict[str, Any]:
    """A batch on the device."""
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs(samples).items()}


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, Any],
    plan: Plan,
    job: TrainingJob,
    criterion: Loss | None = None,
) -> None:
    """One optimizer step as the plan runs it, each micro-step on the same batch; clipped at norm 1 where the job clips.

    The loss is the one in the model's output for the batch, or what `criterion` makes of both.
    """
    output = None
    for number in range(1, plan.accumulation_steps + 1):
        last = number == plan.accumulation_steps
        with micro_step(model, is_last=last, plan=plan):
            output = output_of(model, batch, criterion)
            loss = loss_of(output)
            if not job.holds_outputs:
                output = None
            loss.backward()
            del loss
    if job.clips_gradients:
        clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
