"""Whole optimizer steps of a plan on a synthetic batch, as simulations and benchmarks take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hf_osdp.modeling.batch import Inputs, Loss, loss_of, output_of
from hf_osdp.modeling.units import named_parameters
from hf_osdp.planner.description import ParameterSpec, UnitDescription
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep, TrainingJob
from hf_osdp.sharding.gradients import clip_grad_norm_, local
from hf_osdp.sharding.host import host_parameters
from hf_osdp.sharding.optimizer_steps import bind_optimizer, step_by_device
from hf_osdp.sharding.steps import micro_step

_LEARNING_RATE = 1e-6


def make_optimizer(
    model: nn.Module, spec: OptimizerSpec, plan: Plan, units: Sequence[UnitDescription]
) -> torch.optim.Optimizer:
    """Make an optimizer of torch that holds and steps what the spec and the plan say; parameters on the host step
    separately.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options: dict[str, Any] = dict(spec.step.options)
    optimizer: torch.optim.Optimizer
    match spec.states:
        case _ if spec.formats or spec.matrices:
            named = named_parameters(model)
            known = {named[p.name]: (p, plan.decision(unit.fqn).shard_size) for unit in units for p in unit.parameters}
            optimizer = _AllocatesStates(parameters, spec, known)
        case 0 | 1:
            if (
                spec.step is OptimizerStep.FUSED
            ):  # torch has no fused SGD for sharded tensors; neither needs temporaries
                options = OptimizerStep.FOR_LOOP.options
            optimizer = torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=0.9 * spec.states, **options)
        case _:
            assert spec.states in (2, 3)
            optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, amsgrad=spec.states == 3, **options)
    step_by_device(optimizer, host_parameters(model))
    bind_optimizer(model, plan, units, [optimizer])
    return optimizer


class _AllocatesStates(torch.optim.Optimizer):
    """Allocate like an optimizer with states in other formats or whole updates, and update nothing: the real ones
    compile kernels or gather.
    """

    __module__ = "hf_osdp.trial"  # the modes that count memory are off in steps of other packages

    def __init__(
        self,
        parameters: list[nn.Parameter],
        spec: OptimizerSpec,
        known: Mapping[nn.Parameter, tuple[ParameterSpec, int]],
    ) -> None:
        super().__init__(parameters, {"lr": _LEARNING_RATE, "differentiable": False})
        self._spec, self._known = spec, known

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            shard, states = local(parameter), self.state[parameter]
            whole, ranks = self._known[getattr(parameter, "whole", parameter)]
            local_spec = replace(whole, shape=tuple(shard.shape))
            for number, state_format in enumerate(self._spec.formats_of(whole)):
                if f"format_{number}" not in states:
                    nbytes = state_format.nbytes(state_format.numels(local_spec, 1)[0], whole.dtype)
                    states[f"format_{number}"] = torch.zeros(nbytes, dtype=torch.uint8, device=shard.device)
            for number in range(self._spec.states):
                states.setdefault(f"state_{number}", torch.zeros_like(shard))
            loop_bytes = self._spec.loop_scratch * shard.nbytes if self._spec.step is OptimizerStep.FOR_LOOP else 0
            _ = torch.empty(
                max(int(loop_bytes), self._spec.matrix_scratch(whole, ranks)), dtype=torch.uint8, device=shard.device
            )


def batch_on(inputs: Inputs, samples: int, device: torch.device) -> dict[str, Any]:
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs(samples).items()
    }


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, Any],
    plan: Plan,
    job: TrainingJob,
    criterion: Loss | None = None,
) -> None:
    """Take one optimizer step of the plan, with the same batch in each micro-step; clip to norm 1 if the job clips.

    The loss is in the model's output for the batch, or `criterion` computes it from both.
    """
    output = None
    for number in range(1, plan.accumulation_steps + 1):
        with micro_step(model, is_last=number == plan.accumulation_steps):
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
