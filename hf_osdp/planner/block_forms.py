"""Forms in which blocks run in place of the model's own code: compiled. The fields are those of a model's description
and of its plan.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockForms:
    """Classes of the blocks that run in another form; a description's costs are those of the form."""

    compiled_classes: tuple[str, ...] = ()
    """Classes of the blocks whose forward is compiled before they are sharded."""

    def changes(self, class_name: str) -> bool:
        """Return whether blocks of a class run in another form."""
        return class_name in self.compiled_classes

    @property
    def changed_blocks(self) -> str:
        """Short text: `GPT2Block compiled`; empty if all blocks run as the model has them."""
        return f"{' and '.join(self.compiled_classes)} compiled" if self.compiled_classes else ""


AS_WRITTEN = BlockForms()
"""All blocks run as the model has them."""
FORM_FIELDS = tuple(field.name for field in fields(BlockForms))
