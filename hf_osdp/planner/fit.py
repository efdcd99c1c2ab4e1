"""Lines through measured times."""

from __future__ import annotations

from collections.abc import Sequence


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares of relative errors: α >= 0 and β > 0 that minimise Σ ((α + β n - t) / t)².

    Args:
        points: sizes n and seconds t > 0, at least one pair.

    Returns:
        α in seconds and β in seconds a unit of size.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_n = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    slope = sum(w * (n - mean_n) * (t - mean_t) for w, (n, t) in zip(weights, points, strict=True)) / spread if spread else 0.0
    latency_s = mean_t - slope * mean_n
    if slope > 0 and latency_s >= 0:
        return latency_s, slope
    largest, taken_s = max(points)
    return 0.0, taken_s / largest  # noise hides one of the two: all of the largest size's time is its rate
