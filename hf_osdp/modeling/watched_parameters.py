"""See which parameters of a module are read without a call of it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn


class Watcher(Protocol):
    """What is told of a unit's reads."""

    def read(self, unit: Any) -> None:  # noqa: ANN401
        """Take note before a parameter of the unit is read by name, as an attribute is."""

    def listed(self, unit: Any) -> None:  # noqa: ANN401
        """Take note before all parameters of a module are listed, as by `named_parameters`."""


class WatchedParameters(dict[str, Any]):
    """A module's `_parameters`, of one unit, that tells a watcher of reads."""

    __slots__ = ("unit", "watcher")

    def __init__(self, module: nn.Module, unit: object, watcher: Watcher) -> None:
        super().__init__(module._parameters)
        self.unit, self.watcher = unit, watcher

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401
        self.watcher.read(self.unit)
        return super().__getitem__(name)

    def items(self) -> Any:  # noqa: ANN401
        self.watcher.listed(self.unit)
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(super().items()),)
