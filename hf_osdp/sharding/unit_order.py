"""Gather and reduce the units of a sharded model in one order on all ranks, and weights that are read without a call
of their module.

FSDP2 gathers a unit when its module is called. If `head.weight` is read without a call, between the start of forward
and the end of backward, the unit is gathered here; it stays gathered and is reduced at the end of backward, like the
root. A rank whose step leaves a unit out takes part in its collectives, when `turns.py` says so: with its shard, or
with zeros as gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from ..distributed.fsdp_internals import (
    FSDPParam,
    ParameterGroup,
    TrainingState,
    UnitState,
    owners,
    parameter_groups,
    unit_state,
    whole_parameter,
)
from ..distributed.process_group import require_all, step_group
from ..errors import OSDPError
from ..modeling.activations import tensors_of
from ..modeling.replaced import replaced, setting
from ..modeling.units import modules_by_name
from ..modeling.watched_parameters import WatchedParameters
from ..planner.description import GatherSpan, UnitDescription
from .gradient_checks import ASSIGN, CREATE_GRAPH, GradientChecks, has_gradients, has_whole_gradient
from .replicas import Replicas
from .turns import LAST, NOTHING, Turns

_IN_CALL = (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)
"""States of a unit whose module runs forward or is recomputed in backward: FSDP2 gathers it for these reads."""
_generates = ContextVar("generates", default=False)


class OrderState(Enum):
    """What a read of a weight does; docs/design.md has the transitions."""

    AT_REST = "at rest"
    """All units are sharded."""
    ACTIVE = "active"
    """Between the first forward of the root or a unit and the end of backward."""
    EVALUATED = "evaluated"
    """After the root's forward without gradients; a loss may follow."""


