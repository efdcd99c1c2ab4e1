"""Costs as lines over the samples of a micro-batch, and peaks as the highest of several."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """A cost of one micro-batch of b samples: `constant + per_sample * b`."""

    constant: float = 0.0
    per_sample: float = 0.0

    def __call__(self, samples: int) -> float:
        return self.constant + self.per_sample * samples

    def bytes(self, samples: int) -> int:
        """The value as whole bytes, rounded up and never negative."""
        return max(0, self.change(samples))

    def change(self, samples: int) -> int:
        """The value as whole bytes, rounded up: what is freed counts as well."""
        return math.ceil(self(samples) - 1e-6)

    def plus(self, other: Affine) -> Affine:
        """The sum of two lines."""
        return Affine(constant=self.constant + other.constant, per_sample=self.per_sample + other.per_sample)

    def scaled(self, factor: float, *, constants: bool) -> Affine:
        """What grows with samples times the factor, and the constant too where asked."""
        return Affine(constant=self.constant * (factor if constants else 1), per_sample=self.per_sample * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A peak of one micro-batch of b samples: the highest of several moments, each on a line of its own."""

    lines: tuple[Affine, ...] = (Affine(),)
    """The moments that are highest for some b."""
    single: float | None = None
    """The peak at one sample where it lies on none of the lines: expanding a dimension of size 1 copies nothing, so that
    torch takes other paths there."""

    def __post_init__(self) -> None:
        if not self.lines:
            raise ValueError("A peak has no moment; give at least one line.")

    @classmethod
    def line(cls, *, constant: float = 0.0, per_sample: float = 0.0) -> Envelope:
        """A single moment."""
        return cls(lines=(Affine(constant=constant, per_sample=per_sample),))

    @classmethod
    def above(cls, lines: Iterable[Affine], *, single: float | None = None) -> Envelope:
        """The upper envelope of many lines for b >= 1; those that are nowhere the highest are left out."""
        hull: list[Affine] = []
        for line in sorted(lines, key=lambda line: (line.per_sample, line.constant)):
            while hull and (_meet(hull[-1], line) <= 1 or (len(hull) > 1 and _meet(hull[-1], line) <= _meet(hull[-2], hull[-1]))):
                hull.pop()
            hull.append(line)
        return cls(lines=tuple(hull) or (Affine(),), single=single)

    def __call__(self, samples: int) -> float:
        if samples == 1 and self.single is not None:
            return self.single
        return max(line(samples) for line in self.lines)

    def bytes(self, samples: int) -> int:
        """The value as whole bytes, rounded up and never negative."""
        return max(0, math.ceil(self(samples) - 1e-6))

    def plus(self, other: Affine) -> Envelope:
        """Every moment raised by another line."""
        return Envelope(
            lines=tuple(line.plus(other) for line in self.lines), single=None if self.single is None else self.single + other(1)
        )

    def scaled(self, factor: float, *, constants: bool) -> Envelope:
        """What grows with samples times the factor, and constants too where asked; it stands for one sample as well."""
        return Envelope(lines=tuple(line.scaled(factor, constants=constants) for line in self.lines))


def _meet(low: Affine, steep: Affine) -> float:
    """Samples from which the steeper line is the higher one."""
    if steep.per_sample == low.per_sample:
        return -math.inf
    return (low.constant - steep.constant) / (steep.per_sample - low.per_sample)
