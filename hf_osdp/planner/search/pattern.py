"""Which peaks occur in a row of equal units: what a search branches on.

A linear relaxation spreads the units of a long row over several options, each of which it takes so little that its peak hardly counts.
So options that follow one another in backward and have about the same peaks make a class, and a pattern says of some classes how many
units take one of their options: none, one, at least one, at least two. The peaks of a class that is taken then hold without condition.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from .options import Option, UnitGroup

if TYPE_CHECKING:
    from .integer_model import Count, Relaxation

_ALIKE = 0.02
"""Part by which peaks of one class may differ. Fewer classes make fewer nodes; what they leave out, CP-SAT finds when it checks a plan."""
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
    def undecided(cls, group: UnitGroup) -> Pattern:
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

    def split(self, group: UnitGroup, number: int, most: int) -> tuple[Pattern, Pattern]:
        """Return the pattern in which at most so many units take a class, and that in which more do."""
        low, high = self.counts.get(number, (0, len(group.units)))
        fewer, more = ({**self.counts, number: bounds} for bounds in ((low, most), (most + 1, high)))
        return replace(self, counts=fewer), replace(self, counts=more)


def sumprod(counts: Sequence[float], numbers: Sequence[int]) -> float:
    """Return Σ count · number."""
    return sum(map(operator.mul, counts, numbers), 0.0)


def peak(option: Option, tail: int, ahead: int) -> int:
    """Return the highest moment of a unit in backward, with a reduction in flight and what is gathered ahead."""
    return max(option.gather_peak + tail, computing(option, tail) + ahead)


def computing(option: Option, tail: int) -> int:
    """Return the highest moment once parameters are there; what is gathered ahead comes on top."""
    return max(option.compute_peak + tail, option.reduce_peak)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassMoments:
    """Moments of the units of one class: before the backward of its first unit, and after that of its last."""

    number: int
    options: Sequence[Option]
    counts: Sequence[Count]
    before: Count | int
    """Level before the first unit's backward."""
    after: Count | int
    """Level after the last unit's."""
    tail: int
    """Least reduction in flight."""
    least: int
    most: int

    @property
    def ahead(self) -> int:
        """What is gathered ahead of its units, at least."""
        return min(option.bytes.prefetched for option in self.options)

    @property
    def peak_of_several(self) -> int:
        """What its first unit takes at least where there is a second one, which is gathered ahead."""
        return min(peak(option, self.tail, self.ahead) for option in self.options)

    @property
    def first_peaks(self) -> list[int]:
        """What the first unit takes at least, by its option."""
        return [peak(option, self.tail, 0) for option in self.options]

    @property
    def last_peaks(self) -> list[int]:
        """What the last unit takes at least above the level after it, by its option; what is gathered ahead comes on top."""
        return [computing(option, self.tail) - option.change for option in self.options]


class MissedMoment(NamedTuple):
    """A moment that a relaxation leaves out, as it may be that no unit takes the class."""

    nbytes: float
    number: int
    """Class to branch on: at most so many units take it, or more."""
    at_most: int


def missed(row: Sequence[ClassMoments], relaxed: Relaxation, limit_bytes: int) -> MissedMoment | None:
    """Return the worst moment of a row that a relaxation leaves out; None where none passes the limit."""
    return max((one for one in _left_out(row, relaxed) if one.nbytes > (1 + _MISSED) * limit_bytes), default=None)


def _left_out(row: Sequence[ClassMoments], relaxed: Relaxation) -> Iterator[MissedMoment]:
    """Yield of each class in the solution its first unit where a second follows, its first, and its last beside a gather for the next."""
    taken = [(one, counts) for one in row if sum(counts := [relaxed.value(x) for x in one.counts]) > _MISSED]
    for (one, counts), (following, _) in zip(taken, [*taken[1:], (None, ())], strict=True):
        before, several = relaxed.value(one.before), sum(counts) > 1 + _MISSED
        # which option a single unit takes is known
        first, last = (min(peaks) if several else sumprod(counts, peaks) for peaks in (one.first_peaks, one.last_peaks))
        undecided = (one.number, 0) if one.least < 1 else (one.number, 1) if not several and one.most > 1 else None
        if several and one.least < 2:
            yield MissedMoment(before + one.peak_of_several, one.number, 1)
        if undecided is not None:
            yield MissedMoment(before + first, *undecided)
        if following is not None:
            between = [m for m in row if one.number < m.number < following.number and m.most and m.ahead < following.ahead]
            undecided = undecided or next(((m.number, 0) for m in (following, *between) if m.least < 1), None)
            if undecided is not None:
                yield MissedMoment(relaxed.value(one.after) + last + following.ahead, *undecided)
