"""Units whose parameters or optimizer states are on the host: what FSDP2 is told, and how an optimizer steps them.

Parameters on the host are stepped there. States on the host are copied to the device for the step, parameter by
parameter, and back; the device holds at most one unit's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from ..distributed.fsdp_internals import ParameterGroup, parameter_groups
from ..modeling.activations import copy_beside, host_tensor
from ..planner.placement import Place, Placed
from .gradients import local

_Copies: TypeAlias = list[tuple[torch.cuda.Event | None, torch.Tensor, torch.Tensor]]
"""Ends of copies, with the tensors that they need until then."""
_FUSED = (torch.optim.Adam, torch.optim.AdamW)
"""Torch's optimizers whose fused step supports shards on the CPU; its fused SGD and Adagrad do not support sharded
tensors.
"""


def memory_of(decision: Placed, device_type: str) -> dict[str, Any]:
    """Return the arguments of `fully_shard` that place a unit's shards. Copies from the host that overlap computation
    need page-locked memory; on the CPU FSDP2 fails with it.
    """
    on_host = CPUOffloadPolicy(pin_memory=device_type != "cpu")
    return {"offload_policy": on_host if decision.on_host else OffloadPolicy()}


def place_of(group: ParameterGroup) -> Place:
    """Return where FSDP2 keeps a unit's shards."""
    return Place(isinstance(group.offload_policy, CPUOffloadPolicy))


def host_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the sharded parameters of all units on the host, each once."""
    groups = dict.fromkeys(group for module in model.modules() for group in parameter_groups(module))
    return [p.sharded_param for group in groups if place_of(group).on_host for p in group.fsdp_params]


def host_kernels(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], states: Iterable[dict[str, Any]]
) -> dict[str, bool]:
    """Return the options of a group with which parameters on the host, with these states, are stepped, by fused
    kernels where torch has them.
    """
    if type(optimizer) not in _FUSED or group["differentiable"]:
        return {}
    for state in states:
        if isinstance(state.get("step"), torch.Tensor):  # fused kernels need it on the CPU; a checkpoint may not
            state["step"] = state["step"].cpu()
    return {"foreach": False, "fused": True}


class HostStates:
    """Step units whose states are on the host before the optimizer's own step, which leaves them out.

    While one parameter steps, states of the next ones come to the device and earlier ones leave; the device holds one
    unit's at most.
    """

    def __init__(self, units: list[list[nn.Parameter]], step: Callable[..., None]) -> None:
        """`step` steps some of an optimizer's parameters."""
        self._units, self._step = units, step
        self._host: dict[tuple[nn.Parameter, str], torch.Tensor] = {}

    def __call__(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """Step the units' parameters that have gradients, and return them."""
        units = [[parameter for parameter in unit if parameter.grad is not None] for unit in self._units]
        sizes = {parameter: _size_of_states(optimizer, parameter) for parameter in chain(*units)}
        max_bytes = max((sum(map(sizes.__getitem__, unit)) for unit in units), default=0)
        queue, incoming, outgoing, on_device = deque(sizes), {}, deque[tuple[nn.Parameter, _Copies]](), 0
        for parameter in sizes:
            while queue and (on_device + sizes[queue[0]] <= max_bytes or queue[0] is parameter):
                incoming[queue[0]] = self._move(optimizer, queue[0], out=False)
                on_device += sizes[queue.popleft()]
            _wait(incoming.pop(parameter))
            self._step(optimizer, [parameter])
            outgoing.append((parameter, self._move(optimizer, parameter, out=True)))
            while outgoing and (not queue or on_device + sizes[queue[0]] > max_bytes):
                moved, copies = outgoing.popleft()
                _wait(copies, on_host=not queue)  # it may read them after the step
                on_device -= sizes[moved]
        return list(sizes)

    def _move(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, *, out: bool) -> _Copies:
        """Copy a parameter's states to the host (`out`), or to its device."""
        copies = []
        for key, state in _tensors(optimizer.state.get(parameter, {})).items():
            source = local(state)
            device = local(parameter).device
            target = (
                self._host.get((parameter, key))
                if out
                else torch.empty(source.shape, dtype=source.dtype, device=device)
            )
            if target is None:
                target = host_tensor(source)
                assert target is not None
                self._host[parameter, key] = target
            copies.append((copy_beside(target, source, two_ways=True), target, source))
            optimizer.state[parameter][key] = _like(state, target)
        return copies


def _wait(copies: _Copies, *, on_host: bool = False) -> None:
    """Make the compute stream wait for copies, or with `on_host` also the host, and release their tensors."""
    for ended, *_ in copies:
        if ended is not None:
            torch.cuda.current_stream().wait_event(ended)
            if on_host:
                ended.synchronize()
    copies.clear()


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
