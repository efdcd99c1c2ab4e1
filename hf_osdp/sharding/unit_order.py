"""Keep the ranks' collectives in one order, also where ranks run different modules in a step.

A gather or reduction pairs with whatever the other ranks issue next in the same process group. If one rank leaves a
unit out (no picture in its batch, LayerDrop, another task's block), FSDP2 pairs different units, in silence if they
have one size. Here all ranks issue the same collectives in the same order: a rank takes part in those of units that it
leaves out, with its shard, or with zeros as gradients.

A *phase* is one call of the model, or one backward. Ranks expect the order in which the last phases of its kind needed
their collectives. A rank that needs one takes part in those expected before it. At the end of a phase it takes part in
the rest, and waits on the host, over gloo, until no rank needs a further one; one that was not expected is issued
then, by all ranks, and expected next time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.fsdp_internals import FSDPParam, TrainingState, UnitGroup, parameter_groups, whole_parameter
from ..distributed.process_group import all_gather_objects
from ..modeling.replaced import replaced, setting
from .unit_agreement import (
    GATHER,
    REDUCE,
    REDUCE_REST,
    Expected,
    Kind,
    merged,
    operation,
    start_most,
    start_to_tell,
    turn_of,
    unit_of,
)

_LATER = 2
"""Calls of the model since the last backward, above which they are of one kind."""
_generates = ContextVar("generates", default=False)
_is_alone = ContextVar("is_alone", default=False)


def generating() -> AbstractContextManager[None]:
    """Let calls of a model's parts belong to its next whole call: `generate` encodes pictures first, on ranks that
    have any.
    """
    return setting(_generates, True)


@contextmanager
def called_alone(model: nn.Module) -> Iterator[None]:
    """Let one rank call a sharded model by itself, with whole weights in its modules: nothing is gathered or freed."""
    with setting(_is_alone, True), ExitStack() as stack:
        for group in {group for module in model.modules() for group in parameter_groups(module)}:
            stack.enter_context(replaced(group, gathers=lambda *_: None, is_pinned=True))
        yield


@dataclass(slots=True, kw_only=True)
class _Phase:
    kind: Kind
    expected: Expected
    start: tuple[torch.Tensor, dist.Work] | None
    """The comparison of kinds, in progress; None once it has ended well."""
    position: int = 0
    """How many of the expected collectives have been issued."""
    needed: list[int] = field(default_factory=list)
    """Collectives that this rank needed, in order."""
    issued: set[int] = field(default_factory=set)
    is_longer: bool = False
    """Ranks needed collectives that were not expected."""
    unready: set[UnitGroup] = field(default_factory=set)
    """Units whose turn to be reduced was not when this rank had their gradients."""


class UnitOrder:
    """Issue the collectives of a model's units in one order on all ranks; `WeightReads` passes it FSDP2's calls."""

    def __init__(self, root: nn.Module, groups: Sequence[UnitGroup], host: dist.ProcessGroup) -> None:
        """Watch the calls of a sharded model; ranks agree over `host`, a gloo group of all of them."""
        self._host, self._groups = host, groups
        self._numbers = {group: number for number, group in enumerate(groups)}
        self._gathers = any(group.ranks > 1 for group in groups)
        self._expected: dict[Kind, Expected] = {}
        self._phase: _Phase | None = None
        self._outermost: nn.Module | None = None
        self._error_before: BaseException | None = None
        self._calls = 0
        """Calls of the model since the last backward."""
        self._entered: tuple[UnitGroup, ...] = ()
        """Groups of the unit whose backward begins; gathers of others are FSDP2's prefetches."""
        self._trained: dict[UnitGroup, set[FSDPParam]] = {}
        """Parameters that got a gradient on some rank, of units that were reduced; of others, all are reduced."""
        self._touched: set[FSDPParam] = set()
        """Parameters that got a gradient on this rank since the last step."""
        self._zeros: set[FSDPParam] = set()
        """Parameters whose gradients are zeros of this rank, unless another has touched them."""
        for group in groups:
            group.gathers = self._gather if group.ranks > 1 else None
        for module in _modules_with_units(root) if self._gathers else ():
            module.register_forward_pre_hook(self._call_begins, prepend=True)
            module.register_forward_hook(self._call_ends, always_call=True)

    def backward_begins(self) -> None:
        if self._phase is not None and not self._phase.kind.is_backward:  # backward within a call of the model
            self._finish()
        sends = self._gathers or any(group.reduce_grads and group.all_reduce_grads for group in self._groups)
        if self._phase is None and sends:  # else ranks may call backward differently often
            last = all(group.reduce_grads and group.all_reduce_grads for group in self._groups)
            self._begin(Kind(is_backward=True, trains=last, calls=self._calls))

    @contextmanager
    def entering(self, groups: Iterable[UnitGroup]) -> Iterator[None]:
        """Mark the beginning of a unit's backward."""
        self.backward_begins()
        self._entered = tuple(groups)
        try:
            yield
        finally:
            self._entered = ()

    def reduce(self, group: UnitGroup) -> None:
        """Reduce a unit's gradients, if it has any, when its turn comes; else end its backward."""
        if not group.reduce_grads:  # FSDP2 adds to the sums of earlier micro-steps, in the dtype that is reduced
            group.end_backward()
            return
        ready = any(map(has_whole_gradient, self._reduced_parameters(group)))
        if ready and self._phase is not None:
            need, expected = REDUCE + 3 * self._numbers[group], self._phase.expected
            if expected.sequence and expected.find(need, self._phase.position) is None:
                self._phase.needed.append(
                    need
                )  # next time; now with the rest, since an agreement here would hold back other gradients
                self._phase.unready.add(group)
                self._reduce(group, ())
                return
            self._need(need)
        self._reduce(group, self._reduced_parameters(group) if ready else ())

    def backward_ends(self) -> None:
        """Reduce what is left, and take part in what other ranks need, before FSDP2's own end of backward."""
        if self._phase is None or not self._phase.kind.is_backward:
            return
        for group in self._groups:
            if group.state != TrainingState.POST_BACKWARD and any(map(has_whole_gradient, group.fsdp_params)):
                group.post_backward()
        self._take_part_in_rest()
        is_last = all(group.reduce_grads and group.all_reduce_grads for group in self._groups)
        for group in self._groups if is_last else ():
            if group.holds_sums:  # of a unit that no rank has used in this micro-step
                self._agree(REDUCE + 3 * self._numbers[group])
                self._reduce(group, self._reduced_parameters(group))
        for group in self._groups if is_last else ():
            if any(has_whole_gradient(p) and self._may_be_late(p, group) for p in group.fsdp_params):
                self._agree(REDUCE_REST + 3 * self._numbers[group])
                self._reduce(group, group.fsdp_params)
        phase, has_zeros = self._phase, self._finish()
        self._calls = 0
        if is_last:
            self._forget_zeros(phase.issued, has_zeros=has_zeros)

    def forget_gradients(self) -> None:
        """Forget which parameters got gradients, after `zero_grad`."""
        self._touched.clear()

    def _call_begins(self, module: nn.Module, args: object) -> None:
        if self._outermost is None and not _is_alone.get() and torch._C._current_graph_task_id() == -1:
            self._outermost, self._error_before = module, sys.exc_info()[1]
            if self._phase is None or self._phase.kind.is_backward:  # a backward that raised has not ended its phase
                self._begin(Kind(trains=torch.is_grad_enabled(), calls=self._calls))
                self._calls = min(self._calls + 1, _LATER)

    def _call_ends(self, module: nn.Module, args: object, output: object) -> None:
        if module is not self._outermost:
            return
        self._outermost = None
        if sys.exc_info()[1] is not self._error_before:
            self._phase = None  # the call raised
        elif self._phase is not None and (hasattr(module, "generate") or not _generates.get()):
            self._finish()

    def _begin(self, kind: Kind) -> None:
        self._phase = _Phase(
            kind=kind,
            expected=self._expected.setdefault(kind, Expected()),
            start=start_to_tell(self._host, kind, None),
        )

    def _finish(self) -> bool:
        """Take part in all that other ranks need in this phase; return whether one has reduced zeros. Collective."""
        phase = self._phase
        assert phase is not None
        self._take_part_in_rest()
        has_zeros = self._agree(None)
        self._phase = None
        if phase.is_longer:
            sequences = all_gather_objects(phase.needed, self._host)
            self._expected[phase.kind] = Expected(merged([*sequences, phase.expected.sequence]))
        elif phase.expected.is_due():
            seen = torch.tensor(phase.expected.seen, dtype=torch.uint8)
            start_most(seen, self._host).wait()
            phase.expected.keep(seen.tolist())
        return has_zeros

    def _gather(self, group: UnitGroup, async_op: bool) -> None:
        """Gather a unit as FSDP2 does, when its turn comes; leave out a prefetch whose turn it is not."""
        need = GATHER + 3 * self._numbers[group]
        stays = not group.unshard_in_backward and group.state == TrainingState.PRE_BACKWARD
        if not group.is_gathering and not group.is_unsharded and not stays:
            phase = self._phase
            is_early = self._entered and group not in self._entered
            if is_early and phase is not None and phase.position < len(phase.expected.sequence):
                if phase.expected.sequence[phase.position] != need:
                    return
            self._need(need)
        group.gather(async_op)
        if self._phase is None and group.is_gathering:
            self._agree(None)

    def _need(self, need: int) -> None:
        """Take part in the collectives before one that this rank is about to issue."""
        if (phase := self._phase) is None:
            self._agree(need)
            return
        phase.needed.append(need)
        self._check_start(waits=False)
        place = phase.expected.find(need, phase.position)
        if place is None:
            self._take_part_in_rest()
            self._agree(need)
            return
        while phase.position < place:
            self._take_part(phase.expected.sequence[phase.position])
            phase.position += 1
        phase.expected.seen[place] = True
        phase.issued.add(need)
        phase.position += 1

    def _take_part_in_rest(self) -> None:
        phase = self._phase
        while phase is not None and phase.position < len(phase.expected.sequence):
            phase.position += 1
            self._take_part(phase.expected.sequence[phase.position - 1])

    def _agree(self, need: int | None) -> bool:
        """Take part in what other ranks need until it is this rank's turn, or no rank needs anything. Collective.

        Return whether a rank has reduced zeros in the place of gradients since the last step.
        """
        kind = self._phase.kind if self._phase else Kind()
        self._check_start(waits=True)
        while True:
            turn, has_zeros = turn_of(
                *start_to_tell(self._host, kind, need, has_zeros=bool(self._zeros)), self._label(need)
            )
            if self._phase is not None and turn is not None:
                self._phase.is_longer = True
                self._phase.issued.add(turn)
            if turn == need:
                return has_zeros
            assert turn is not None
            self._take_part(turn)

    def _check_start(self, *, waits: bool) -> None:
        """Check that ranks have begun one kind of phase, if this is known by now."""
        phase = self._phase
        if phase is not None and phase.start is not None and (waits or phase.start[1].is_completed()):
            start, phase.start = phase.start, None
            turn_of(*start, self._label(phase.needed[-1] if phase.needed else None))

    def _label(self, need: int | None) -> str | None:
        """Return the label of the unit of a collective, if there is one."""
        return None if need is None else self._groups[unit_of(need)].label

    def _take_part(self, need: int) -> None:
        """Issue a collective that other ranks need, and this rank does not, or not yet."""
        group = self._groups[unit_of(need)]
        if self._phase is not None:
            self._phase.issued.add(need)
            self._phase.unready.update([group] if operation(need) == REDUCE else ())
        if operation(need) == GATHER:
            is_backward = self._phase is not None and self._phase.kind.is_backward
            group.lend_shard(may_need=is_backward and group not in self._entered)
        else:
            parameters = self._reduced_parameters(group) if operation(need) == REDUCE else group.fsdp_params
            self._reduce(group, parameters, lends=True)

    def _reduced_parameters(self, group: UnitGroup) -> Iterable[FSDPParam]:
        if getattr(group, "reduce_scatter_unused_params", False):
            return group.fsdp_params
        return self._trained.get(group, group.fsdp_params)

    def _reduce(self, group: UnitGroup, parameters: Iterable[FSDPParam], *, lends: bool = False) -> None:
        """Let FSDP2 end a unit's backward and reduce the gradients of these parameters, with zeros where there are
        none.

        If this rank only `lends` zeros, or what it has so far, its own backward may come later.
        """
        wanted = {parameter for parameter in parameters if parameter.sharded_param.requires_grad}
        if wanted and not group.was_gathered:  # a replicated unit, which is not sent; `lend_shard` has gathered others
            group.unshard()
            group.wait_for_unshard()
            group.reshard()
        others = []
        for parameter in group.fsdp_params:
            whole: Any = whole_parameter(parameter)
            if has_whole_gradient(parameter):
                if parameter in wanted:
                    self._touched.add(parameter)
                else:
                    others.append((parameter, whole, whole.grad, parameter.unsharded_accumulated_grad))
                    whole.grad = parameter.unsharded_accumulated_grad = None
            elif parameter in wanted:
                whole.grad = torch.zeros_like(whole)
                if parameter.sharded_param.grad is None:
                    self._zeros.add(parameter)
        _use_one_dtype(group)
        group.end_backward(lends=lends)
        for parameter, whole, gradient, accumulated in others:
            whole.grad, parameter.unsharded_accumulated_grad = gradient, accumulated

    def _may_be_late(self, parameter: FSDPParam, group: UnitGroup) -> bool:
        """Return whether a gradient may be left at the end of backward; others came after their unit's own, which
        is an error.
        """
        assert self._phase is not None
        return group in self._phase.unready or parameter not in self._reduced_parameters(group)

    def _forget_zeros(self, issued: set[int], *, has_zeros: bool) -> None:
        """Remove gradients of parameters that no rank has used, as DDP does, and learn which to reduce.

        Collective if a rank has zeros.
        """
        reduced = {self._groups[unit_of(need)] for need in issued if operation(need)}
        if has_zeros:
            ordered = [parameter for group in self._groups for parameter in group.fsdp_params]
            flags = torch.tensor([parameter in self._touched for parameter in ordered], dtype=torch.uint8)
            start_most(flags, self._host).wait()
            used = {parameter for parameter, flag in zip(ordered, flags.tolist(), strict=True) if flag}
            for parameter in self._zeros - used:
                parameter.sharded_param.grad = None
            for group in reduced:
                self._trained[group] = self._trained.get(group, set()) | (used & set(group.fsdp_params))
        else:
            for group in reduced - self._trained.keys():
                self._trained[group] = set(group.fsdp_params)
        self._zeros.clear()
        self._touched.clear()


def has_whole_gradient(parameter: FSDPParam) -> bool:
    """Return whether a parameter has a gradient that was not reduced."""
    whole = whole_parameter(parameter)
    return (whole is not None and whole.grad is not None) or parameter.unsharded_accumulated_grad is not None


def _use_one_dtype(group: UnitGroup) -> None:
    """Give gradients of the last micro-step the dtype of sums of earlier ones, since FSDP2 reduces gradients of one
    dtype.
    """
    sums = [p.unsharded_accumulated_grad for p in group.fsdp_params if p.unsharded_accumulated_grad is not None]
    for parameter in group.fsdp_params if sums else ():
        whole = whole_parameter(parameter)
        if parameter.unsharded_accumulated_grad is None and whole is not None and whole.grad is not None:
            parameter.unsharded_accumulated_grad, whole.grad = whole.grad.to(sums[0].dtype), None


def _modules_with_units(root: nn.Module) -> list[nn.Module]:
    """Return the units' modules and those around them, whose calls gather."""
    return [module for module in root.modules() if any(map(parameter_groups, module.modules()))]
