"""Micro-batches by a budget of tokens: samples of unequal lengths, sorted and cut so that few tokens are padding.

A step's samples, and so its gradient, stay the same; only which of them run together changes. With rows of `l` tokens
a micro-batch holds as many samples `n` as the budget B allows, n ≤ B / l. Each term of its memory is a constant, or
grows with n, n·l or n·l² (attention); along n = B / l all of these are convex in l, and so is their highest sum. So
the highest peak of all is that of the longest or of the shortest rows, as long as the same operators run, and two
estimates are enough for the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

_ROUND = 8
"""Rows are padded to a multiple of this, which matrix units prefer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """What a micro-batch may hold under a plan."""

    tokens: int
    """Most tokens of a micro-batch, padding included."""
    shortest: int
    """Rows count with at least this many tokens, so that samples do not become too many."""
    longest: int
    """Longer rows than this were not planned for, and run alone."""
    overhead: int
    """Tokens that take as long as what each micro-batch costs beside them: gathers, launches, a loop's own work."""
    least: int = 0
    """Fewer tokens in a micro-batch take no less time, since something else is slower: the CPU, or gathers."""

    deals: bool = False
    """The samples of all ranks are dealt among them, from long to short."""

    def holding(self, tokens: int, samples: int) -> TokenBudget:
        """Return the budget of so many tokens for a rank's step of so many samples."""
        return replace(self, tokens=tokens, shortest=min(self.longest, max(_ROUND, tokens // samples)))

    def width(self, tokens: int) -> int:
        """Return the tokens to which a row is padded."""
        return min(-(-tokens // _ROUND) * _ROUND, max(tokens, self.longest))

    def cut(self, lengths: Sequence[int], parts: int = 1) -> list[int]:
        """Return how many samples each micro-batch of a step takes, so that the step is fastest.

        Args:
            lengths: tokens of the samples, from long to short. The longest runs alone if it exceeds the budget.
            parts: least number of micro-batches, at most as many as there are samples.
        """
        cut, widths = list(_least_cost(self, tuple(lengths))), list(map(self.width, lengths))
        while len(cut) < parts:
            starts = [sum(cut[:part]) for part in range(len(cut))]
            _, part = max(
                (size * widths[start], p) for p, (size, start) in enumerate(zip(cut, starts, strict=True)) if size > 1
            )
            cut[part : part + 1] = [cut[part] - cut[part] // 2, cut[part] // 2]
        return cut

    def padded(self, lengths: Sequence[int], parts: int = 1) -> list[int]:
        """Return the tokens of each micro-batch, padding included; arguments as for `cut`."""
        sizes = self.cut(lengths, parts)
        starts = accumulate(sizes, initial=0)
        return [size * self.width(lengths[start]) for size, start in zip(sizes, starts, strict=False)]


@lru_cache(maxsize=64)
def _least_cost(budget: TokenBudget, lengths: tuple[int, ...]) -> tuple[int, ...]:
    import numpy as np  # plans of equal lengths do without

    widths = np.array(list(map(budget.width, lengths)))
    counted = np.maximum(widths, budget.shortest)
    costs, last = np.zeros(len(widths) + 1), [0]
    """For the first samples: their cost in tokens, and the size of the last micro-batch."""
    for end in range(1, len(widths) + 1):
        sizes = np.arange(end, 0, -1)
        fits = (sizes * counted[:end] <= budget.tokens) & (widths[:end] <= budget.longest)
        fits[-1] = True
        cost = np.maximum(sizes * widths[:end], budget.least) + budget.overhead
        found = np.where(fits, costs[:end] + cost, np.inf)
        last.append(1 + int(found[::-1].argmin()))
        costs[end] = found[-last[-1]]
    cut, end = list[int](), len(widths)
    while end:
        cut.insert(0, last[end])
        end -= cut[0]
    return tuple(cut)
