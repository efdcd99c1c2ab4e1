"""Step an optimizer with states that are kept on the host.

They are copied to the device for the step, parameter by parameter, and back; the device holds at most one unit's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import OSDPError
from ..modeling.activation_offload import copy_stream, host_tensor
from ..modeling.units import named_parameters
from ..planner.description import UnitDescription
from ..planner.plan import Plan
from .gradients import local
from .optimizer_steps import interceptor_of, refuse_closure, step_parts
from .optimizers import kind_of, unwrapped


def reason_against_unit_steps(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why an optimizer cannot step unit by unit; None if it can, which needs all its state to be kept for
    each parameter.
    """
    if f"{type(unwrapped(optimizer)).__module__}.".startswith(kind_of(optimizer).packages):
        return None
    return f"{type(unwrapped(optimizer)).__name__} may keep state that all its parameters share"


def bind_optimizer(
    model: nn.Module, plan: Plan, units: Sequence[UnitDescription], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Make the optimizer of a model under the plan step units as the plan says; a second call changes nothing.

    Raises:
        OSDPError: the plan steps units one by one, but there are several optimizers, or one that cannot step a part of
            its parameters.
    """
    offloaded = [unit for unit in units if plan.decision(unit.fqn).states_on_host]
    if not optimizers or not offloaded:
        return
    problem = "there are several optimizers" if len(optimizers) > 1 else reason_against_unit_steps(optimizers[0])
    if problem is not None:
        raise OSDPError(f"The plan steps units one by one, but {problem}; set offload_optimizer=False.")
    stages = interceptor_of(unwrapped(optimizers[0])).stages
    named = named_parameters(model)
    if not stages:
        stages.append(_HostStates([[named[p.name] for p in unit.trainable] for unit in offloaded]))


class _HostStates:
    """Step units whose states are on the host before the optimizer's own step, and restore their gradients after it.

    While one parameter steps, states of the next ones come to the device and earlier ones leave; the device holds one
    unit's at most.
    """

    def __init__(self, units: list[list[nn.Parameter]]) -> None:
        self._units = units
        self._host: dict[tuple[nn.Parameter, str], torch.Tensor] = {}

    @contextmanager
    def __call__(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        refuse_closure(optimizer, args, kwargs)
        units = [[parameter for parameter in unit if parameter.grad is not None] for unit in self._units]
        sizes = {parameter: _size_of_states(optimizer, parameter) for parameter in chain(*units)}
        max_bytes = max((sum(map(sizes.__getitem__, unit)) for unit in units), default=0)
        queue, incoming, outgoing, on_device = deque(sizes), {}, deque[tuple[nn.Parameter, _Copies]](), 0
        for parameter in sizes:
            while queue and (on_device + sizes[queue[0]] <= max_bytes or queue[0] is parameter):
                incoming[queue[0]] = self._move(optimizer, queue[0], out=False)
                on_device += sizes[queue.popleft()]
            incoming.pop(parameter).wait()
            step_parts(optimizer, [parameter])
            outgoing.append((parameter, self._move(optimizer, parameter, out=True)))
            while outgoing and (not queue or on_device + sizes[queue[0]] > max_bytes):
                moved, copies = outgoing.popleft()
                copies.wait()
                on_device -= sizes[moved]
                if not queue:
                    copies.synchronize()
        gradients = [(parameter, parameter.grad) for parameter in sizes]
        for parameter in sizes:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def _move(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, *, out: bool) -> _Copies:
        """Copy a parameter's states to the host (`out`), or to its device."""
        copies = _Copies()
        for key, state in _tensors(optimizer.state.get(parameter, {})).items():
            source = local(state)
            device = local(parameter).device
            target = (
                self._host.get((parameter, key))
                if out
                else torch.empty(source.shape, dtype=source.dtype, device=device)
            )
            if target is None:
                target = self._host[parameter, key] = host_tensor(source)
            copies.add(target, source)
            optimizer.state[parameter][key] = _like(state, target)
        return copies


class _Copies:
    """Copies between device and host, on a separate stream if the device has streams; holds the tensors until
    `wait`.
    """

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []
        self._ended: torch.cuda.Event | None = None

    def add(self, to: torch.Tensor, source: torch.Tensor) -> None:
        device = source.device if to.device.type == "cpu" else to.device
        stream = copy_stream(device, out=to.device.type == "cpu")
        if stream is None:
            to.copy_(source)
            return
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            self._ended = stream.record_event()
        self._held += (to, source)

    def wait(self) -> None:
        """Make the compute stream wait for the copies, and release the tensors."""
        if self._ended is not None:
            torch.cuda.current_stream().wait_event(self._ended)
        self._held = []

    def synchronize(self) -> None:
        """Wait on the host, so that it can read the copies."""
        if self._ended is not None:
            self._ended.synchronize()


def _size_of_states(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    """Return the local bytes of a parameter's states; before they exist assume two."""
    made = sum(local(state).nbytes for state in _tensors(optimizer.state.get(parameter, {})).values())
    return made or 2 * local(parameter).nbytes


def _tensors(states: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the states that are tensors with dimensions; the step count is not moved."""
    return {key: value for key, value in states.items() if isinstance(value, torch.Tensor) and value.dim()}


def _like(state: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the state with another local tensor."""
    return DTensor(tensor, state._spec, requires_grad=False) if isinstance(state, DTensor) else tensor
