"""Where in a training step an error was raised: which unit, which moment."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..modeling.units import canonical_name, modules_by_name
from ..planner.description import UnitDescription

_GATHERS = ("unshard", "wait_for_unshard", "pre_forward", "pre_backward", "_prefetch_unshard")
_IN_FSDP, _IN_AUTOGRAD, _IN_OPTIMIZERS = "_fsdp_param_group.py", "torch/autograd/graph.py", "torch/optim/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in a step."""

    moment: str
    unit: str | None = None
    """The unit's label; None where the moment is of no unit, or it is not known."""

    def __str__(self) -> str:
        return self.moment if self.unit is None else f"{self.moment} of {self.unit}"


class Whereabouts:
    """What tells the unit of an error in a model: the frames that it came through and, for operators of backward, which have no
    frames, the output whose gradient came last."""

    def __init__(self, model: nn.Module, units: Sequence[UnitDescription]) -> None:
        """
        Args:
            model: with the plan applied.
            units: the model's.
        """
        by_name = modules_by_name(model)
        self._labels: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._by_fqn = {name: unit.label for unit in units for name in (unit.fqn, *unit.module_names)}
        self.in_backward: str | None = None
        """The label of the unit whose output had its gradient last."""
        self._handles: list[RemovableHandle] = []
        for unit in units:
            for name in unit.module_names:
                self._labels[by_name[name]] = unit.label
        self.attach()

    def attach(self) -> None:
        """Put the hooks on the model, unless they are there."""
        if not self._handles:
            self._handles = [module.register_forward_hook(_Told(self, label)) for module, label in self._labels.items()]

    def detach(self) -> None:
        """Take the hooks off; the unit of an error in backward is then not known."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def place_of(self, error: BaseException) -> Place:
        """Where an error was raised, for one that was raised in a step of the model."""
        frames = list(_frames(error))[::-1]
        in_backward = any(_IN_AUTOGRAD in _file(frame) for frame in frames)
        for frame in frames:
            owner = frame.f_locals.get("self")
            if _file(frame).endswith(_IN_FSDP):
                name = canonical_name((getattr(owner, "_module_fqn", None) or "").split(",")[0])
                moment = "gathering" if frame.f_code.co_name in _GATHERS else "reducing the gradients"
                return Place(moment=moment, unit=self._by_fqn.get(name))
            if isinstance(owner, nn.Module) and owner in self._labels:
                return Place(moment="recomputation" if in_backward else "forward", unit=self._labels[owner])
            if _IN_OPTIMIZERS in _file(frame):
                return Place(moment="the optimizer's step")
        return Place(moment="backward", unit=self.in_backward) if in_backward else Place(moment="what lies between model and optimizer")


class _Told:
    """A forward hook: the unit's backward begins with the gradient of what it gave. A copied or pickled model has it no more."""

    def __init__(self, whereabouts: Whereabouts, label: str) -> None:
        self._whereabouts, self._label = weakref.ref(whereabouts), label

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _no_hook, ()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        leaves = (output,) if isinstance(output, torch.Tensor) else tree_leaves(output)
        first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad), None)
        if first is not None:
            first.register_hook(self._begins)

    def _begins(self, gradient: torch.Tensor) -> None:
        if (whereabouts := self._whereabouts()) is not None:
            whereabouts.in_backward = self._label


def _no_hook() -> Callable[..., None]:
    return _nothing


def _nothing(*_: Any) -> None:
    """What is in the place of a hook in a copy of a model."""


def _frames(error: BaseException) -> Iterator[FrameType]:
    """From where the error was caught to where it was raised."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.replace("\\", "/")
