"""What ranks expect of one another in a phase of a step: the collectives of units, as numbers in order, and what each
rank tells the others, over gloo and in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import reduce
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..errors import OSDPError

GATHER, REDUCE, REDUCE_REST = range(3)
"""Operations of a unit; its collective is `operation + 3 * unit`.

The rest are gradients that its first reduction did not have.
"""
_WINDOW = 32
"""Phases after which collectives that no rank needed in them are expected no longer."""
_MOST_RANKS = 2**20


def unit_of(collective: int) -> int:
    return collective // 3


def operation(collective: int) -> int:
    return collective % 3


class Kind(NamedTuple):
    """What the ranks do in a phase; the same on all of them."""

    is_backward: bool = False
    trains: bool = False
    """The call computes gradients; the backward is a step's last."""
    calls: int = -1
    """Calls of the model since the last backward; -1 for a read of a weight between phases."""

    def __str__(self) -> str:
        if self.calls < 0:
            return "a read of a weight outside of the model's call"
        if self.is_backward:
            return "backward" if self.trains else "backward of a micro-step that is not the last"
        number = ("the first", "the second", "a later")[self.calls]
        return f"{number} call of the model{'' if self.trains else ' without gradients'} since backward"

    @property
    def number(self) -> int:
        return 100 * self.is_backward + 10 * self.trains + self.calls + 1

    @staticmethod
    def of_number(number: int) -> Kind:
        return Kind(bool(number // 100), bool(number // 10 % 10), number % 10 - 1)


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


def start_to_tell(
    host: dist.ProcessGroup, kind: Kind, need: int | None, *, has_zeros: bool = False
) -> tuple[torch.Tensor, dist.Work]:
    """Start to tell the other ranks of a gloo group what this rank does and needs. Collective."""
    number = kind.number * _MOST_RANKS + dist.get_rank()
    sent = torch.tensor([-1 if need is None else need, number, -number, has_zeros])
    return sent, start_most(sent, host)


def start_most(tensor: torch.Tensor, host: dist.ProcessGroup) -> dist.Work:
    """Start to replace each element by the largest of all ranks. Collective."""
    return dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=host, async_op=True)


def turn_of(sent: torch.Tensor, work: dist.Work, unit: str | None) -> tuple[int | None, bool]:
    """Return whose turn it is, and whether a rank has zeros; raise OSDPError if ranks do different things.

    `unit` is the one at which this rank is, for the message.
    """
    work.wait()
    turn, most, least, has_zeros = sent.tolist()
    found = [(Kind.of_number(number // _MOST_RANKS), number % _MOST_RANKS) for number in (most, -least)]
    if found[0][0] != found[1][0]:
        parts = " and ".join(f"rank {rank} {kind}" for kind, rank in found)
        at = "" if unit is None else f"; rank {dist.get_rank()} is at unit {unit!r}"
        raise OSDPError(
            f"Ranks run different parts of a step: {parts}{at}; call the model and backward equally often on every"
            " rank, and read"
            " weights of the model on all of them."
        )
    return None if turn < 0 else turn, bool(has_zeros)
