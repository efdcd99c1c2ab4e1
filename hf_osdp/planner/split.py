"""How a model is cut into units: operator units inside blocks, several blocks in a unit, operators in slices, the loss
in chunks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

_MOST_CHUNKS = 1024
_MOST_BLOCKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSplit:
    """One operator in slices, which are gathered and used one after the other."""

    fqn: str
    """Name of the module in `named_modules`, such as `transformer.h.0.mlp.c_fc`."""
    slices: int
    """Number of slices; it need not divide the output features."""

    def __post_init__(self) -> None:
        if self.slices < 2:
            raise ValueError(
                f"slices={self.slices!r} for {self.fqn!r} must be at least 2; leave the split out to keep the operator"
                " whole."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSplit:
    """All splits of a model. The default leaves the model unchanged, with blocks as units."""

    operators: bool = False
    """Whether attention, MLP and the like are units of their own, instead of whole blocks."""
    blocks_per_unit: int = 1
    """Most equal neighbouring blocks in a unit, which are gathered and reduced together."""
    sliced: tuple[OperatorSplit, ...] = ()
    """Operators in slices, in any order; each slice becomes a unit."""
    loss_chunks: int = 1
    """Number of chunks of the tokens in which vocabulary projection and loss are computed; 1 computes all tokens at
    once.
    """

    def __post_init__(self) -> None:
        if not 1 <= self.loss_chunks <= _MOST_CHUNKS:
            raise ValueError(
                f"loss_chunks={self.loss_chunks!r} must be from 1 to {_MOST_CHUNKS}; 1 leaves the loss whole."
            )
        if not 1 <= self.blocks_per_unit <= _MOST_BLOCKS:
            raise ValueError(
                f"blocks_per_unit={self.blocks_per_unit!r} must be from 1 to {_MOST_BLOCKS}; 1 is each block alone."
            )
        if self.blocks_per_unit > 1 and (self.operators or self.sliced):
            raise ValueError(
                f"blocks_per_unit={self.blocks_per_unit!r} needs whole blocks; leave operators and slices out."
            )
        names = [split.fqn for split in self.sliced]
        if len(set(names)) < len(names):
            name, times = Counter(names).most_common(1)[0]
            raise ValueError(f"{name!r} is split {times} times; name each operator once.")

    def describe(self) -> str:
        """Return short text for tables: `blocks, loss in 8 chunks`, `up to 4 blocks a unit`, `operators, 8 operators
        in 2 to 4 slices`.
        """
        text = "operators" if self.operators else "blocks"
        if self.blocks_per_unit > 1:
            text = f"up to {self.blocks_per_unit} blocks a unit"
        if self.loss_chunks > 1:
            text += f", loss in {self.loss_chunks} chunks"
        if not self.sliced:
            return text
        what = self.sliced[0].fqn if len(self.sliced) == 1 else f"{len(self.sliced)} operators"
        counts = sorted({split.slices for split in self.sliced})
        return f"{text}, {what} in {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} slices"

    @property
    def is_none(self) -> bool:
        """Whether the model is not split."""
        return self == WHOLE_BLOCKS

    @property
    def of_single_blocks(self) -> ModelSplit:
        """The same split, with each block in a unit of its own."""
        return replace(self, blocks_per_unit=1)

    @property
    def with_whole_loss(self) -> ModelSplit:
        """The same split, with the loss of all tokens at once."""
        return replace(self, loss_chunks=1)

    @property
    def of_loss(self) -> ModelSplit:
        """The split of the loss alone, with whole blocks."""
        return ModelSplit(loss_chunks=self.loss_chunks)

    @property
    def cuts_parameters(self) -> bool:
        """Whether parameters of the model are replaced by parts."""
        return bool(self.sliced)

    @property
    def changes_modules(self) -> bool:
        """Whether the split replaces modules of the model, and not only defines other units."""
        return bool(self.sliced) or self.loss_chunks > 1


WHOLE_BLOCKS = ModelSplit()
"""The unchanged model, with blocks as units."""
