"""What ranks tell one another, over gloo and in host memory, about the phases of a step and the collectives that
they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..distributed.process_group import all_gather_objects
from ..errors import OSDPError
from .unit_sequences import unit_of

_MOST_RANKS = 2**20


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


class Agreement:
    """Comparisons of all ranks over a gloo group."""

    def __init__(self, host: dist.ProcessGroup, labels: Sequence[str]) -> None:
        """Take the group and the units' labels, by their numbers."""
        self._host, self._labels = host, labels

    def start(self, kind: Kind, need: int | None, *, has_zeros: bool = False) -> tuple[torch.Tensor, dist.Work]:
        """Start to tell other ranks what this rank does and needs. Collective."""
        number = kind.number * _MOST_RANKS + dist.get_rank()
        sent = torch.tensor([-1 if need is None else need, number, -number, has_zeros])
        return sent, self._start_most(sent)

    def result(self, sent: torch.Tensor, work: dist.Work, need: int | None) -> tuple[int | None, bool]:
        """Return whose turn it is, and whether a rank has zeros; raise OSDPError if ranks do different things."""
        work.wait()
        turn, most, least, has_zeros = sent.tolist()
        found = [(Kind.of_number(number // _MOST_RANKS), number % _MOST_RANKS) for number in (most, -least)]
        if found[0][0] != found[1][0]:
            parts = " and ".join(f"rank {rank} {kind}" for kind, rank in found)
            at = "" if need is None else f"; rank {dist.get_rank()} is at unit {self._labels[unit_of(need)]!r}"
            raise OSDPError(
                f"Ranks run different parts of a step: {parts}{at}; call the model and backward equally often on every"
                " rank, and read"
                " weights of the model on all of them."
            )
        return None if turn < 0 else turn, bool(has_zeros)

    def most(self, tensor: torch.Tensor) -> None:
        """Replace each element by the largest of all ranks. Collective."""
        self._start_most(tensor).wait()

    def gathered(self, mine: Sequence[int]) -> list[Sequence[int]]:
        """Return every rank's sequence, in rank order. Collective."""
        return all_gather_objects(mine, self._host)

    def _start_most(self, tensor: torch.Tensor) -> dist.Work:
        return dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._host, async_op=True)
