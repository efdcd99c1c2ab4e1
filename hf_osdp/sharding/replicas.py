"""Replicated units outside of FSDP2: plain parameters, whose gradients are averaged over the ranks while backward goes
on.

Between steps the model has its own parameters alone. Under mixed precision its modules compute with copies of lower
precision, which one list operator for each bucket writes when forward begins; gradients of the copies are added, in
the parameters' own precision, to the parameters' gradients. Buckets are reduced in one fixed order, so that ranks need
not agree on it: a rank without a gradient sends zeros, and a flag of each parameter tells whether any rank had one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.operations import recursively_apply
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from ..distributed.process_group import step_group
from ..errors import OSDPError, UnreducedGradientError
from ..modeling.step_hooks import before_step
from .gradient_checks import ASSIGN, CREATE_GRAPH, REMEDY, refuse_strange, too_early
from .replica_buckets import Bucket, Parameters

_MARK = "_osdp_replicas"
"""Attribute of all modules of a model with replicated parameters."""


def replicas_of(model: nn.Module) -> Replicas | None:
    """Return what keeps the replicated parameters of a model, or of one with this part, equal; None if there are
    none.
    """
    found: Replicas | None = vars(model).get(_MARK)
    return found if found is not None and found.parameters else None


def is_under_plan(model: nn.Module) -> bool:
    """Return whether a plan of several ranks was applied to a model, or FSDP2 has sharded it."""
    return isinstance(model, FSDPModule) or replicas_of(model) is not None


class Replicas:
    """Keeps a model's replicated parameters equal on all ranks; hooks of its modules and parameters hold it.

    Hooks of a copied model hold a copy that has no parameters: that model is a plain one.
    """

    parameters: Sequence[Parameters] = ()
    is_shown = False
    """Whether modules compute with copies now."""
    _buckets: Sequence[Bucket] = ()
    _order: Sequence[Bucket] = ()
    """Those with gradients."""
    _handles: Sequence[RemovableHandle] = ()
    _calls = 0
    """Calls with gradients whose backward has not come."""
    _in_backward = False

    def __init__(
        self, root: nn.Module, parameters: Sequence[Parameters], group: dist.ProcessGroup, *, averages: bool
    ) -> None:
        """Take all replicated parameters, in the order in which backward is expected to end with them.

        Args:
            root: the model.
            parameters: the same on every rank.
            group: all ranks; no other collectives run in it.
            averages: whether the group can average, as NCCL does, or only sum.
        """
        self.reduces = True
        """Whether this is the last micro-step, which reduces."""
        self.parameters, self._group = parameters, group
        self._op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        self._divisor = 1 if averages else group.size()
        self.is_all = not isinstance(root, FSDPModule)
        """Whether no unit is FSDP2's."""
        self._next = 0
        """The first of the order that was not reduced in this backward."""
        self._ended = -1
        """The backward that ended last, by autograd's number."""
        self._waits = False
        """Gradients of micro-steps wait for the last one."""
        self._is_settled = False
        """Ranks know which parameters a step uses."""
        self.ends_later: Callable[[], None] = partial(
            torch.autograd.Variable._execution_engine.queue_callback, self.end_backward
        )
        """Has `end_backward` called when this backward ends. Beside units of FSDP2 all ranks end theirs first."""
        for module in root.modules():
            vars(module)[_MARK] = self
        for owner in {owner for one in self.parameters for places in one.places for owner, _ in places}:
            owner.register_load_state_dict_pre_hook(self._loads)
        root.register_forward_pre_hook(self._begins, prepend=True, with_kwargs=True)
        root.register_forward_hook(self._ends)
        before_step.follow(self.step_begins)
        if not any(own.is_meta for own in self.held()):
            self._renew()

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (Replicas,)

    def held(self) -> list[nn.Parameter]:
        """Return the parameters that are kept equal."""
        return [own for parameters in self.parameters for own in parameters.held()]

    def watch(self, part: nn.Module, dtype: torch.dtype) -> None:
        """Cast the inputs of a part that computes in lower precision, as FSDP2 does; it may be called without the
        model.
        """
        part.register_forward_pre_hook(partial(_part_begins, self, dtype), with_kwargs=True)

    def begin(self) -> None:
        """Begin a call of the model, or of a part of it: write copies, and let modules compute with them."""
        if torch._C._current_graph_task_id() != -1:
            return
        if self._in_backward:  # it raised
            for bucket in self._buckets:
                bucket.forget()
            self._in_backward = False
        if not self.is_shown and not (self._buckets and all(bucket.is_current for bucket in self._buckets)):
            self._renew()
        for bucket in self._order:
            bucket.refuse_hooks()
        for bucket in self._buckets:
            bucket.write(again=not self._calls)
            if not self.is_shown:
                bucket.show()
        self.is_shown = True
        self._calls += torch.is_grad_enabled()

    def _begins(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Begin a call; inputs come to the device, as FSDP2 and DDP bring them."""
        self.begin()
        if not self._buckets or not self.is_all or (device := self._buckets[0].masters[0].device).type == "cpu":
            return None
        return _converted(args, device), _converted(kwargs, device)

    def _ends(self, module: nn.Module, args: object, output: object) -> None:
        if not self._calls and torch._C._current_graph_task_id() == -1:
            self._rest(self._buckets)

    def _loads(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *unused: object
    ) -> None:
        if self.parameters and metadata.get("assign_to_params_buffers", False):
            raise OSDPError(ASSIGN)

    def rest(self) -> None:
        """Let modules have their own parameters again between steps, also after a call without backward."""
        self._calls = 0
        self._rest(self._buckets)

    def _rest(self, freed: Iterable[Bucket] = ()) -> None:
        """Let modules have their own parameters again, and free copies."""
        for bucket in self._buckets if self.is_shown else ():
            bucket.hide()
        for bucket in freed:
            bucket.free()
        self.is_shown = False

    def _renew(self) -> None:
        """Make the buckets of the parameters that the model has now."""
        for handle in self._handles:
            handle.remove()
        self._buckets = [Bucket(parameters) for parameters in self.parameters]
        self._order = [bucket for bucket in self._buckets if bucket.trained]
        hooked = [(bucket, leaf is parameter, parameter) for bucket in self._order for leaf, own in bucket.trained
                  for parameter in dict.fromkeys((leaf, own))]  # fmt: skip
        own = weakref.ref(self)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(_arrives, own, weakref.ref(bucket), is_leaf))
            for bucket, is_leaf, parameter in hooked
        ]

    def arrived(self, bucket: Bucket, *, is_leaf: bool) -> None:
        """Take a gradient that autograd has accumulated, of what modules compute with or, read through
        `parameters()`, of the model's own.
        """
        if torch.is_grad_enabled():
            raise OSDPError(CREATE_GRAPH)
        if not self._in_backward:
            self._backward_begins()
            self.ends_later()
        if not bucket.left:
            raise UnreducedGradientError(
                f"Unit {bucket.of.label!r} got a gradient after its gradients were averaged over the ranks; {REMEDY}."
            )
        bucket.left -= is_leaf
        if not bucket.left:
            bucket.collect()
            while self.reduces and self._next < len(self._order) and not self._order[self._next].left:
                if self._order[self._next].of.is_rest:
                    break
                self._reduce_next()

    def _reduce_next(self) -> None:
        self._next += 1
        self._order[self._next - 1].reduce(self._group, self._op)

    def _backward_begins(self) -> None:
        self._in_backward, self._next = True, 0
        for bucket in self._order:
            bucket.left = len(bucket.trained)

    def end_backward(self) -> None:
        """Reduce what is left, in order, and wait for all, once in each backward: also on a rank whose backward gave
        no gradient to these parameters, for which others would wait.
        """
        if (task := torch._C._current_graph_task_id()) == self._ended:
            return
        self._ended = task
        if not self._in_backward:
            self._backward_begins()
        if self.reduces:
            self._reduce_rest()
        else:
            for bucket in self._order:
                if 0 < bucket.left < len(bucket.trained):
                    bucket.collect()
        self._waits, self._in_backward, self._calls = not self.reduces, False, max(0, self._calls - 1)
        if not self._calls:
            self._rest()

    def _reduce_rest(self) -> None:
        for bucket in self._order:
            if bucket.left:
                bucket.collect()
        rest = [bucket for bucket in self._order if bucket.of.is_rest]
        while self._next < len(self._order) - len(rest):
            self._reduce_next()
        for bucket in _used_by_some(rest):
            bucket.reduce(self._group, self._op)
        order = self._order
        for bucket in order:
            if bucket.work is not None:
                bucket.finish(self._divisor)
        if not self._is_settled:
            self._settle()
        for bucket in order:
            bucket.release()

    def _settle(self) -> None:
        """Put parameters that no rank has used in the first step into buckets of their own, for which others need not
        wait.
        """
        used_by_bucket = [bucket.used() if bucket.trained else [] for bucket in self._buckets]
        if not any(map(any, used_by_bucket)):  # the step trains other units
            return
        self._is_settled = True
        used, rest = list[Parameters](), list[Parameters]()
        for bucket, flags in zip(self._buckets, used_by_bucket, strict=True):
            unused = {id(own) for (_, own), is_used in zip(bucket.trained, flags, strict=True) if not is_used}
            for parts, is_rest in ((used, False), (rest, True)):
                pairs = zip(bucket.of.places, bucket.masters, strict=True)
                if places := [owners for owners, own in pairs if (id(own) in unused) is is_rest]:
                    parts.append(replace(bucket.of, places=places, is_rest=is_rest))
        if rest:
            self._rest(self._buckets)
            self.parameters = [*used, *rest]
            self._renew()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Free copies that the step makes old; refuse a step before gradients are averaged."""
        if torch._C._current_graph_task_id() != -1:
            return
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        ids = set(map(id, given))
        own = [bucket for bucket in self._buckets if any(id(master) in ids for master in bucket.masters)]
        if not own:
            return
        if self._waits and (waiting := next((bucket for bucket in own if bucket.holds), None)) is not None:
            raise too_early(waiting.of.label)
        if self.is_all:
            known = {id(master) for bucket in self._buckets for master in bucket.masters}
            refuse_strange(optimizer, [parameter for parameter in given if id(parameter) not in known])
        self._calls = 0
        self._rest(own)


def _used_by_some(rest: Sequence[Bucket]) -> list[Bucket]:
    """Return those of the buckets of which some rank has gradients. Collective if there are any buckets."""
    if not rest:
        return []
    holds = torch.tensor([bucket.holds for bucket in rest], dtype=torch.uint8)
    dist.all_reduce(holds, op=dist.ReduceOp.MAX, group=step_group())
    return [bucket for bucket, some in zip(rest, holds.tolist(), strict=True) if some]


def _part_begins(
    replicas: Replicas, dtype: torch.dtype, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Begin a call if this part is called without the model; return its inputs in the dtype of its weights."""
    if not replicas.parameters:
        return None
    if not replicas.is_shown:
        replicas.begin()
    return _converted(args, dtype), _converted(kwargs, dtype)


def _converted(value: Any, to: torch.dtype | torch.device) -> Any:  # noqa: ANN401
    """Return a value whose tensors are on a device, or whose floating-point ones have a dtype."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(to) if isinstance(to, torch.device) or tensor.is_floating_point() else tensor

    return recursively_apply(convert, value)  # pytree's walk takes ten times as long


def _arrives(
    replicas: weakref.ref[Replicas], bucket: weakref.ref[Bucket], is_leaf: bool, parameter: torch.Tensor
) -> None:
    """Pass a gradient on; autograd holds this hook, and through it would hold the model, which nothing could free."""
    if (found := replicas()) is not None and (its := bucket()) is not None:
        found.arrived(its, is_leaf=is_leaf)
