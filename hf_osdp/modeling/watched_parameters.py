"""See which parameters of a module are read without a call of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class WatchedParameters(dict[str, Any]):
    """A module's `_parameters`, of one unit, that tells of reads before they are made."""

    __slots__ = ("_listed", "_read", "unit")

    def __init__(
        self, module: nn.Module, unit: object, read: Callable[[Any], None], listed: Callable[[Any], None] | None = None
    ) -> None:
        """Call `read` with the unit when a parameter is read by name, as an attribute is, and `listed` when all are
        listed, as by `named_parameters`.
        """
        super().__init__(module._parameters)
        self.unit: Any = unit
        self._read, self._listed = read, listed

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401
        self._read(self.unit)
        return super().__getitem__(name)

    def items(self) -> Any:  # noqa: ANN401
        if self._listed is not None:
            self._listed(self.unit)
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(super().items()),)
