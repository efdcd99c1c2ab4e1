"""Gather weights that are read without calling their module, and check that every gradient was reduced.

FSDP2 gathers a unit when its module is called. If `head.weight` is read without a call, between the start of forward and the end of
backward, the unit is gathered here; it stays gathered and is reduced at the end of backward, like the root.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from ..distributed.mesh import apart, collective_device, sharing_ranks
from ..distributed.process_group import gloo_group, require_all
from ..distributed.replicas import Background
from ..errors import OSDPError, UnreducedGradientError
from ..modeling.step_hooks import before_step
from ..modeling.units import modules_by_name
from ..planner.description import UnitDescription
from .environment import parameter_groups
from .gradients import local

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
        self,
        root: nn.Module,
        units: Sequence[UnitDescription],
        scalars: Iterable[nn.Parameter],
        replaced: Iterable[nn.Parameter],
        background: Background | None = None,
    ) -> None:
        """Watch a model after `fully_shard`, which replaced the parameters `replaced` by shards and ignores `scalars`.

        Scalars are parameters without dimensions; their gradients are averaged here.
        """
        self.active = False
        """True between the first forward of the root or a unit and the end of backward."""
        self.after_evaluation = False
        """True after the root's forward without gradients; a loss may follow."""
        self._scalars, self._background = tuple(scalars), background
        modules = modules_by_name(root)
        self._labels = {group: unit.label for unit in units for group in parameter_groups(modules[unit.module_names[0]])}
        self._pinned: list[FSDPParamGroup] = []
        self._gathered: list[FSDPParamGroup] = []
        self._hooked: dict[tuple[int, str], torch.Tensor] = {}
        self._memory: dict[int, tuple[torch.Tensor, torch.UntypedStorage]] = {}
        """Each shard's local tensor, and the storage that `.data = ...` replaces in its place."""
        self._replaced = WeakIdKeyDictionary(dict.fromkeys(replaced))
        self._marks: dict[FSDPParamGroup, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._reduced: list[tuple[str | None, ...]] = []
        """Of each unit that this backward has reduced, parameters without a gradient."""
        self._without: dict[FSDPParamGroup, tuple[str | None, ...]] = {}
        self._compared: tuple[torch.Tensor, dist.Work] | None = None
        self._host = gloo_group() if apart() is None else None
        for group in self._labels:
            group.post_backward = partial(self._reduce, group)  # type: ignore[method-assign]
            for info in (parameter._module_info for parameter in group.fsdp_params):
                for owner in (info.module, *info.shared_modules):
                    if not isinstance(owner._parameters, _WatchedParameters):
                        owner.__dict__["_parameters"] = _WatchedParameters(owner._parameters, group, self)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                state._root_post_backward_final_callback = partial(self._backward_ends, state)  # type: ignore[method-assign]
                state._pre_backward = partial(self._backward_begins, state._pre_backward)  # type: ignore[method-assign]
                if module is root:
                    self._root_state = state
                else:
                    module.register_forward_pre_hook(self._unit_begins, prepend=True)
        root.register_forward_pre_hook(self._forward_begins)  # after FSDP2's, which reads shards in its lazy initialisation
        root.register_forward_hook(self._forward_ends)
        root.register_load_state_dict_pre_hook(lambda *unused: self.end_step())  # FSDP2 would read whole weights after an evaluation
        root._apply = partial(self._end_step_before, root._apply)  # type: ignore[method-assign]  # as `model.to(...)` does
        weakref.finalize(root, before_step.add(partial(_step_begins, weakref.ref(self))))

    def read(self, group: FSDPParamGroup) -> None:
        """Prepare a unit for a read of one of its parameters. Collective if the unit is sharded at the time."""
        if not self.active or group._training_state in _IN_CALL:
            return
        if not group.is_unsharded:
            if self.after_evaluation:  # one rank alone may read a weight then
                require_all(f"Reading a weight of {self._labels[group]} after forward")
            group.unshard()
            group.wait_for_unshard()
            self._gathered.append(group)
        if torch.is_grad_enabled() and group not in self._pinned:
            # Reduce once all gradients exist: a reduction after a call in the same step would miss the gradient of the read.
            group.reshard = _postpone  # type: ignore[method-assign]
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
        if not self.active or self.after_evaluation:
            self._root_state._lazy_init()
            self._forward_begins(module, args)

    def _forward_begins(self, module: nn.Module, args: object) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        if not self._pinned:  # otherwise an earlier forward of the same step has read them
            self.end_step()
        self.active, self.after_evaluation = True, False
        for group, label in self._labels.items():  # loading may have replaced parameters
            self._hook(group, "sharded_param", partial(_refuse, label))
            self._check_shards(group, label)

    def _forward_ends(self, module: nn.Module, args: object, output: object) -> None:
        if not torch.is_grad_enabled() and not self._pinned:
            self.end_step()
            self.active = self.after_evaluation = True

    def _register_end_of_backward(self, parameter: FSDPParam, gradient: torch.Tensor) -> None:
        """Register FSDP2's end of backward, which FSDP2 does only for called modules; refuse a backward with retain_graph."""
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise OSDPError(
                "retain_graph=True lets backward run again through a weight that the loss reads, but the first backward frees the weight;"
                " add the losses and call backward once."
            )
        self._drop_zeroed()
        self._root_state._register_root_post_backward_final_callback()

    def _backward_ends(self, state: FSDPState) -> None:
        """Run FSDP2's end of backward for the units of `state`'s root once all gradients exist; then check the units."""
        self._unpin()
        type(state)._root_post_backward_final_callback(state)
        if self._background is not None:
            self._background.wait()
        self._gathered.clear()
        self.active = False
        self._compare(self._reduced)
        ended = [group for one in state._state_ctx.all_states for group in parameter_groups(one._modules[0])]
        if state._state_ctx is self._root_state._state_ctx:
            self._average_scalars()
        self._check(ended)
        for group in filter(_holds, ended):
            shard = min((p.sharded_param for p in group.fsdp_params), key=lambda shard: (not shard.requires_grad, shard.numel()))
            if shard.requires_grad and shard.grad is None:
                # `zero_grad` cannot reach the gradients that FSDP2 holds; it removes or overwrites these zeros, which shows that it ran.
                shard.grad = torch.zeros_like(shard)
                self._marks[group] = shard, shard.grad, shard.grad._version

    def _backward_begins(self, pre_backward: Callable[[torch.Tensor], torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
        self._drop_zeroed()
        return _refuse_second_gradients(pre_backward, gradient)

    def _drop_zeroed(self) -> None:
        """Drop gradients that FSDP2 holds from earlier micro-steps if `zero_grad` was called since."""
        for group, (shard, mark, version) in self._marks.items():
            if shard.grad is not mark or mark._version != version:
                group._partial_reduce_output = None
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None
            shard.grad = None
        self._marks.clear()

    def _reduce(self, group: FSDPParamGroup, *unused: object) -> None:
        """Reduce a unit's gradients unless it is pinned, and record which exist: FSDP2 assumes that all ranks have the same ones."""
        if group in self._pinned:
            return
        without = tuple(parameter._param_fqn for parameter in group.fsdp_params if not _has_whole_gradient(parameter))
        if group.reduce_grads and len(without) < len(group.fsdp_params):
            if group._partial_reduce_output is not None and without != self._without[group]:
                raise OSDPError(
                    f"Micro-steps have gradients of different parameters of unit {self._labels[group]!r}, which FSDP2 cannot add up before"
                    " replicas are averaged; plan with reduce_every_micro_step=False."
                )
            self._without[group] = without
            self._reduced.append(without)
        type(group).post_backward(group)

    def _compare(self, reduced: list[tuple[str | None, ...]]) -> None:
        """Raise if ranks reduced different gradients in the backward before; start to compare those of this one. Collective."""
        if self._compared is not None:
            extremes, work = self._compared
            work.wait()
            self._compared = None
            if extremes[0] != -extremes[1]:
                trained = [p._param_fqn for group in self._without for p in group.fsdp_params if p.sharded_param.requires_grad]
                names = [name for without in self._without.values() for name in without if name in trained]
                raise OSDPError(
                    "Ranks have gradients of different parameters, which FSDP2 averages with one another (here"
                    f" {len(names)} have none, such as {', '.join(map(str, names[:1]))!r}); call every module on every rank, with an empty"
                    " batch where it has nothing to do."
                )
        if reduced and self._host is not None:
            number = crc32(repr(reduced).encode())
            extremes = torch.tensor([number, -number])
            self._compared = extremes, dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._host, async_op=True)
        reduced.clear()

    def _end_step_before(self, apply: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        self.end_step()
        return apply(*args, **kwargs)

    def _unpin(self) -> None:
        for group in self._pinned:
            del group.reshard
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
                if _has_whole_gradient(parameter):
                    label, name = self._labels.get(group, "?"), parameter._module_info.param_name
                    raise UnreducedGradientError(
                        f"Unit {label!r} got a gradient for its {name} that was not reduced over the ranks, because it came after the"
                        f" unit's own backward; {_REMEDY}."
                    )

    def _check_shards(self, group: FSDPParamGroup, label: str) -> None:
        """Refuse changes of shards that FSDP2 would ignore."""
        for parameter in group.fsdp_params:
            shard, name = parameter.sharded_param, parameter._module_info.param_name
            now = local(shard), shard.untyped_storage()
            memory, storage = self._memory.get(id(parameter), now)
            if memory is now[0] and storage._cdata != now[1]._cdata:
                raise OSDPError(f"Unit {label!r}: .data of its {name} was assigned, which changes no shard; use {name}.data.copy_(...).")
            self._memory[id(parameter)] = now
            if len(shard._backward_hooks or ()) > 1:  # one is that of `_refuse`
                raise OSDPError(
                    f"Unit {label!r}: register_hook on its {name} has no effect on a shard; use register_post_accumulate_grad_hook, or"
                    " change gradients before optimizer.step()."
                )

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Free gathered weights that the step makes stale; refuse a step without its reduced gradients. In backward do neither."""
        self._compare([])
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        ids = {id(parameter) for parameter in stepped}
        if any(parameter in self._replaced for parameter in stepped):
            raise OSDPError(f"{type(optimizer).__name__} has parameters from before the plan was applied; make it again after that.")
        ours = [group for group in self._labels if any(id(parameter.sharded_param) in ids for parameter in group.fsdp_params)]
        for group in ours if torch._C._current_graph_task_id() == -1 else ():
            group.reshard()
            if _holds(group):
                raise OSDPError(
                    f"optimizer.step() came while gradients of unit {self._labels[group]!r} wait for the last micro-step; pass is_last=True"
                    " in it (under Accelerate, step by sync_gradients), or plan with reduce_every_micro_step=False where it has none."
                )
        known = {id(parameter) for parameter in self._scalars}
        strange = [p for p in stepped if p.grad is not None and not isinstance(p, DTensor) and id(p) not in known]
        if ours and strange and sharing_ranks() > 1:
            raise OSDPError(
                f"{type(optimizer).__name__} has a parameter of shape {tuple(strange[0].shape)} that the plan does not have, whose"
                " gradients are not averaged over ranks; make it a part of the model before planning."
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

    def items(self) -> Any:  # noqa: ANN401
        """Reshard first if an evaluation left whole weights: shards have the gradients, and writes to them last."""
        if self.reads.after_evaluation:
            self.group.reshard()
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(super().items()),)


def _has_whole_gradient(parameter: FSDPParam) -> bool:
    whole = getattr(parameter, "_unsharded_param", None)
    return (whole is not None and whole.grad is not None) or parameter.unsharded_accumulated_grad is not None


def _holds(group: FSDPParamGroup) -> bool:
    """Return whether gradients of a micro-step wait for those of the next."""
    return group._partial_reduce_output is not None or any(map(_has_whole_gradient, group.fsdp_params))


def _step_begins(reads: weakref.ref[WeightReads], optimizer: torch.optim.Optimizer) -> None:
    if (found := reads()) is not None:
        found.step_begins(optimizer)


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