class UnitOrder:
    """Gathers and reduces a model's units for FSDP2 and for reads; hooks of modules and of FSDP2's units hold it."""

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[UnitDescription],
        replicas: Replicas | None,
        sharded: Iterable[nn.Parameter],
    ) -> None:
        """Watch a model after `fully_shard`, which replaced `sharded` by shards and ignored those of `replicas`."""
        self.state = OrderState.AT_REST
        modules = modules_by_name(root)
        self.groups: list[ParameterGroup] = []
        for unit in units:
            parts = [modules[name] for name in unit.module_names]
            for group in parameter_groups(parts[0]):
                group.label, group.order, group.number = unit.label, self, len(self.groups)
                self.groups.append(group)
            if len(parts) > 1 and unit.span is GatherSpan.USE and isinstance(parts[0], FSDPModule):
                for part in parts:  # FSDP2 watches only the last one's output
                    part.register_forward_hook(partial(_begins_backward, unit_state(parts[0])))
        self._turns = Turns(self._take_part, lambda collective: self._unit_of(collective).label, step_group())
        self._checks = GradientChecks(self.groups, tuple if replicas is None else replicas.held, sharded)
        self._root, self._root_state, self._replicas = root, unit_state(root), replicas
        self._outermost: nn.Module | None = None
        """The module whose call, inside of no other, is in progress."""
        self._error_before: BaseException | None = None
        self._backward = -1
        """The backward in progress, by autograd's number."""
        self._gathered: list[ParameterGroup] = []
        self._used: dict[FSDPParam, bool] = {}
        """Whether a parameter that was reduced got a gradient on this rank since the last step."""
        if replicas is not None:
            replicas.ends_later = self._end_later
        self._watch(root)

    def _watch(self, root: nn.Module) -> None:
        for group in self.groups:
            for owner in (owner for parameter in group.fsdp_params for owner, _ in owners(parameter)):
                if not isinstance(owner._parameters, WatchedParameters):
                    owner.__dict__["_parameters"] = WatchedParameters(owner, group, self.read, self.listed)
                    owner.register_load_state_dict_pre_hook(_load_as_shards)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                unit_state(module).order = self
            if any(isinstance(inner, FSDPModule) for inner in module.modules()):
                module.register_forward_pre_hook(self._call_begins, prepend=True)
                module.register_forward_hook(self._call_ends, always_call=True)
        root.register_load_state_dict_pre_hook(
            lambda *unused: self._shards_change()
        )  # else weights that a forward left whole would be loaded
        root._apply = partial(self._apply, root._apply)  # type: ignore[method-assign]  # as `model.to(...)` does

    # ---- calls of the model

    def _call_begins(self, module: nn.Module, args: object) -> None:
        """Begin a call of the model, or of a part alone, such as `model.get_input_embeddings()(ids)`."""
        if self._outermost is not None or torch._C._current_graph_task_id() != -1:
            return
        self._outermost, self._error_before = module, sys.exc_info()[1]
        self._root_state.begin()  # reads shards the first time
        if module is self._root or self.state is not OrderState.ACTIVE:
            if not self._is_pinned:  # otherwise an earlier forward of the same step has read them
                self._free_read()
            self.state = OrderState.ACTIVE
            self._checks.forward_begins()
        if not self._turns.in_call:
            self._turns.begin_call(trains=torch.is_grad_enabled())

    def _call_ends(self, module: nn.Module, args: object, output: object) -> None:
        if module is not self._outermost:
            return
        self._outermost = None
        if sys.exc_info()[1] is not self._error_before:
            self._root_state.forward_raised()
            self._turns.rest()
            return
        if self._turns.in_call and (hasattr(module, "generate") or not _generates.get()):
            self._turns.end()
        if module is self._root and not torch.is_grad_enabled() and not self._is_pinned:
            self._free_read()
            self.state = OrderState.EVALUATED

    def end_step(self) -> None:
        """Free all whole weights, in steps without backward."""
        self.state = OrderState.AT_REST
        self._gathered.clear()
        for group in self.groups:
            group.free()

    def _free_read(self) -> None:
        """Free weights that were gathered for reads."""
        for group in self._gathered:
            if group.is_unsharded and group.state not in _IN_CALL:
                group.reshard()
        self._gathered.clear()

    @property
    def _is_pinned(self) -> bool:
        """Whether a backward needs weights that were read."""
        return any(group.is_pinned for group in self.groups)

    # ---- reads of weights

    def read(self, group: ParameterGroup) -> None:
        """Prepare a unit for a read of one of its parameters. Collective if the unit is sharded at the time."""
        if self.state is OrderState.AT_REST or group.state in _IN_CALL:
            return
        if not group.is_unsharded:
            if self.state is OrderState.EVALUATED:  # one rank alone may read a weight then
                require_all(f"Reading a weight of {group.label} after forward")
            group.unshard()
            group.wait_for_unshard()
            self._gathered.append(group)
        if torch.is_grad_enabled() and not group.is_pinned:
            group.is_pinned = True  # backward needs the weight
            for whole in map(whole_parameter, group.fsdp_params):
                if whole is not None and whole.requires_grad:
                    hooks = (whole._backward_hooks or {}).values()
                    if self._read_weight_got_gradient not in hooks:
                        whole.register_hook(self._read_weight_got_gradient)

    def listed(self, group: ParameterGroup) -> None:
        """Reshard first if an evaluation left whole weights: shards have the gradients, and writes to them last."""
        if self.state is OrderState.EVALUATED:
            group.reshard()

    def _read_weight_got_gradient(self, gradient: torch.Tensor) -> None:
        """Refuse a backward with retain_graph, but not one inside of backward, as reversible layers run."""
        is_inside = self._turns.in_backward and torch._C._current_graph_task_id() != self._backward
        if torch._C._autograd._get_current_graph_task_keep_graph() and not is_inside:
            raise OSDPError(
                "retain_graph=True lets backward run again through a weight that the loss reads, but the first"
                " backward frees the weight;"
                " add the losses and call backward once."
            )
        self._end_later()

    def _apply(self, apply: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        self._shards_change()
        return apply(*args, **kwargs)

    def _shards_change(self) -> None:
        self.end_step()
        self._checks.forget_shards()

    # ---- collectives

    def gather(self, group: ParameterGroup, async_op: bool) -> None:
        """Gather a unit as FSDP2 does, when its turn comes."""
        stays = not group.unshard_in_backward and group.state == TrainingState.PRE_BACKWARD
        if not (group.is_gathering or group.is_unsharded or stays):
            self._turns.need(self._gather_of(group))
        group.gather(async_op)
        if group.is_gathering and not (self._turns.in_call or self._turns.in_backward):
            self._turns.agree(NOTHING)

    def may_prefetch(self, group: ParameterGroup) -> bool:
        """Return whether FSDP2 may gather a unit now, before its own backward."""
        return self._turns.is_next(self._gather_of(group))

    def reduce(self, group: ParameterGroup) -> None:
        """End a unit's backward, and reduce its gradients if it has any: when its turn comes, or at the end of
        backward.
        """
        if group.is_pinned or not group.was_gathered:  # FSDP2 raises for units that no rank has used yet
            return
        need, reduces = self._gather_of(group) + 1, group.reduce_grads and has_gradients(group)
        if reduces and self._turns.may_wait_for(need):
            self._turns.need(need)
            self._send(group)
            return
        if reduces:  # an agreement here would hold back other gradients
            self._turns.need_next_time(need)
        with replaced(group, reduce_grads=False):  # FSDP2 adds to the sums of earlier micro-steps
            group.end_backward()

    def _send(self, group: ParameterGroup, *, lends: bool = False) -> None:
        """Let FSDP2 end a unit's backward and reduce its gradients, with zeros where there are none.

        If this rank only `lends` zeros, or what it has so far, its own backward may come later; those gradients are
        reduced at the end of backward, since sums are linear.
        """
        for parameter in group.fsdp_params:
            whole = whole_parameter(parameter)
            if whole is not None and whole.requires_grad:
                has_gradient = has_whole_gradient(parameter)
                was_used = self._used.get(parameter, parameter.sharded_param.grad is not None)
                self._used[parameter] = was_used or has_gradient
                if not has_gradient:
                    whole.grad = torch.zeros_like(whole)
        if any(parameter.unsharded_accumulated_grad is not None for parameter in group.fsdp_params):
            for parameter in group.fsdp_params:  # sums of earlier micro-steps: FSDP2 reduces gradients of one dtype
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
        group.end_backward(lends=lends)

    def _take_part(self, collective: int) -> None:
        """Issue a collective that other ranks need, and this rank does not, or not yet."""
        group = self._unit_of(collective)
        if collective == LAST:
            self._forget_unused()
        elif collective == self._gather_of(group):
            group.lend_shard(may_need=self._turns.in_backward)
        else:
            self._send(group, lends=True)

    def _gather_of(self, group: ParameterGroup) -> int:
        """Return the number of a unit's gather; its reduction has the next."""
        return LAST + 1 + 2 * group.number

    def _unit_of(self, collective: int) -> ParameterGroup:
        return self.groups[(collective - LAST - 1) // 2]

    # ---- backward

    def _end_later(self) -> None:
        """Have FSDP2 end this backward as those of other ranks, also if it reaches no module that was called."""
        self._root_state.begin()
        self.backward_begins()
        self._root_state.end_later()

    @property
    def _is_last(self) -> bool:
        """Whether this is the last micro-step, which reduces all gradients."""
        return all(group.reduce_grads and group.all_reduce_grads for group in self.groups)

    def backward_begins(self) -> None:
        """Begin backward, unless that has happened."""
        if torch.is_grad_enabled():
            raise OSDPError(CREATE_GRAPH)
        if self._checks.backward_begins():
            self._used.clear()
        if self._turns.in_call:  # backward within a call of the model
            self._turns.end()
        if not self._turns.in_backward:
            self._turns.begin_backward(is_last=self._is_last)
            self._backward = torch._C._current_graph_task_id()

    @contextmanager
    def backward_ends(self) -> Iterator[None]:
        """Reduce what is left once all gradients exist, and take part in what other ranks need; then let FSDP2 end
        backward, and check the units.
        """
        for group in self.groups:
            group.is_pinned = False
        for group in self.groups:
            if group.state != TrainingState.POST_BACKWARD and has_gradients(group):
                group.post_backward()
        self._turns.take_part_in_rest()
        for group in self.groups if self._is_last else ():
            if has_gradients(group) or group.holds_sums:  # late ones; of a unit that no rank has used since
                self._turns.agree(self._gather_of(group) + 1)
                self._send(group)
        if self._is_last:
            if not all(self._used.values()):
                self._turns.agree(LAST)
                self._forget_unused()
            self._used.clear()
        self._turns.end()
        yield
        self._gathered.clear()
        self.state = OrderState.AT_REST
        if self._replicas is not None:
            self._replicas.end_backward()
        self._checks.backward_ends()

    def _forget_unused(self) -> None:
        """Remove gradients of parameters that no rank has used, as DDP does. Collective."""
        reduced = [parameter for group in self.groups for parameter in group.fsdp_params]
        found = self._turns.largest([self._used.get(parameter, True) for parameter in reduced])
        for parameter, is_used in zip(reduced, found, strict=True):
            if not is_used:
                parameter.sharded_param.grad = None


def generating() -> AbstractContextManager[None]:
    """Let calls of a model's parts belong to its next whole call: `generate` encodes pictures first, on ranks that
    have any.
    """
    return setting(_generates, True)


@contextmanager
def called_alone(model: nn.Module) -> Iterator[None]:
    """Let one rank call a sharded model by itself, with whole weights in its modules: nothing is gathered or freed."""
    with ExitStack() as stack:
        for order in orders_of(model):
            stack.enter_context(replaced(order, _outermost=nn.Module(), gather=lambda *_: None))
        for group in units_of(model):
            stack.enter_context(replaced(group, is_pinned=True))
        yield


def orders_of(model: nn.Module) -> set[UnitOrder]:
    """Return what gathers the units of a model under a plan, or of a part of one."""
    return {unit.order for unit in units_of(model)}


def units_of(model: nn.Module) -> set[ParameterGroup]:
    """Return the units of a model under a plan, or of a part of one."""
    owned = (module._parameters for module in model.modules())
    return {parameters.unit for parameters in owned if isinstance(parameters, WatchedParameters)}


def _begins_backward(state: UnitState, module: nn.Module, args: object, output: object) -> None:
    """Let a unit's backward begin at the first gradient of this module's output."""
    for tensor in tensors_of(output) if torch.is_grad_enabled() else ():
        if tensor.requires_grad:
            tensor.register_hook(state.begin_backward)


def _load_as_shards(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *unused: object
) -> None:
    """Cut whole tensors, the same on every rank, to load them into shards; nothing is sent."""
    unit: ParameterGroup = module._parameters.unit  # type: ignore[attr-defined]
    unit.free()
    for leaf, parameter in module._parameters.items():
        value = state.get(prefix + leaf)
        if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor):
            continue
        if metadata.get("assign_to_params_buffers", False):
            raise OSDPError(ASSIGN)
        if not isinstance(value, DTensor) and value.shape == parameter.shape:
            state[prefix + leaf] = distribute_tensor(
                value.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None
            )
