"""Branching: which options the units of a row take, by classes of options with similar peaks.

A linear relaxation can assign a fraction of a unit to each of many options, and counts only this fraction of an
option's peak. Therefore the search branches. Options that are neighbours in the order of backward and have similar
peaks form a class. A pattern bounds how many units take a class: none, one, at least one, at least two. If at least
one unit takes a class, its peaks become plain constraints.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from .options import Option, UnitGroup

if TYPE_CHECKING:
    from .integer_model import Count

_ALIKE = 0.02
"""Relative difference allowed between peaks of one class.

Wider classes need fewer nodes; each plan is checked with exact peaks.
"""
_MISSED = 1e-6
"""Rounding error allowed, relative to the limit or to one unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Bounds on how many units of one row take each class of options."""

    classes: Mapping[Option, int]
    """Class number of each option; numbers rise in the order of backward."""
    counts: Mapping[int, tuple[int, int]]
    """Lower and upper bound by class number; a class without an entry is unbounded."""

    @classmethod
    def undecided(cls, group: UnitGroup) -> Pattern:
        """Return the classes of a row, without bounds."""
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
        """Return two patterns: at most `most` units take the class `number`, or more than `most` do."""
        low, high = self.counts.get(number, (0, len(group.units)))
        fewer, more = ({**self.counts, number: bounds} for bounds in ((low, most), (most + 1, high)))
        return replace(self, counts=fewer), replace(self, counts=more)


def peak(option: Option, tail: int, ahead: int) -> int:
    """Return a unit's highest moment in backward, with a reduce buffer of `tail` bytes in flight and `ahead` bytes
    prefetched.
    """
    return max(option.call.gather + tail, computing(option, tail) + ahead)


def computing(option: Option, tail: int) -> int:
    """Return a unit's highest moment in backward after its parameters are gathered, without the prefetched gather."""
    return max(option.compute_peak + tail, option.reduce_peak)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassMoments:
    """Levels and peaks of the units of one class in backward."""

    number: int
    options: Sequence[Option]
    counts: Sequence[Count]
    before: Count | int
    """Level before the first unit's backward."""
    after: Count | int
    """Level after the last unit's."""
    tail: int
    """Least bytes of a reduce buffer in flight."""
    least: int
    """Lower bound of the class in the pattern."""
    most: int
    """Upper bound."""

    @property
    def ahead(self) -> int:
        """Least bytes prefetched for a unit of the class."""
        return min(option.bytes.prefetched for option in self.options)

    def beside(self, ahead: int) -> int:
        """Return the least bytes of another unit's prefetched gather beside the class: replicas prefetch none."""
        return ahead if all(option.bytes.managed for option in self.options) else 0

    @property
    def peak_of_several(self) -> int:
        """Least peak of the first unit if a second one follows, whose parameters are prefetched."""
        return min(peak(option, self.tail, self.ahead) for option in self.options)

    @property
    def first_peaks(self) -> list[int]:
        """Least peak of the first unit for each option."""
        return [peak(option, self.tail, 0) for option in self.options]

    @property
    def last_peaks(self) -> list[int]:
        """Least peak of the last unit above the level after it, for each option, without the prefetched gather."""
        return [computing(option, self.tail) - option.change for option in self.options]


class MissedMoment(NamedTuple):
    """A moment that the relaxation does not constrain, because the pattern allows that no unit takes the class."""

    nbytes: float
    number: int
    """Class to branch on."""
    at_most: int
    """Bound to split at: at most this number of units take the class, or more do."""


def missed(
    row: Sequence[ClassMoments], value: Callable[[Count | int], float], limit_bytes: int
) -> MissedMoment | None:
    """Return the highest unconstrained moment of a row above the limit, or None."""
    return max((one for one in _left_out(row, value) if one.nbytes > (1 + _MISSED) * limit_bytes), default=None)


def _left_out(row: Sequence[ClassMoments], value: Callable[[Count | int], float]) -> Iterator[MissedMoment]:
    """Yield each class's unconstrained moments: first unit beside a second one, first unit, last unit beside the
    next class's gather.
    """
    taken = [(one, counts) for one in row if sum(counts := [value(x) for x in one.counts]) > _MISSED]
    for (one, counts), (following, _) in zip(taken, [*taken[1:], (None, ())], strict=True):
        before, several = value(one.before), sum(counts) > 1 + _MISSED
        # of a single unit, the relaxation says which option it takes
        first, last = (
            min(peaks) if several else sum(map(operator.mul, counts, peaks))
            for peaks in (one.first_peaks, one.last_peaks)
        )
        undecided = (one.number, 0) if one.least < 1 else (one.number, 1) if not several and one.most > 1 else None
        if several and one.least < 2:
            yield MissedMoment(before + one.peak_of_several, one.number, 1)
        if undecided is not None:
            yield MissedMoment(before + first, *undecided)
        if following is not None:
            between = [
                m for m in row if one.number < m.number < following.number and m.most and m.ahead < following.ahead
            ]
            undecided = undecided or next(((m.number, 0) for m in (following, *between) if m.least < 1), None)
            if undecided is not None:
                yield MissedMoment(value(one.after) + last + one.beside(following.ahead), *undecided)
