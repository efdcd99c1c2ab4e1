"""Buckets of replicated parameters: their copies of lower precision, and the flat buffer of their gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..errors import OSDPError

AllReduce = Callable[[torch.Tensor], None]
"""Averages a tensor over the ranks, in place."""
Owner = tuple[nn.Module, str]
"""A module that has a parameter, and its name there."""


def owners_of(model: nn.Module) -> dict[nn.Parameter, list[Owner]]:
    """Return where a model's modules have each parameter."""
    owners: dict[nn.Parameter, list[Owner]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append((module, name))
    return owners


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parameters:
    """Parameters of one unit and dtype, whose gradients are averaged together."""

    label: str
    places: Sequence[Sequence[Owner]]
    """Of each parameter, where modules have it."""
    dtype: torch.dtype | None = None
    """Dtype of the copies that modules compute with; None computes with the parameters themselves."""
    encoded: AllReduce | None = None
    """Averages gradients with fewer bits than a plain all-reduce."""
    is_rest: bool = False
    """No rank has used them in the first step: ranks first agree whether one has now."""

    def held(self) -> list[nn.Parameter]:
        """Return the parameters that the model has now; `to_empty` makes others."""
        get = dict.__getitem__  # `WeightReads` may watch the dictionary
        return [get(owners[0][0]._parameters, owners[0][1]) for owners in self.places]  # type: ignore[misc]


class Bucket:
    """The copies of some parameters, and the buffer of their gradients."""

    def __init__(self, of: Parameters) -> None:
        self.of, self.masters = of, of.held()
        self._trains = [own.requires_grad for own in self.masters]
        self.leaves = self.masters
        """What modules compute with, and autograd gives gradients."""
        if of.dtype is not None:
            self._copies = self.masters[0].new_empty(sum(map(torch.numel, self.masters)), dtype=of.dtype)
            copies = zip(_parts(self._copies, self.masters), self._trains, strict=True)
            self.leaves = [nn.Parameter(copy, trains) for copy, trains in copies]
            self.free()
        self.trained = [pair for pair in zip(self.leaves, self.masters, strict=True) if pair[1].requires_grad]
        """Those with gradients, each with the model's own parameter."""
        self.left = 0
        """Gradients that this backward still owes."""
        self.work: dist.Work | None = None
        self._views: list[torch.Tensor] = []
        """Parts of the buffer, which are the parameters' gradients."""
        self._had: list[bool] = []
        self._versions: list[int] = []

    @property
    def is_current(self) -> bool:
        """Whether the model still has and trains these parameters, on the same device."""
        now = self.of.held()
        return (
            all(map(operator.is_, now, self.masters))
            and [own.requires_grad for own in now] == self._trains
            and self.leaves[0].device == now[0].device
        )

    def refuse_hooks(self) -> None:
        """Refuse hooks that would see no gradient, or one that is not averaged yet."""
        for leaf, own in self.trained:
            if len(own._post_accumulate_grad_hooks or ()) > 1 or (leaf is not own and own._backward_hooks):
                raise OSDPError(
                    f"Unit {self.of.label!r}: a parameter of shape {tuple(own.shape)} has a hook on its gradient,"
                    " which would not see the ranks' mean; change parameter.grad before optimizer.step()."
                )

    def show(self) -> None:
        """Let modules compute with the copies: their attributes are these, while `parameters()` is as before."""
        for module, name, leaf, _ in self._placed():
            if type(module).__setattr__ is nn.Module.__setattr__:
                vars(module)[name] = leaf
            else:  # recurrent layers keep a list of their weights
                setattr(module, name, leaf)

    def hide(self) -> None:
        for module, name, _, own in self._placed():
            if vars(module).pop(name, None) is None:
                setattr(module, name, own)

    @torch.no_grad()
    def write(self, *, again: bool) -> None:
        """Write the copies; if not `again`, only those of parameters that have changed."""
        if self.of.dtype is None:
            return
        versions, storage = [own._version for own in self.masters], self._copies.untyped_storage()
        same = versions == self._versions and storage.size() > 0
        if again or not same:
            storage.resize_(self._copies.nbytes)
            with torch.autograd._unsafe_preserve_version_counter(self._copies) if same else nullcontext():
                torch._foreach_copy_([*self.leaves], [*self.masters])
            self._versions = versions

    def free(self) -> None:
        """Free the copies; a backward that needs them after that raises torch's error about changed tensors."""
        if self.of.dtype is not None:
            torch.autograd.graph.increment_version(self._copies)
            self._copies.untyped_storage().resize_(0)

    def forget(self) -> None:
        """Drop what a backward that raised has left."""
        self.left, self.work = 0, None
        for leaf, own in self.trained:
            if leaf is not own:
                leaf.grad = None

    @torch.no_grad()
    def collect(self) -> None:
        """Add this micro-step's gradients to those of earlier ones, in one buffer whose parts are the parameters'
        gradients.
        """
        self.left, sums = 0, [own.grad for _, own in self.trained]
        new = [None if leaf is own else leaf.grad for leaf, own in self.trained]
        if not self._views or not all(map(operator.is_, sums, self._views)):
            self._start([grad if total is None else total for grad, total in zip(new, sums, strict=True)])
            new = [None if total is None else grad for grad, total in zip(new, sums, strict=True)]
        added = [(view, grad) for view, grad in zip(self._views, new, strict=True) if grad is not None]
        if added and len(added) == len(self._views):
            self._gradients.add_(torch.cat([grad.flatten() for _, grad in added]))
        elif added:
            torch._foreach_add_([view for view, _ in added], [grad for _, grad in added])
        for (leaf, own), view, had in zip(self.trained, self._views, self._had, strict=True):
            if leaf is not own:
                leaf.grad = None
            own.grad = view if had else None

    def _start(self, first: Sequence[torch.Tensor | None]) -> None:
        """Begin the buffer with these gradients; a parameter without one has zeros, and 0 as its flag."""
        masters = [own for _, own in self.trained]
        numel = sum(map(torch.numel, masters))
        self._sent = masters[0].new_empty(numel + len(masters))
        self._gradients, self._flags = self._sent[:numel], self._sent[numel:]
        self._flags.fill_(1.0)
        self._views, self._had = list(_parts(self._gradients, masters)), [grad is not None for grad in first]
        present = [(view, grad) for view, grad in zip(self._views, first, strict=True) if grad is not None]
        if present:
            torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])
        if absent := [index for index, had in enumerate(self._had) if not had]:
            torch._foreach_zero_([part for index in absent for part in (self._views[index], self._flags[index])])

    @torch.no_grad()
    def reduce(self, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> None:
        """Start to average the gradients over the ranks. Collective."""
        if self.of.encoded is not None:
            self.of.encoded(self._gradients)
        sent = self._sent if self.of.encoded is None else self._flags
        self.work = dist.all_reduce(sent, op=op, group=group, async_op=True)

    @torch.no_grad()
    def finish(self, divisor: int) -> None:
        """Wait for the averages. A parameter that no rank has used gets no gradient, as in one process."""
        assert self.work is not None
        self.work.wait()
        self.work = None
        if divisor > 1 and self.of.encoded is None:
            self._sent.div_(divisor)
        if not all(self._had):
            for (_, own), view, used in zip(self.trained, self._views, self.used(), strict=True):
                own.grad = view if used else None

    def release(self) -> None:
        """Leave the averages to the parameters alone, so that `zero_grad` frees them."""
        self._views = []
        del self._sent, self._gradients, self._flags

    def used(self) -> list[bool]:
        """Return of each trained parameter whether some rank had a gradient, once they are averaged."""
        return [flag > 0 for flag in self._flags.tolist()]

    @property
    def holds(self) -> bool:
        """Whether its parameters have gradients."""
        return any(own.grad is not None for _, own in self.trained)

    def _placed(self) -> Iterator[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]:
        if self.of.dtype is not None:
            for owners, leaf, own in zip(self.of.places, self.leaves, self.masters, strict=True):
                for module, name in owners:
                    yield module, name, leaf, own


def _parts(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield views of a flat tensor with the shapes of these tensors."""
    sizes = list(map(torch.numel, like))
    return (part.view(one.shape) for part, one in zip(flat.split(sizes), like, strict=True))
