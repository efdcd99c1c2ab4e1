"""Check in each step that FSDP2 reduces every gradient, that all ranks reduce the same ones, and that the optimizer
receives them.

The checks run when forward begins (shards), in backward (gradients), and before each step of any optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from ..distributed.fsdp_internals import FSDPParam, ParameterGroup, owners, whole_parameter
from ..distributed.mesh import world_size
from ..errors import OSDPError, UnreducedGradientError
from ..modeling.step_hooks import before_step
from .gradients import local

REMEDY = (
    "read weights as attributes of their module (model.lm_head.weight) within the forward or the loss, and not through"
    " model.parameters(), full_tensor() or a reference that was kept from before"
)
CREATE_GRAPH = (
    "create_graph=True asks for gradients of gradients, which need weights that are freed by then; leave out this"
    " gradient penalty, or train this loss with osdp=False."
)
ASSIGN = (
    "load_state_dict(assign=True) would replace parameters that the plan and the optimizer hold; leave out assign."
)
_MARK_ELEMENTS = 2**8
"""Shards up to this size, or that of the smallest, get marks; see `backward_ends`."""
_DENSE_ELEMENTS = 2**16
"""A mark of more elements is one number with strides of 0: it would take memory that no plan counts."""


class _Shard(NamedTuple):
    """A shard when forward last began. `.data = ...` replaces the storage of a DTensor, and not its local tensor."""

    shard: nn.Parameter
    memory: torch.Tensor
    storage: torch.UntypedStorage
    hooks: dict[int, Any] | None
    """Contains only `_refuse`; None for a frozen shard."""


class _Mark(NamedTuple):
    """A gradient of a shard that shows later whether `zero_grad` was called: a number so small that no norm has it."""

    shard: torch.Tensor
    gradient: torch.Tensor
    version: int
    number: torch.Tensor
    one: torch.Tensor | None
    """All elements of a large mark; they can be zeroed, and not be scaled in place."""

    @classmethod
    @torch.enable_grad()
    def of(cls, shard: Any) -> _Mark:  # noqa: ANN401  a DTensor
        own = local(shard)
        number = own.new_tensor(torch.finfo(own.dtype).tiny ** 0.75)
        if own.numel() <= _DENSE_ELEMENTS:
            gradient = torch.full_like(shard, -number.item(), requires_grad=True).neg()
            return cls(shard, gradient, gradient._version, number, None)
        one = number.clone()
        gradient = DTensor.from_local(
            one.expand(own.shape), shard.device_mesh, shard.placements, run_check=False,
            shape=shard.shape, stride=shard.stride(),
        )  # fmt: skip
        return cls(shard, gradient, gradient._version, number, one)

    def was_zeroed(self, label: str) -> bool:
        """Return whether `zero_grad` was called, or a loop zeroed the gradient; raise OSDPError if it was changed."""
        found = self.shard.grad
        if found is None:
            return True
        is_own, leaf = found is self.gradient, self.gradient.grad_fn is None
        if is_own and self.one is None and not leaf and self.gradient._version == self.version:
            return False
        now = self.one if is_own and self.one is not None else local(found)
        if not now.any():
            return True
        if now.eq(self.number).all():
            return False
        raise OSDPError(
            f"A gradient of {label} was changed between micro-steps, where its sum waits in FSDP2 and does not change;"
            " scale losses, or gradients after the last micro-step."
        )


class GradientChecks:
    """Check gradients and shards of a model's units."""

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        plain: Callable[[], Iterable[nn.Parameter]],
        replaced: Iterable[nn.Parameter],
    ) -> None:
        """Take the units, what returns the plan's plain parameters, and the parameters that `fully_shard` replaced by
        shards.
        """
        self._groups, self._plain = groups, plain
        self._replaced = WeakIdKeyDictionary(dict.fromkeys(replaced))
        self._shards: dict[FSDPParam, _Shard] = {}
        before_step.follow(self.step_begins)
        self._marks: dict[ParameterGroup, _Mark] = {}
        """By unit whose gradients wait."""
        self._earlier_marks: dict[ParameterGroup, _Mark] = {}
        """Marks of an earlier micro-step, which nothing has changed."""
        self._unmarked: list[ParameterGroup] = []
        """Further units whose gradients wait."""

    def forget_shards(self) -> None:
        """Release shards that are about to be replaced."""
        self._shards.clear()

    def forward_begins(self) -> None:
        """Refuse gradients of shards, and changes of shards that FSDP2 would ignore."""
        for group in self._groups:
            for parameter in group.fsdp_params:
                shard, seen = parameter.sharded_param, self._shards.get(parameter)
                if (
                    seen is None
                    or shard is not seen.shard
                    or shard.untyped_storage() is not seen.storage
                    or (shard.requires_grad if seen.hooks is None else len(seen.hooks) > 1)
                ):
                    self._shards[parameter] = _check_shard(group.label, parameter, seen)

    def backward_begins(self) -> bool:
        """Drop gradients that FSDP2 holds from earlier micro-steps if `zero_grad` was called since; return whether it
        was. Refuse other changes of gradients that wait.
        """
        zeroed = {group for group, mark in self._marks.items() if mark.was_zeroed(group.label)}
        if zeroed and len(zeroed) == len(self._marks):
            zeroed.update(self._unmarked)
        for group in zeroed:
            group.drop_gradients()
        for mark in self._marks.values():
            mark.shard.grad = None
        if self._marks:
            self._earlier_marks = {group: mark for group, mark in self._marks.items() if group not in zeroed}
            self._marks = {}
        return bool(zeroed)

    def backward_ends(self) -> None:
        """Mark a small shard of each unit whose gradients wait for the next micro-step.

        `zero_grad` cannot reach the gradients that FSDP2 holds; it removes these marks or detaches them from their
        graph. Units without a small shard follow the others.
        """
        holding = [group for group in self._groups if group.holds_sums or has_gradients(group)]
        chosen = {group: _shard_to_mark(group) for group in holding}
        free = {group: shard for group, shard in chosen.items() if shard is not None and shard.grad is None}
        most = max(_MARK_ELEMENTS, min(map(torch.numel, free.values()), default=0))
        for group, shard in free.items():
            if shard.numel() <= most:
                mark = self._earlier_marks.get(group)
                self._marks[group] = mark = mark if mark is not None and mark.shard is shard else _Mark.of(shard)
                shard.grad = mark.gradient
        self._unmarked = [group for group in free if group not in self._marks]

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Free whole weights that the step makes stale; refuse a step without its reduced gradients.

        In backward do neither.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        ids, plain = set(map(id, parameters)), set(map(id, self._plain()))
        strange = [p for p in parameters if not isinstance(p, DTensor) and id(p) not in plain]
        if any(parameter in self._replaced for parameter in strange):
            raise OSDPError(
                f"{type(optimizer).__name__} has parameters from before the plan was applied; make it again after"
                " that."
            )
        units = [group for group in self._groups if any(id(p.sharded_param) in ids for p in group.fsdp_params)]
        for group in units if torch._C._current_graph_task_id() == -1 else ():
            group.free()
            if group.holds_sums or has_gradients(group):
                raise too_early(group.label)
        if units and world_size() > 1:
            refuse_strange(optimizer, strange)


