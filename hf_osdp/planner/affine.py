"""Costs as linear functions of the samples of a micro-batch, and peaks as the maximum of several such functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """A cost of one micro-batch of b samples: `constant + per_sample * b`."""

    constant: float = 0.0
    per_sample: float = 0.0

    def __call__(self, samples: float) -> float:
        return self.constant + self.per_sample * samples

    def bytes(self, samples: float) -> int:
        """Return the value as whole bytes, rounded up and never negative."""
        return max(0, self.change(samples))

    def change(self, samples: float) -> int:
        """Return the value as whole bytes, rounded up; negative where more is freed than allocated."""
        return math.ceil(self(samples) - 1e-6)

    def plus(self, other: Affine) -> Affine:
        """Return the sum of two functions."""
        return Affine(constant=self.constant + other.constant, per_sample=self.per_sample + other.per_sample)

    def scaled(self, factor: float, *, constants: bool) -> Affine:
        """Return the function with `per_sample` times the factor, and with `constants` the constant too."""
        return Affine(constant=self.constant * (factor if constants else 1), per_sample=self.per_sample * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchMoment:
    """A moment at which a kernel holds memory of its own, which is not linear in the b samples of a micro-batch."""

    live: Affine
    """Live bytes without the kernel's own."""
    least: float
    """The kernel holds memory from this number of samples on."""
    growing: Affine
    """Its bytes, up to the highest of `most`."""
    most: tuple[Affine, ...]

    def bytes(self, samples: float) -> int:
        """Return the live bytes, the kernel's own included, rounded up and never negative."""
        own = min(self.growing(samples), max(most(samples) for most in self.most)) if samples >= self.least else 0.0
        return max(0, math.ceil(self.live(samples) + own - 1e-6))

    def plus(self, other: Affine) -> ScratchMoment:
        """Return the moment with a function added to its live bytes."""
        return replace(self, live=self.live.plus(other))

    def scaled(self, factor: float, *, constants: bool) -> ScratchMoment:
        """Return the moment with every function scaled (`Affine.scaled`)."""
        return replace(
            self,
            live=self.live.scaled(factor, constants=constants),
            growing=self.growing.scaled(factor, constants=constants),
            most=tuple(most.scaled(factor, constants=constants) for most in self.most),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A peak of one micro-batch of b samples: the highest of several moments, most of them linear functions."""

    pieces: tuple[Affine, ...] = (Affine(),)
    """The moments that are highest for some b."""
    single: float | None = None
    """The peak at one sample if the pieces do not give it: torch copies nothing to expand a dimension of size 1."""
    scratch: tuple[ScratchMoment, ...] = ()
    """Moments at which a kernel holds memory of its own."""

    @classmethod
    def above(cls, moments: Iterable[Affine]) -> Envelope:
        """Return the upper envelope of many moments for b >= 1; moments that are never the highest are left out."""
        hull: list[Affine] = []
        for moment in sorted(moments, key=lambda moment: (moment.per_sample, moment.constant)):
            while hull and (
                _meet(hull[-1], moment) <= 1
                or (len(hull) > 1 and _meet(hull[-1], moment) <= _meet(hull[-2], hull[-1]))
            ):
                hull.pop()
            hull.append(moment)
        return cls(pieces=tuple(hull) or (Affine(),))

    @classmethod
    def highest(cls, peaks: Sequence[Envelope]) -> Envelope:
        """Return the highest of several peaks."""
        single = None
        if any(peak.single is not None for peak in peaks):
            alone = ([piece(1) for piece in peak.pieces] if peak.single is None else [peak.single] for peak in peaks)
            single = max(map(max, alone))
        pieces = cls.above(piece for peak in peaks for piece in peak.pieces).pieces
        return cls(pieces=pieces, single=single, scratch=tuple(moment for peak in peaks for moment in peak.scratch))

    def bytes(self, samples: float) -> int:
        """Return the peak as whole bytes, rounded up and never negative."""
        pieces = self.pieces if samples > 1 or self.single is None else (Affine(constant=self.single),)
        moments: tuple[Affine | ScratchMoment, ...] = (*pieces, *self.scratch)
        return max(moment.bytes(samples) for moment in moments)

    def plus(self, other: Affine) -> Envelope:
        """Return the peak with a function added to every moment."""
        return Envelope(
            pieces=tuple(piece.plus(other) for piece in self.pieces),
            single=None if self.single is None else self.single + other(1),
            scratch=tuple(moment.plus(other) for moment in self.scratch),
        )

    def scaled(self, factor: float, *, constants: bool) -> Envelope:
        """Return the peak with every piece scaled (`Affine.scaled`), and without `single`."""
        return Envelope(
            pieces=tuple(piece.scaled(factor, constants=constants) for piece in self.pieces),
            scratch=tuple(moment.scaled(factor, constants=constants) for moment in self.scratch),
        )


def _meet(flat: Affine, steep: Affine) -> float:
    """Return the number of samples from which the steeper function is higher."""
    if steep.per_sample == flat.per_sample:
        return -math.inf
    return (flat.constant - steep.constant) / (steep.per_sample - flat.per_sample)


def linear_fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return α >= 0 and β > 0 that minimise Σ ((α + β n - t) / t)² over pairs of a size n and seconds t > 0."""
    weighted = [(1 / seconds**2, n, seconds) for n, seconds in points]
    total = sum(w for w, _, _ in weighted)
    mean_n = sum(w * n for w, n, _ in weighted) / total
    mean_t = sum(w * t for w, _, t in weighted) / total
    spread = sum(w * (n - mean_n) ** 2 for w, n, _ in weighted)
    slope = sum(w * (n - mean_n) * (t - mean_t) for w, n, t in weighted) / spread if spread else 0.0
    latency_s = mean_t - slope * mean_n
    if slope > 0 and latency_s >= 0:
        return latency_s, slope
    largest, taken_s = max(points)
    return 0.0, taken_s / largest  # noise hides α or β: take all of the largest size's time as β
