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
from .optimizer import step_by_device

_LEARNING_RATE = 1e-6


def make_optimizer(model: nn.Module, spec: OptimizerSpec) -> torch.optim.Optimizer:
    """Make an optimizer of torch that holds and steps as the description says; parameters on the host step by themselves.

    Raises:
        ValueError: torch has no element-wise optimizer with so many states.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options: dict[str, Any] = dict(spec.step.options)
    optimizer: torch.optim.Optimizer
    match spec.states:
        case 0 | 1:
            if spec.step is OptimizerStep.FUSED:  # torch has no fused SGD for sharded tensors; in place, neither needs scratch
                options = OptimizerStep.FOR_LOOP.options
            optimizer = torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=0.9 * spec.states, **options)
        case 2 | 3:
            optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, amsgrad=spec.states == 3, **options)
        case _:
            raise ValueError(
                f"An optimizer with {spec.states} states a parameter is not known to torch; 0 to 3 can be tried and simulated."
            )
    step_by_device(optimizer, host_parameters(model))
    return optimizer


def batch_on(inputs: Inputs, samples: int, device: torch.device) -> dict[str, Any]:
    """Return a batch of so many samples on the device."""
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs(samples).items()}


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, Any],
    plan: Plan,
    job: TrainingJob,
    criterion: Loss | None = None,
) -> None:
    """Take one optimizer step as the plan runs it, each micro-step on the same batch; clip at norm 1 where the job clips.

    The loss is the one in the model's output for the batch, or what `criterion` makes of both.
    """
    output = None
    for number in range(1, plan.accumulation_steps + 1):
        with micro_step(model, is_last=number == plan.accumulation_steps, plan=plan):
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
