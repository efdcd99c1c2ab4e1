"""Sequences of the collectives of a model's units, as numbers: what ranks expect in a phase, and how they learn it."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import reduce

GATHER, REDUCE, REDUCE_REST = range(3)
"""Operations of a unit; its collective is `operation + 3 * unit`.

The rest are gradients that its first reduction did not have.
"""
_WINDOW = 32
"""Phases after which collectives that no rank needed in them are expected no longer."""


def unit_of(collective: int) -> int:
    return collective // 3


def operation(collective: int) -> int:
    return collective % 3


class Expected:
    """The collectives that ranks expect in a kind of phase, in order; the same on all ranks, except `seen`."""

    def __init__(self, sequence: Sequence[int] = ()) -> None:
        self.sequence = list(sequence)
        self.seen = [False] * len(self.sequence)
        """Which of them this rank has needed lately."""
        self._phases = 0

    def find(self, collective: int, position: int) -> int | None:
        """Return the next place of a collective, from a position on; None if it is not expected any more."""
        try:
            return self.sequence.index(collective, position)
        except ValueError:
            return None

    def is_due(self) -> bool:
        """Count a phase; return whether ranks should compare what they have needed lately."""
        self._phases = (self._phases + 1) % _WINDOW
        return not self._phases

    def keep(self, needed: Sequence[int]) -> None:
        """Keep the collectives that some rank has needed lately."""
        self.sequence = [collective for collective, is_needed in zip(self.sequence, needed, strict=True) if is_needed]
        self.seen = [False] * len(self.sequence)


def merged(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Return one sequence that contains each of these in its order."""
    return reduce(_merged_two, map(list, sequences))


def _merged_two(first: list[int], second: list[int]) -> list[int]:
    """Return what both have, once, and where they differ the first's part before the second's."""
    both: list[int] = []
    for tag, i, end_i, j, end_j in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        both += first[i:end_i] if tag == "equal" else first[i:end_i] + second[j:end_j]
    return both
