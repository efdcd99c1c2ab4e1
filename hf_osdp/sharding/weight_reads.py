"""Gather weights that are read without calling their module, and check that every gradient was reduced.

FSDP2 gathers a unit when its module is called. If `head.weight` is read without a call, between the start of forward and the end of
backward, the unit is gathered here; it stays gathered and is reduced at the end of backward, like the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from ..distributed.mesh import apart, collective_device, sharing_ranks
from ..distributed.process_group import require_all
from ..distributed.replicas import Background
from ..errors import OSDPError, UnreducedGradientError
from ..modeling.units import modules_by_name
from ..planner.description import UnitDescription
from .environment import parameter_groups

_IN_CALL = (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)
"""States of a unit whose module runs forward or is recomputed in backward: FSDP2 gathers it for these reads."""
_REMEDY = (
    "read weights as attributes of their module (model.lm_head.weight) within the forward or the loss, and not through"
    " model.parameters(), full_tensor() or a reference that was kept from before"
)
_MIXED = ("got mixed torch.Tensor and DTensor", "inputs with different meshes")
"""Parts of torch's messages about operators on shards and whole tensors, or on shards of several layouts."""


class WeightReads:
    """Gather units whose weights are read outside of a call, and check all units after backward.

    Hooks of the root module hold it, and it wraps FSDP2's own end of backward.
    """

    def __init__(
        self, root: nn.Module, units: Sequence[UnitDescription], scalars: Iterable[nn.Parameter], background: Background | None = None
    ) -> None:
        """Watch a model after `fully_shard`, and average the gradients of `scalars`, parameters without dimensions that FSDP2 ignores."""
        self.active = False
        """True between the first forward of the root or a unit and the end of backward."""
        self._after_evaluation = False
        """True after the root's forward without gradients; a loss may follow."""
        self._scalars, self._background = tuple(scalars), background
        modules = modules_by_name(root)
        self._labels = {group: unit.label for unit in units for group in parameter_groups(modules[unit.module_names[0]])}
        self._pinned: list[FSDPParamGroup] = []
        self._gathered: list[FSDPParamGroup] = []
        self._hooked: dict[tuple[int, str], torch.Tensor] = {}
        for group in self._labels:
            for info in (parameter._module_info for parameter in group.fsdp_params):
                for owner in (info.module, *info.shared_modules):
                    if not isinstance(owner._parameters, _WatchedParameters):
                        owner.__dict__["_parameters"] = _WatchedParameters(owner._parameters, group, self)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                state._root_post_backward_final_callback = partial(self._backward_ends, state)  # type: ignore[method-assign]
                state._pre_backward = partial(_refuse_second_gradients, state._pre_backward)  # type: ignore[method-assign]
                if module is root:
                    self._root_state = state
                else:
                    module.register_forward_pre_hook(self._unit_begins, prepend=True)
        root.register_forward_pre_hook(self._forward_begins)  # after FSDP2's, which reads shards in its lazy initialisation
        root.register_forward_hook(self._forward_ends)
        root._apply = partial(self._end_step_before, root._apply)  # type: ignore[method-assign]  # as `model.to(...)` does

    def read(self, group: FSDPParamGroup) -> None:
        """Prepare a unit for a read of one of its parameters. Collective if the unit is sharded at the time."""
        if not self.active or group._training_state in _IN_CALL:
            return
        if not group.is_unsharded:
            if self._after_evaluation:  # one rank alone may read a weight then
                require_all(f"Reading a weight of {self._labels[group]} after forward")
            group.unshard()
            group.wait_for_unshard()
            self._gathered.append(group)
        if torch.is_grad_enabled() and group not in self._pinned:
            # Reduce once all gradients exist: a reduction after a call in the same step would miss the gradient of the read.
            group.post_backward, group.reshard = _postpone, _postpone  # type: ignore[method-assign]
            self._pinned.append(group)
            self._hook(group, "_unsharded_param", self._register_end_of_backward)

    def end_step(self) -> None:
        """Free weights that were gathered for reads, in steps without backward."""
        self.active = False
        self._unpin()
        for group in self._gathered:
            if group.is_unsharded and group._training_state not in _IN_CALL:
                group.reshard()
        self._gathered.clear()

    def _unit_begins(self, module: nn.Module, args: object) -> None:
        """Begin a step if a unit is called without the root, as by `model.base_model(...)` or `model.get_input_embeddings()(ids)`."""
        if not self.active or self._after_evaluation:
            self._root_state._lazy_init()
            self._forward_begins(module, args)

    def _forward_begins(self, module: nn.Module, args: object) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        if not self._pinned:  # otherwise an earlier forward of the same step has read them
            self.end_step()
        self.active, self._after_evaluation = True, False
        for group, label in self._labels.items():  # loading may have replaced parameters
            self._hook(group, "sharded_param", partial(_refuse, label))

    def _forward_ends(self, module: nn.Module, args: object, output: object) -> None:
        if not torch.is_grad_enabled() and not self._pinned:
            self.end_step()
            self.active = self._after_evaluation = True

    def _register_end_of_backward(self, parameter: FSDPParam, gradient: torch.Tensor) -> None:
        """Register FSDP2's end of backward, which FSDP2 does only for called modules; refuse a backward with retain_graph."""
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise OSDPError(
                "retain_graph=True lets backward run again through a weight that the loss reads, but the first backward frees the weight;"
                " add the losses and call backward once."
            )
        self._root_state._register_root_post_backward_final_callback()

    def _backward_ends(self, state: FSDPState) -> None:
        """Run FSDP2's end of backward for the units of `state`'s root once all gradients exist; then check the units."""
        self._unpin()
        type(state)._root_post_backward_final_callback(state)
        if self._background is not None:
            self._background.wait()
        self._gathered.clear()
        self.active = False
        ended = [group for one in state._state_ctx.all_states for group in parameter_groups(one._modules[0])]
        if state._state_ctx is self._root_state._state_ctx:
            self._average_scalars()
        self._check(ended)

    def _end_step_before(self, apply: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        self.end_step()
        return apply(*args, **kwargs)

    def _unpin(self) -> None:
        for group in self._pinned:
            del group.post_backward, group.reshard
        self._pinned.clear()

    @torch.no_grad()
    def _average_scalars(self) -> None:
        """Average gradients of parameters without dimensions over the ranks that share a model, in the last micro-step. Collective."""
        scalars = [parameter for parameter in self._scalars if parameter.requires_grad]
        if not scalars or sharing_ranks() == 1 or not all(group.all_reduce_grads for group in self._labels):
            return
        own = [(0.0, 0.0) if p.grad is None else (p.grad.item(), 1.0) for p in scalars]
        sums = torch.tensor(own, dtype=torch.float64, device=collective_device())
        dist.all_reduce(sums, group=None if (groups := apart()) is None else groups.machine)
        for parameter, (total, used) in zip(scalars, sums.tolist(), strict=True):
            if used:  # on some rank
                parameter.grad = torch.full_like(parameter, total / sharing_ranks())

    def _check(self, ended: Iterable[FSDPParamGroup]) -> None:
        for group in ended:
            for parameter in group.fsdp_params if group.reduce_grads else ():
                whole = getattr(parameter, "_unsharded_param", None)
                if (whole is not None and whole.grad is not None) or parameter.unsharded_accumulated_grad is not None:
                    label, name = self._labels.get(group, "?"), parameter._module_info.param_name
                    raise UnreducedGradientError(
                        f"Unit {label!r} got a gradient for its {name} that was not reduced over the ranks, because it came after the"
                        f" unit's own backward; {_REMEDY}."
                    )

    def _hook(self, group: FSDPParamGroup, attribute: str, hook: Callable[[FSDPParam, torch.Tensor], None]) -> None:
        for parameter in group.fsdp_params:
            tensor: torch.Tensor = getattr(parameter, attribute)
            if tensor.requires_grad and self._hooked.get((id(parameter), attribute)) is not tensor:
                tensor.register_hook(partial(hook, parameter))
                self._hooked[id(parameter), attribute] = tensor


class _WatchedParameters(dict[str, nn.Parameter | None]):
    """A module's `_parameters` that notifies `WeightReads` of reads by name, but not of iteration, as in `named_parameters`."""

    __slots__ = ("group", "reads")

    def __init__(self, parameters: dict[str, nn.Parameter | None], group: FSDPParamGroup, reads: WeightReads) -> None:
        super().__init__(parameters)
        self.group, self.reads = group, reads

    def __getitem__(self, name: str) -> nn.Parameter | None:
        if self.reads.active:
            self.reads.read(self.group)
        return super().__getitem__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


def end_step(model: nn.Module) -> None:
    """Free weights that were gathered for reads, if no backward follows. Do nothing for an unsharded model."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(reads := getattr(hook, "__self__", None), WeightReads):
            reads.end_step()


@contextmanager
def mixing_explained() -> Iterator[None]:
    """Add the remedy to torch's error about a loss that mixes whole tensors with shards."""
    try:
        yield
    except RuntimeError as error:
        if not any(text in str(error) for text in _MIXED):
            raise
        raise OSDPError(f"The loss mixes whole tensors with shards of weights; {_REMEDY}.") from error


def _refuse(label: str, parameter: FSDPParam, gradient: torch.Tensor) -> None:
    name = parameter._module_info.param_name
    raise UnreducedGradientError(
        f"Unit {label!r} got a gradient for a shard of its {name}, which is not reduced over the ranks; {_REMEDY}."
    )


def _refuse_second_gradients(pre_backward: Callable[[torch.Tensor], torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
    """Refuse gradients of gradients before a unit's backward, which frees weights that a second backward would read."""
    if torch.is_grad_enabled():
        raise OSDPError(
            "create_graph=True asks for gradients of gradients, which need weights that are freed by then; leave out this gradient"
            " penalty, or train this loss with osdp=False."
        )
    return pre_backward(gradient)


def _postpone(*unused: object) -> None:
    """Do nothing; replaces FSDP2's reduction and release of a unit until backward has ended."""
