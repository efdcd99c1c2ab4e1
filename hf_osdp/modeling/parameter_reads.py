"""Parameters that are read while the module that they belong to does not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..planner.description import GatherSpan, UnitDescription
from .units import unwrapped


class ReadsOutside:
    """Notices, as a context, the units whose parameters are read as attributes while none of their modules runs.

    At run time such a read gathers the unit, which then stays gathered until the end of backward.

    Args:
        modules: the traced model's, by canonical name.
        units: the model's units; those that are freed after use count.
    """

    def __init__(self, modules: dict[str, nn.Module], units: Sequence[UnitDescription]) -> None:
        self.found: set[int] = set()
        """Indices of the units that were noticed."""
        self._running: list[int] = []
        self._owners: dict[nn.Module, int] = {
            unwrapped(modules[spec.name.rpartition(".")[0]]): index
            for index, unit in enumerate(units)
            if unit.span is GatherSpan.USE
            for spec in unit.parameters
        }

    def __enter__(self) -> ReadsOutside:
        for module, unit in self._owners.items():
            module.__dict__["_parameters"] = _Parameters(module._parameters, lambda unit=unit: self._note(unit))
        return self

    def __exit__(self, *exception: Any) -> None:
        for module in self._owners:
            module.__dict__["_parameters"] = dict(module._parameters)

    def inside(self, unit: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of one of a unit's modules, as which the unit runs."""

        def running(*args: Any, **kwargs: Any) -> Any:
            self._running.append(unit)
            try:
                return forward(*args, **kwargs)
            finally:
                self._running.pop()

        return running

    def _note(self, unit: int) -> None:
        in_backward = torch._C._current_graph_task_id() != -1  # where only forwards that are recomputed run
        if unit not in self._running and not in_backward:
            self.found.add(unit)


class _Parameters(dict[str, Any]):
    """A module's parameters; reading one as an attribute calls `note`, going through all does not."""

    def __init__(self, parameters: dict[str, Any], note: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._note = note

    def __getitem__(self, name: str) -> Any:
        self._note()
        return super().__getitem__(name)
