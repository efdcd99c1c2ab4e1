"""Gather weights that are read without a call of their module.

FSDP2 gathers a unit when its module is called. If `head.weight` is read without a call, between the start of forward
and the end of backward, the unit is gathered here; it stays gathered and is reduced at the end of backward, like the
root.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from ..distributed.fsdp_internals import (
    TrainingState,
    UnitGroup,
    UnitState,
    owners,
    parameter_groups,
    unit_state,
    whole_parameter,
)
from ..distributed.process_group import require_all, step_group
from ..errors import OSDPError
from ..modeling.activations import tensors_of
from ..modeling.step_hooks import before_step
from ..modeling.units import modules_by_name
from ..planner.description import GatherSpan, UnitDescription
from .gradient_checks import ASSIGN, CREATE_GRAPH, GradientChecks
from .replicas import Replicas
from .unit_order import UnitOrder

_Parameters = Iterable[nn.Parameter]
_IN_CALL = (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)
"""States of a unit whose module runs forward or is recomputed in backward: FSDP2 gathers it for these reads."""


class WeightReads:
    """Gather units whose weights are read outside of a call; hooks of the root module and of FSDP2's units hold it."""

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[UnitDescription],
        replicas: Replicas | None,
        replaced: _Parameters,
    ) -> None:
        """Watch a model after `fully_shard`, which replaced `replaced` by shards and ignored those of `replicas`."""
        self.active = False
        """True between the first forward of the root or a unit and the end of backward."""
        self.after_evaluation = False
        """True after the root's forward without gradients; a loss may follow."""
        modules = modules_by_name(root)
        groups = []
        for unit in units:
            for group in parameter_groups(modules[unit.module_names[0]]):
                group.label, group.reduces = unit.label, self._reduce
                groups.append(group)
        host = step_group()
        self._order = None if host is None else UnitOrder(root, groups, host)
        self._checks = checks = GradientChecks(
            groups, tuple if replicas is None else replicas.held, replaced, self._order
        )
        self._replicas = replicas
        if replicas is not None:
            replicas.ends_later = self._replicas_begin
        weakref.finalize(checks, before_step.add(partial(_step_begins, weakref.ref(checks))))
        self._pinned: list[UnitGroup] = []
        self._gathered: list[UnitGroup] = []
        self._hooked: dict[int, torch.Tensor] = {}
        several = (unit.module_names for unit in units if len(unit.module_names) > 1 and unit.span is GatherSpan.USE)
        _watch_outputs([modules[name] for name in names] for names in several)
        for group in groups:
            for owner in (owner for parameter in group.fsdp_params for owner, _ in owners(parameter)):
                if not isinstance(owner._parameters, _WatchedParameters):
                    owner.__dict__["_parameters"] = _WatchedParameters(owner._parameters, group, self)
                    owner.register_load_state_dict_pre_hook(_load_as_shards)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                state = unit_state(module)
                state.begins, state.ends = self._backward_begins, self._backward_ends
                if module is not root:
                    module.register_forward_pre_hook(self._unit_begins, prepend=True)
                else:
                    self._root_state = state
        root.register_forward_pre_hook(
            self._forward_begins
        )  # after FSDP2's, which reads shards in its lazy initialisation
        root.register_forward_hook(self._forward_ends)
        root.register_load_state_dict_pre_hook(
            lambda *unused: self._shards_change()
        )  # FSDP2 would read whole weights after an evaluation
        root._apply = partial(self._apply, root._apply)  # type: ignore[method-assign]  # as `model.to(...)` does

    def read(self, group: UnitGroup) -> None:
        """Prepare a unit for a read of one of its parameters. Collective if the unit is sharded at the time."""
        if not self.active or group.state in _IN_CALL:
            return
        if not group.is_unsharded:
            if self.after_evaluation:  # one rank alone may read a weight then
                require_all(f"Reading a weight of {group.label} after forward")
            group.unshard()
            group.wait_for_unshard()
            self._gathered.append(group)
        if torch.is_grad_enabled() and not group.is_pinned:
            # Reduce once all gradients exist: a reduction after a call in the same step would miss the gradient of the
            # read.
            group.is_pinned = True
            self._pinned.append(group)
            for parameter in group.fsdp_params:
                whole = whole_parameter(parameter)
                if whole is not None and whole.requires_grad and self._hooked.get(id(parameter)) is not whole:
                    whole.register_hook(self._register_end_of_backward)
                    self._hooked[id(parameter)] = whole

    def end_step(self) -> None:
        """Free weights that were gathered for reads, in steps without backward."""
        self.active = False
        self._unpin()
        for group in self._gathered:
            if group.is_unsharded and group.state not in _IN_CALL:
                group.reshard()
        self._gathered.clear()

    def _unit_begins(self, module: nn.Module, args: object) -> None:
        """Begin a step if a unit is called without the root, as by `model.base_model(...)` or
        `model.get_input_embeddings()(ids)`.
        """
        if not self.active or self.after_evaluation:
            self._root_state.begin()
            self._forward_begins(module, args)

    def _forward_begins(self, module: nn.Module, args: object) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        if not self._pinned:  # otherwise an earlier forward of the same step has read them
            self.end_step()
        self.active, self.after_evaluation = True, False
        self._checks.forward_begins()

    def _forward_ends(self, module: nn.Module, args: object, output: object) -> None:
        if not torch.is_grad_enabled() and not self._pinned:
            self.end_step()
            self.active = self.after_evaluation = True

    def _register_end_of_backward(self, gradient: torch.Tensor) -> None:
        """Register FSDP2's end of backward, which FSDP2 does only for called modules; refuse a backward with
        retain_graph.
        """
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise OSDPError(
                "retain_graph=True lets backward run again through a weight that the loss reads, but the first"
                " backward frees the weight;"
                " add the losses and call backward once."
            )
        self._end_later()

    def _replicas_begin(self) -> None:
        """Let a backward that may reach no unit of FSDP2 end as those of other ranks do."""
        self._root_state.begin()
        self._end_later()

    def _end_later(self) -> None:
        self._checks.backward_begins()
        if self._order is not None:
            self._order.backward_begins()
        self._root_state.end_later()

    @contextmanager
    def _backward_ends(self) -> Iterator[None]:
        """Run FSDP2's end of backward once all gradients exist; then check the units."""
        self._unpin()
        if self._order is not None:
            self._order.backward_ends()
        yield
        self._gathered.clear()
        self.active = False
        if self._replicas is not None:
            self._replicas.end_backward()
        self._checks.backward_ends()

    @contextmanager
    def _backward_begins(self, groups: list[UnitGroup]) -> Iterator[None]:
        if torch.is_grad_enabled():
            raise OSDPError(CREATE_GRAPH)
        self._checks.backward_begins()
        with nullcontext() if self._order is None else self._order.entering(groups):
            yield

    def _reduce(self, group: UnitGroup) -> None:
        if group.is_pinned or not group.was_gathered:  # FSDP2 raises for units that no rank has used yet
            return
        if self._order is None:
            group.end_backward()
        else:
            self._order.reduce(group)

    def _apply(self, apply: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        self._shards_change()
        return apply(*args, **kwargs)

    def _shards_change(self) -> None:
        self.end_step()
        self._checks.forget_shards()

    def _unpin(self) -> None:
        for group in self._pinned:
            group.is_pinned = False
        self._pinned.clear()


class _WatchedParameters(dict[str, nn.Parameter | None]):
    """A module's `_parameters` that notifies `WeightReads` of reads by name, but not of iteration, as in
    `named_parameters`.
    """

    __slots__ = ("group", "reads")

    def __init__(self, parameters: dict[str, nn.Parameter | None], group: UnitGroup, reads: WeightReads) -> None:
        super().__init__(parameters)
        self.group, self.reads = group, reads

    def __getitem__(self, name: str) -> nn.Parameter | None:
        if self.reads.active:
            self.reads.read(self.group)
        return super().__getitem__(name)

    def items(self) -> Any:  # noqa: ANN401
        """Reshard first if an evaluation left whole weights: shards have the gradients, and writes to them last."""
        if self.reads.after_evaluation:
            self.group.reshard()
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(super().items()),)


