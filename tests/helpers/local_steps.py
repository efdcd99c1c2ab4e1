"""Training with local steps on two machines of two ranks, and DiLoCo in one process to compare it with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from hf_osdp.distributed.mesh import apart
from hf_osdp.planner.local_steps import LocalSteps
from hf_osdp.planner.plan import Plan
from hf_osdp.sharding.gradients import local
from tests.helpers import models
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_batch, tiny_loss

WORLD, MACHINES, H, STEPS = 4, 2, 3, 11
LOCAL = LocalSteps(steps=H, machines=MACHINES)
MAX_NORM = 0.5
"""Below the norms that occur."""
Optimizer = Callable[..., torch.optim.Optimizer]
tiny_model = partial(models.tiny_model, layers=2)


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def local_plan(units, layout: str = "mixed", local: LocalSteps = LOCAL) -> Plan:
    return replace(plan_of(units, WORLD // MACHINES, layout), local_steps=local)


def are_equal_between_machines(model: nn.Module) -> bool:
    """Whether ranks of the same place hold the same bits."""
    mine = torch.cat([local(parameter).detach().flatten() for parameter in model.parameters()])
    groups = apart()
    others = [torch.empty_like(mine) for _ in range(MACHINES)]
    dist.all_gather(others, mine, group=groups.between)
    return all(torch.equal(other, others[0]) for other in others)


def diloco(
    name: str, *, local: LocalSteps = LOCAL, steps: int = STEPS, make: Optimizer = adamw, max_norm: float | None = None,
    synchronised: tuple[int, ...] | None = None,
) -> tuple[dict[str, torch.Tensor], list[list[float]]]:  # fmt: skip
    """The algorithm in one process, machine by machine, synchronised after these steps, None for every H-th.

    After the last step the first machine's weights, and all norms.
    """
    models = [tiny_model(name) for _ in range(local.machines)]
    optimizers = [make(model.parameters()) for model in models]
    norms: list[list[float]] = [[] for _ in models]
    before = [parameter.detach().clone() for parameter in models[0].parameters()]
    outer = torch.optim.SGD(before, lr=local.outer_learning_rate, momentum=local.outer_momentum, nesterov=local.outer_momentum > 0)
    for step in range(1, steps + 1):
        for machine, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            tiny_loss(model, tiny_batch(step, part=machine, parts=local.machines)).backward()
            if max_norm is not None:
                norms[machine].append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
            optimizer.step()
            optimizer.zero_grad()
        if step % local.steps == 0 if synchronised is None else step in synchronised:
            with torch.no_grad():
                for start, *ended in zip(before, *(model.parameters() for model in models), strict=True):
                    start.grad = sum(start - parameter for parameter in ended) / len(ended)
                outer.step()
                for start, *ended in zip(before, *(model.parameters() for model in models), strict=True):
                    for parameter in ended:
                        parameter.copy_(start)
    return models[0].state_dict(), norms


def assert_close(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], tolerance: float = 1e-12) -> None:
    if dist.get_rank() == 0:
        assert found.keys() == reference.keys()
        errors = {name: (found[name] - reference[name]).abs().max().item() for name in found}
        assert max(errors.values()) < tolerance, errors


class Recorded(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
