"""Which peaks occur in a row of equal units: what a search branches on.

A linear relaxation spreads the units of a long row over several options, each of which it takes so little that its peak hardly counts.
So options that follow one another in backward and have about the same peaks make a class, and a pattern says of some classes how many
units take one of their options: none, one, at least one, at least two. The peaks of a class that is taken then hold without condition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .options import Option, UnitGroup

if TYPE_CHECKING:
    from .integer_model import Bytes, Count, Relaxation

_ALIKE = 0.02
"""Part by which peaks of one class may differ."""
_MISSED = 1e-6
"""Part of the limit, and of a unit, that rounding may account for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """How many units of one row take options of each class."""

    classes: Mapping[Option, int]
    """Number of each option's class, rising in the order of backward."""
    counts: Mapping[int, tuple[int, int]]
    """Least and most of a class; a class that is not named is open."""

    @classmethod
    def open(cls, group: UnitGroup) -> Pattern:
        """Return the pattern of a row of which nothing is decided."""
        classes: dict[Option, int] = {}
        number, first = -1, None
        tail = min(option.bytes.reduce_tail for option in group.options)
        for option in group.options:
            peaks = [peak(option, tail, ahead) for ahead in (0, option.bytes.prefetched)]
            if first is None or any(abs(a - b) > _ALIKE * b for a, b in zip(peaks, first, strict=True)):
                number, first = number + 1, peaks
            classes[option] = number
        return cls(classes=classes, counts={})

    def least(self, number: int) -> int:
        """Return how many units take a class at least."""
        return self.counts.get(number, (0, 0))[0]

    def split(self, group: UnitGroup, number: int, most: int) -> tuple[Pattern, Pattern]:
        """Return the pattern in which at most so many units take a class, and that in which more do."""
        low, high = self.counts.get(number, (0, len(group.units)))
        return tuple(replace(self, counts={**self.counts, number: bounds}) for bounds in ((low, most), (most + 1, high)))  # type: ignore[return-value]


def peak(option: Option, tail: int, ahead: int) -> int:
    """Return the highest moment of a unit in backward, with a reduction in flight and what is gathered ahead."""
    return max(option.gather_peak + tail, computing(option, tail) + ahead)


def computing(option: Option, tail: int) -> int:
    """Return the highest moment once parameters are there; what is gathered ahead comes on top."""
    return max(option.compute_peak + tail, option.reduce_peak)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassMoments:
    """Moments of the units of one class, each at its lowest."""

    group: UnitGroup
    number: int
    counts: Sequence[Count]
    before: Bytes
    """Level before its first unit's backward."""
    after: Bytes
    """Level after its last unit's."""
    first_peak: int
    """Of its first unit, above `before`."""
    twice_peak: int
    """The same where there is a second unit, which is gathered ahead."""
    last_peak: int
    """Of its last unit, above `after`; what is gathered ahead comes on top."""
    ahead: int
    """What is gathered ahead of its units."""
    open: bool
    """Its options may be taken or not."""


def missed(row: Sequence[ClassMoments], pattern: Pattern, relaxed: Relaxation, limit_bytes: int) -> tuple[float, int, int] | None:
    """Return the worst moment of a row that a relaxation's solution leaves out: bytes above the limit, and the class and count to branch on.

    None where no moment of a class passes the limit.
    """
    taken = [moments for moments in row if sum(map(relaxed.value, moments.counts)) > _MISSED]
    found = [(excess, number, most) for excess, number, most in _excesses(row, taken, pattern, relaxed) if excess > (1 + _MISSED) * limit_bytes]
    return max(found, default=None)


def _excesses(
    row: Sequence[ClassMoments], taken: Sequence[ClassMoments], pattern: Pattern, relaxed: Relaxation
) -> Iterator[tuple[float, int, int]]:
    for moments in taken:
        number, before = moments.number, relaxed.value(moments.before)
        least = pattern.least(number)
        if least < 2 and sum(map(relaxed.value, moments.counts)) > 1 + _MISSED:
            yield before + moments.twice_peak, number, 1
        if least < 1:
            yield before + moments.first_peak, number, 0
    for moments, following in zip(taken, taken[1:], strict=False):
        between = [m for m in row if moments.number < m.number < following.number and m.open and m.ahead < following.ahead]
        undecided = [m.number for m in (moments, following, *between) if pattern.least(m.number) < 1]
        if undecided:
            yield relaxed.value(moments.after) + moments.last_peak + following.ahead, undecided[0], 0
