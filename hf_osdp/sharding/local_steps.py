"""The outer step of local steps (DiLoCo, arXiv 2311.08105): machines average their changes and continue from the same parameters.

With p0 the parameters of the last synchronisation, p a machine's current ones, learning rate a and momentum µ,

    d = mean over machines of (p0 - p)      m ← µ m + d      p0 ← p0 - a (d + µ m)      p ← p0

Each rank does this for its shards, concatenated and cut into messages. If ranks of a machine hold the same shard, each of them averages
its share of a message, and they all-gather the result, so that each element crosses the link between machines once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..distributed.collectives import all_gather_single, announced, plain_transport
from ..distributed.mesh import REPLICATE_AXIS, Apart, apart, rank
from ..distributed.wire import WireTransport
from ..errors import OSDPError
from ..planner.hardware import Collective
from ..planner.local_steps import LocalSteps
from ..planner.wire import PIECE_ELEMENTS
from .gradients import local
from .optimizer import low_bit_spec, optimizer_name, unwrapped

_log = logging.getLogger(__name__)


class _Message(NamedTuple):
    parts: list[torch.Tensor]
    """Flat views of this rank's shards."""
    replicas: dist.ProcessGroup | None
    """Ranks of this machine that hold the same shards; None if this rank alone does."""
    before: torch.Tensor
    """This rank's share of the parameters of the last synchronisation."""
    momentum: torch.Tensor


class OuterOptimizer:
    """Synchronises the machines' parameters; holds the parameters of the last synchronisation and the outer momentum."""

    def __init__(self, model: nn.Module, steps: LocalSteps) -> None:
        """Start from the model's parameters, equal on all machines; the model must be sharded by a plan with local steps."""
        groups = apart()
        if groups is None:
            raise OSDPError("Local steps need a model to which a plan with local steps was applied; prepare it again.")
        self.steps, self._between = steps, groups.between
        self._messages = list(_messages(model, groups))
        self._parameters = list(model.parameters())
        self._trained = [parameter.requires_grad for parameter in self._parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Average the machines' differences and take the outer step, so that all have the same parameters. Collective."""
        if [parameter.requires_grad for parameter in self._parameters] != self._trained:
            raise OSDPError("Parameters were frozen or unfrozen after local steps began, which average a fixed set; do so before.")
        for parts, replicas, before, momentum in self._messages:
            flat = _flat(parts, replicas)
            difference = before - _own_share(flat, replicas)
            self._average(difference)
            momentum.mul_(self.steps.outer_momentum).add_(difference)
            before.sub_(difference.add_(momentum, alpha=self.steps.outer_momentum), alpha=self.steps.outer_learning_rate)
            if replicas is None:
                flat = before
            else:
                all_gather_single(flat, before, group=replicas)
            sizes = [part.numel() for part in parts]
            for part, updated in zip(parts, flat[: sum(sizes)].split(sizes), strict=True):
                part.copy_(updated)

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return this rank's state for a checkpoint: outer momentum, and its states of the user's optimizer."""
        states = [] if low_bit_spec(optimizer) else _local_states(optimizer)
        momentum = [message.momentum for message in self._messages]
        return {"momentum": momentum, "states": states, "optimizer": optimizer_name(optimizer)}

    @torch.no_grad()
    def load(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Load what `state` returned on this rank, after the user's optimizer has loaded the first machine's states.

        States of a different optimizer are ignored, and the first machine's remain.
        """
        for message, momentum in zip(self._messages, state["momentum"], strict=True):
            message.momentum.copy_(momentum)
        states, name = state["states"], optimizer_name(optimizer)
        if (saved_name := state.get("optimizer", name)) != name:
            states = []
            if rank() == 0:
                _log.warning("All machines continue with the first machine's optimizer states: those of the others are %s's.", saved_name)
        for own, saved in zip(_local_states(optimizer), states, strict=bool(states)):
            for name in own.keys() & saved.keys():
                own[name].copy_(saved[name])

    def _average(self, difference: torch.Tensor) -> None:
        """Replace a difference by the machines' mean, which is bitwise equal on all."""
        with announced(Collective.ALL_REDUCE, self._between, difference):
            if self.steps.wire is None:
                dist.all_reduce(difference, group=self._between)
                difference.div_(self.steps.machines)
            else:
                transport = plain_transport(self._between, difference.device.type)
                WireTransport(transport, self.steps.wire).all_reduce(difference, dist.ReduceOp.AVG, self._between)


def _messages(model: nn.Module, groups: Apart) -> Iterator[_Message]:
    """Yield messages of neighbouring parameters with the same device, dtype and replicas.

    The temporaries of a message take at most about the gradients' bytes, and the gradients are freed by then.
    """
    shards_by_kind: dict[tuple[dist.ProcessGroup | None, torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            shard = local(parameter).detach()
            shards_by_kind.setdefault((_replicas(parameter, groups), shard.dtype, shard.device), []).append(shard.view(-1))
    largest = max(1, min(PIECE_ELEMENTS, sum(shard.numel() for shards in shards_by_kind.values() for shard in shards) // 4))
    for (replicas, _, _), shards in shards_by_kind.items():
        pieces = [piece for shard in shards for piece in shard.split(largest) if piece.numel()]
        while pieces:
            parts = [pieces.pop(0)]
            while pieces and sum(part.numel() for part in (*parts, pieces[0])) <= largest:
                parts.append(pieces.pop(0))
            before = _own_share(_flat(parts, replicas), replicas).clone()
            yield _Message(parts, replicas, before, torch.zeros_like(before))


def _replicas(parameter: torch.Tensor, groups: Apart) -> dist.ProcessGroup | None:
    """Return the ranks of this machine that hold the same shard, or the same parameter without dimensions."""
    group: dist.ProcessGroup | None = groups.machine
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        group = mesh.get_group(REPLICATE_AXIS) if mesh.ndim > 1 else None
    return group if group is not None and group.size() > 1 else None


def _flat(parts: list[torch.Tensor], replicas: dist.ProcessGroup | None) -> torch.Tensor:
    """Concatenate parts in float32 at least, padded to equal shares for replicas."""
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    padding = 0 if replicas is None else -sum(part.numel() for part in parts) % replicas.size()
    return torch.cat([*(part.to(dtype) for part in parts), parts[0].new_zeros(padding, dtype=dtype)])


def _own_share(flat: torch.Tensor, replicas: dist.ProcessGroup | None) -> torch.Tensor:
    """Return this rank's share of a message."""
    return flat if replicas is None else flat.view(replicas.size(), -1)[replicas.rank()]


def _local_states(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of each parameter's state on this rank, in the optimizer's order."""
    inner = unwrapped(optimizer)
    states = (inner.state.get(parameter, {}) for group in inner.param_groups for parameter in group["params"])
    return [{name: local(value) for name, value in state.items() if isinstance(value, torch.Tensor)} for state in states]
