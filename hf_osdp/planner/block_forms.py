"""How blocks run: as the model has them, or compiled."""

from __future__ import annotations

from dataclasses import dataclass

COUNTED_AS_EAGER = "counted as not compiled: a run needs less memory and time"
"""What a description says of compiled blocks, for which nothing was measured."""
MEASURED_COMPILED = "compiled, with measured memory and time"
"""What it says of those that were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockForms:
    """Classes of the blocks that run compiled, in a description and in its plan."""

    compiled_classes: tuple[str, ...] = ()
    """Classes of the blocks whose forward is compiled before they are sharded."""

    def compiles(self, class_name: str) -> bool:
        """Return whether blocks of a class are compiled."""
        return class_name in self.compiled_classes
