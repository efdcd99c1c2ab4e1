"""Samples of unequal lengths: the micro-batches of a step that takes the mean time.

A plan is made for the longest sample, which decides what fits. Seconds are those of an expected step: samples are
drawn as the dataset has them, and cut as the loop cuts them. Work grows with tokens, padding included, so an expected
micro-batch counts as a number of longest rows; attention, which grows faster, is then counted a little too high.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from statistics import NormalDist
from typing import Any

from ..errors import refuse_first
from .decision import Batch
from .token_budget import TokenBudget

_KEPT, _DRAWN, _RANKS = 100, 1024, 4
"""Lengths that stand for a dataset, least samples that are drawn, and most ranks of which they are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of a dataset's samples, and how micro-batches are made of them.

    Raises:
        ValueError: a length is below 1 or above the longest.
    """

    tokens: tuple[int, ...]
    """Of samples that stand for all, the shortest first."""
    longest: int
    """Tokens of the rows that are planned for."""
    padded_to_longest: bool = False
    """The loader pads every row to the longest, not to that of its batch."""
    padded_together: int | None = None
    """Samples that the loader pads to the longest of them, if each such batch is cut into micro-batches; None if it
    loads micro-batches.
    """
    budget: TokenBudget | None = None
    """How a step's samples are cut by length, for one longest row in a micro-batch; None cuts them as they come."""

    def __post_init__(self) -> None:
        least, most = min(self.tokens, default=0), max(self.tokens, default=0)
        refuse_first({
            f"Lengths of samples are from {least} to {most} tokens; give at least one, each from 1 to the"
            f" {self.longest} of the longest.": not 1 <= least <= most <= self.longest,
        })  # fmt: skip

    @classmethod
    def of(cls, tokens: Iterable[int], longest: int, **options: Any) -> Lengths:
        """Return the lengths of a dataset, of which quantiles are kept; longer ones count as the longest."""
        found = sorted(min(length, longest) for length in tokens)
        if len(found) > _KEPT:
            found = [found[(2 * i + 1) * len(found) // (2 * _KEPT)] for i in range(_KEPT)]
        return cls(tokens=tuple(found), longest=longest, **options)

    @property
    def mean(self) -> float:
        """Tokens of a sample, without padding."""
        return sum(self.tokens) / len(self.tokens)

    def expected(self, batch: Batch, world_size: int) -> Batch:
        """Return the micro-batches of an expected step for a batch of longest rows: how many longest rows take as
        long as one, and how many micro-steps there are; both are fractions.
        """
        return batch if self.budget is None and self.padded_to_longest else _expected(self, batch, world_size)


@functools.lru_cache(maxsize=256)
def _expected(lengths: Lengths, batch: Batch, world_size: int) -> Batch:
    samples, ranks = batch.micro_batch_size * batch.accumulation_steps, min(world_size, _RANKS)
    draws, dice, steps, tokens = -(-_DRAWN // (samples * ranks)), random.Random(0), 0, 0
    for _ in range(draws):
        drawn = [dice.choices(lengths.tokens, k=samples) for _ in range(ranks)]
        if lengths.budget is None:
            padded = [_padded(own, batch.micro_batch_size, lengths.padded_together) for own in drawn]
        else:
            budget = lengths.budget.holding(batch.micro_batch_size * lengths.longest, samples)
            if budget.deals:
                every = sorted(chain(*drawn), reverse=True)
                drawn = [every[rank::ranks] for rank in range(ranks)]
            ordered = [sorted(own, reverse=True) for own in drawn]
            parts = max(len(budget.cut(own)) for own in ordered)
            padded = [budget.padded(own, parts) for own in ordered]
        steps += len(padded[0])
        tokens += sum(map(max, zip_longest(*padded, fillvalue=0)))  # ranks wait for the longest
    expected: dict[str, Any] = {
        "micro_batch_size": tokens / steps / lengths.longest, "accumulation_steps": steps / draws
    }  # fmt: skip
    return replace(batch, **expected)


def _padded(drawn: list[int], size: int, together: int | None) -> list[int]:
    """Return the tokens of micro-batches of so many samples as they are drawn, padding included."""
    found, together = [], together or size
    for start in range(0, len(drawn), together):
        width, rows = max(drawn[start : start + together]), min(together, len(drawn) - start)
        found += [width * min(size, rows - done) for done in range(0, rows, size)]
    return found


def lognormal(mean: int, longest: int) -> list[int]:
    """Return lengths of this mean, log-normal with sigma 0.8, longer ones cut off at the longest; raise ValueError if
    that is shorter than the mean.
    """
    if mean > longest:
        raise ValueError(
            f"A mean length of {mean} tokens is above the {longest} of the longest sample; give at most that."
        )
    shape = [math.exp(0.8 * NormalDist().inv_cdf((i + 0.5) / 100)) for i in range(100)]
    low, high, found = 0.0, 100.0 * longest, list[int]()
    for _ in range(60):
        middle = (low + high) / 2
        found = [max(1, min(longest, round(middle * one))) for one in shape]
        low, high = (middle, high) if sum(found) < 100 * mean else (low, middle)
    return found