def _watch_outputs(units: Iterable[Sequence[nn.Module]]) -> None:
    """Let the backward of each unit begin at the first gradient of any module's output: FSDP2 watches only the last
    module's.
    """
    for modules in units:
        if isinstance(modules[0], FSDPModule):
            state = unit_state(modules[0])
            for module in modules:
                module.register_forward_hook(partial(_begins_backward, state))


def _begins_backward(state: UnitState, module: nn.Module, args: object, output: object) -> None:
    for tensor in tensors_of(output) if torch.is_grad_enabled() else ():
        if tensor.requires_grad:
            tensor.register_hook(state.begin_backward)


def _load_as_shards(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *unused: object
) -> None:
    """Cut whole tensors, the same on every rank, to load them into shards; nothing is sent."""
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


def _step_begins(checks: weakref.ref[GradientChecks], optimizer: torch.optim.Optimizer) -> None:
    if (found := checks()) is not None:  # the model may be freed while hooks of a step run
        found.step_begins(optimizer)


def end_step(model: nn.Module) -> None:
    """Free weights that were gathered for reads, if no backward follows, of a model or a part of one."""
    for reads in {watched.reads for watched in _watched(model)}:
        reads.end_step()


def units_of(model: nn.Module) -> set[UnitGroup]:
    """Return the units of a model under a plan, or of a part of one."""
    return {watched.group for watched in _watched(model)}


def _watched(model: nn.Module) -> Iterator[_WatchedParameters]:
    return (module._parameters for module in model.modules() if isinstance(module._parameters, _WatchedParameters))
