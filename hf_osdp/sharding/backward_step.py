"""The optimizer's step within backward: a unit is updated as soon as its gradients are reduced, and they are freed.

No more than one unit's gradients are there at once. It is the same training where nothing reads gradients between backward and the step:
no clipping by norm, no accumulation, no loss scaling.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from ..errors import OSDPError
from ..modeling.units import canonical_name
from ..planner.description import UnitDescription
from ..planner.plan import Plan
from .gradients import local_power, total_norm
from .optimizer import low_bit_spec, step_parts, steps_element_wise, unwrapped


def reason_against_backward_step(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why an optimizer cannot step unit by unit; None where it can: all it counts, it counts for each parameter."""
    optimizer = unwrapped(optimizer)
    if steps_element_wise(optimizer) or low_bit_spec(optimizer):
        return None
    return f"{type(optimizer).__name__} may keep what all its parameters share"


def step_in_backward(
    model: nn.Module, plan: Plan, units: Sequence[UnitDescription], optimizers: Sequence[torch.optim.Optimizer]
) -> BackwardSteps | None:
    """Have the one optimizer of a model, to which the plan was applied, step units within backward; None where the plan has none.

    Raises:
        OSDPError: there are several, or it cannot step a part of its parameters.
    """
    chosen = [unit for unit in units if plan.decision(unit.fqn).step_in_backward]
    if not chosen or not optimizers:
        return None
    problem = "there are several optimizers" if len(optimizers) > 1 else reason_against_backward_step(optimizers[0])
    if problem is not None:
        raise OSDPError(f"The plan steps in backward, but {problem}; set step_in_backward=False.")
    named = {canonical_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    # FSDP2 leaves out parameters without dimensions, and they are averaged after backward.
    return BackwardSteps(unwrapped(optimizers[0]), [[named[p.name] for p in unit.trainable if p.shape] for unit in chosen])


class BackwardSteps:
    """Lives in the hooks of parameters and optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, units: list[list[nn.Parameter]]) -> None:
        self._optimizer, self._units = optimizer, units
        self._waiting = [set(unit) for unit in units]
        self._squares: list[torch.Tensor] = []
        for number, unit in enumerate(units):
            for parameter in unit:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))
        optimizer.register_step_post_hook(self._ended)

    def _arrived(self, number: int, parameter: torch.Tensor) -> None:
        """Step a unit when its last gradient is there."""
        waiting = self._waiting[number]
        if parameter not in waiting:
            raise OSDPError(
                "A second backward came before optimizer.step(), but the plan steps in backward; set step_in_backward=False, or call"
                " optimizer.step() after each backward."
            )
        waiting.discard(parameter)
        if not waiting:
            unit = self._units[number]
            self._squares.append(local_power([p.grad for p in unit if p.grad is not None]))  # one each: units may be on several streams
            step_parts(self._optimizer, unit)
            for each in unit:
                each.grad = None

    def total_norm(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the norm of all gradients of the last backward, those that are gone included. Collective."""
        dtype = functools.reduce(torch.promote_types, {p.dtype for unit in self._units for p in unit}, torch.float32)
        gone = torch.stack(self._squares).sum() if self._squares else torch.zeros((), dtype=torch.float64)
        return total_norm([p.grad for p in parameters if p.grad is not None], before=(gone, dtype))

    def _ended(self, optimizer: object, args: object, kwargs: object) -> None:
        """Begin anew: what had no gradient of all its parameters was stepped with the rest."""
        self._waiting, self._squares = [set(unit) for unit in self._units], []