def _shard_to_mark(group: ParameterGroup) -> nn.Parameter | None:
    """Return a unit's smallest trained shard, if it can be one that is empty on no rank: nothing in an empty one tells
    whether it was scaled or zeroed.
    """

    def is_empty_somewhere(shard: Any) -> bool:  # noqa: ANN401  a DTensor
        rows = shard.shape[shard.placements[-1].dim]
        return -(-rows // group.ranks) * (group.ranks - 1) >= rows

    trained = [p.sharded_param for p in group.fsdp_params if p.sharded_param.requires_grad]
    smallest = min(trained, key=torch.numel, default=None)
    if smallest is None or not is_empty_somewhere(smallest):
        return smallest
    return min((one for one in trained if not is_empty_somewhere(one)), key=torch.numel, default=smallest)


def too_early(label: str) -> OSDPError:
    """Return the error of a step before the last micro-step's reduction."""
    return OSDPError(
        f"optimizer.step() came while gradients of unit {label!r} wait for the last micro-step; pass is_last=True in"
        " it (under Accelerate, step by sync_gradients), or plan with reduce_every_micro_step=False where it has none."
    )


def refuse_strange(optimizer: torch.optim.Optimizer, strange: Iterable[nn.Parameter]) -> None:
    """Raise OSDPError if one of an optimizer's parameters that the plan does not have got a gradient."""
    if (own := next((parameter for parameter in strange if parameter.grad is not None), None)) is not None:
        raise OSDPError(
            f"{type(optimizer).__name__} has a parameter of shape {tuple(own.shape)} that the plan does not have,"
            " whose gradients are not averaged over ranks; make it a part of the model before planning."
        )


def _check_shard(label: str, parameter: FSDPParam, before: _Shard | None) -> _Shard:
    """Return the shard as it is now, with `_refuse` as its only hook; raise if `.data` was assigned or the user has
    hooked it.
    """
    shard, name = parameter.sharded_param, _name(parameter)
    memory, storage = local(shard), shard.untyped_storage()
    if before is not None and memory is before.memory and storage is not before.storage:
        raise OSDPError(
            f"Unit {label!r}: .data of its {name} was assigned, which changes no shard; use {name}.data.copy_(...)."
        )
    if any(getattr(hook, "func", None) is not _refuse for hook in (shard._backward_hooks or {}).values()):
        raise OSDPError(
            f"Unit {label!r}: register_hook on its {name} has no effect on a shard; use"
            " register_post_accumulate_grad_hook, or"
            " change gradients before optimizer.step()."
        )
    if shard.requires_grad:
        shard._backward_hooks = None  # after `model.to`, torch would keep these hooks and not call them
        shard.register_hook(partial(_refuse, label, parameter))
    return _Shard(shard, memory, storage, shard._backward_hooks if shard.requires_grad else None)


def _refuse(label: str, parameter: FSDPParam, gradient: torch.Tensor) -> None:
    raise UnreducedGradientError(
        f"Unit {label!r} got a gradient for a shard of its {_name(parameter)}, which is not reduced over the ranks;"
        f" {REMEDY}."
    )


def _name(parameter: FSDPParam) -> str:
    return owners(parameter)[0][1]


def has_gradients(group: ParameterGroup) -> bool:
    """Return whether a unit has gradients that were not reduced."""
    return any(map(has_whole_gradient, group.fsdp_params))


def has_whole_gradient(parameter: FSDPParam) -> bool:
    """Return whether a parameter has a gradient that was not reduced."""
    whole = whole_parameter(parameter)
    return (whole is not None and whole.grad is not None) or parameter.unsharded_accumulated_grad is not None
