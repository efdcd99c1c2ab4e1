"""Whose collective comes next: one order on all ranks, also where ranks run different modules in a step.

A gather or reduction pairs with whatever the other ranks issue next in the same process group. If one rank leaves a
unit out (no picture in its batch, LayerDrop, another task's block), FSDP2 pairs different units, in silence if they
have one size. Here all ranks issue the same collectives in the same order: a rank takes part in those of units that it
leaves out.

A *phase* is one call of the model, or one backward. Ranks expect the order in which the last phases of its part needed
their collectives. A rank that needs one takes part in those expected before it. At the end of a phase it takes part in
the rest, and waits on the host, over gloo, until no rank needs a further one; one that was not expected is issued
then, by all ranks, and expected next time. docs/design.md has the states and transitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import reduce

import torch
import torch.distributed as dist

from ..distributed.process_group import all_gather_objects, be_at
from ..errors import OSDPError

NOTHING, LAST = -1, 0
"""No collective; one that comes after all others and is never expected. Others are larger numbers."""
_KEPT = 256
"""Phases after which collectives that no rank needed in the last one are expected no longer."""
_NUMBERS = ("the first", "the second", "a later")
_BETWEEN, _CALL, _BACKWARD = 0, 1, 7
_PARTS = (
    "a read of a weight outside of the model's call",
    *(f"{number} call of the model since backward" for number in _NUMBERS),
    *(f"{number} call of the model without gradients since backward" for number in _NUMBERS),
    *["backward of a micro-step that is not the last"] * 3,
    *["backward"] * 3,
)
"""Parts of a step, which ranks must run alike; collectives of backward differ by the number of calls before it."""
_MOST_RANKS = 2**20


class Turns:
    """What this rank and the others expect and need of one another; the same on all ranks, except what it needs."""

    def __init__(
        self, take_part: Callable[[int], None], label: Callable[[int], str], host: dist.ProcessGroup | None
    ) -> None:
        """Call `take_part` for a collective that other ranks need, and this rank does not, or not yet.

        Ranks agree over `host`, a gloo group of all of them; None if there is no other. Errors name the `label` of a
        collective's unit.
        """
        self._take_part, self._label, self._host = take_part, label, host
        self._expected: dict[int, list[int]] = {}
        self._phases = Counter[int]()
        self._calls = 0
        """Calls of the model since the last backward, at most two."""
        self.rest()

    def rest(self) -> None:
        """Leave a phase without its end, because a call of the model has raised."""
        self._part = _BETWEEN
        self._sequence: list[int] = []
        self._position = 0
        """How many of the expected collectives have been issued."""
        self._needed: list[int] = []
        """Collectives that this rank needed, in order."""
        self._is_longer = False
        """Ranks needed collectives that were not expected."""
        self._told: tuple[torch.Tensor, dist.Work] | None = None
        """The comparison of parts, in progress; None once it has ended well."""

    @property
    def in_call(self) -> bool:
        return _CALL <= self._part < _BACKWARD

    @property
    def in_backward(self) -> bool:
        return self._part >= _BACKWARD

    def begin_call(self, *, trains: bool) -> None:
        """Begin a phase, also after a backward that raised and so has not ended its own."""
        self._begin(_CALL + self._calls + (0 if trains else 3))
        self._calls = min(self._calls + 1, 2)

    def begin_backward(self, *, is_last: bool) -> None:
        self._begin(_BACKWARD + self._calls + (3 if is_last else 0))

    def _begin(self, part: int) -> None:
        self.rest()
        self._part, self._sequence = part, self._expected.get(part, [])
        be_at(f"{_PARTS[part]}, number {self._phases[part] + 1}")
        self._told = None if self._host is None else self._tell(NOTHING, self._host)

    def need(self, collective: int) -> None:
        """Return when it is this rank's turn to issue a collective."""
        self._needed.append(collective)
        self._compare(waits=False)
        if collective in self._sequence[self._position :]:
            self._take_part_until(self._sequence.index(collective, self._position))
            self._position += 1
        else:
            self.agree(collective)

    def need_next_time(self, collective: int) -> None:
        """Expect a collective in later phases; this one issues it with the rest."""
        self._needed.append(collective)

    def may_wait_for(self, collective: int) -> bool:
        """Return whether a collective is expected in this phase, or nothing is as yet."""
        return not self._sequence or collective in self._sequence[self._position :]

    def is_next(self, collective: int) -> bool:
        """Return whether no other collective is expected before this one."""
        return self._sequence[self._position : self._position + 1] in ([], [collective])

    def take_part_in_rest(self) -> None:
        """Take part in what is expected and has not been issued in this phase."""
        self._take_part_until(len(self._sequence))

    def agree(self, collective: int) -> None:
        """Take part in the rest and what other ranks need until it is this rank's turn; with NOTHING, until no rank
        needs anything. Collective.
        """
        self.take_part_in_rest()
        self._compare(waits=True)
        while self._host is not None:
            turn = self._hear(*self._tell(collective, self._host), collective)
            self._is_longer |= turn > LAST
            if turn == collective:
                return
            self._take_part(turn)

    def end(self) -> None:
        """Take part in all that other ranks need in this phase, and learn what to expect in the next. Collective."""
        self.agree(NOTHING)
        self._phases[self._part] += 1
        if self._host is not None and (self._is_longer or self._phases[self._part] % _KEPT == 0):
            needed = all_gather_objects(self._needed, self._host)
            self._expected[self._part] = merged([*needed, self._sequence] if self._is_longer else needed)
        self._calls = 0 if self.in_backward else self._calls
        self.rest()

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return the largest value of all ranks at each place. Collective."""
        if self._host is None:
            return list(values)
        found = torch.tensor(values)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._host)
        return found.tolist()

    def _take_part_until(self, place: int) -> None:
        while self._position < place:
            self._position += 1
            self._take_part(self._sequence[self._position - 1])

    def _compare(self, *, waits: bool) -> None:
        """Check that ranks have begun the same part, if this is known by now."""
        if self._told is not None and (waits or self._told[1].is_completed()):
            told, self._told = self._told, None
            self._hear(*told, self._needed[-1] if self._needed else NOTHING)

    def _tell(self, collective: int, host: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
        """Start to tell the other ranks what this one runs and needs. Collective."""
        place = self._part * _MOST_RANKS + dist.get_rank()
        sent = torch.tensor([collective, place, -place])
        return sent, dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=host, async_op=True)

    def _hear(self, sent: torch.Tensor, work: dist.Work, collective: int) -> int:
        """Return the collective whose turn it is; raise OSDPError if ranks run different parts of a step."""
        work.wait()
        turn, *places = sent.tolist()
        found = [(_PARTS[abs(place) // _MOST_RANKS], abs(place) % _MOST_RANKS) for place in places]
        if abs(places[0]) // _MOST_RANKS != abs(places[1]) // _MOST_RANKS:
            parts = " and ".join(f"rank {rank} {part}" for part, rank in found)
            at = f"; rank {dist.get_rank()} is at unit {self._label(collective)!r}" if collective > LAST else ""
            raise OSDPError(
                f"Ranks run different parts of a step: {parts}{at}; call the model and backward equally often on"
                " every rank, and read weights of the model on all of them."
            )
        return turn


def merged(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Return one sequence that contains each of these in its order."""
    return reduce(_merged_two, map(list, sequences))


def _merged_two(first: list[int], second: list[int]) -> list[int]:
    """Return what both have, once, and where they differ the first's part before the second's."""
    both: list[int] = []
    for tag, i, end_i, j, end_j in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        both += first[i:end_i] if tag == "equal" else first[i:end_i] + second[j:end_j]
    return both
