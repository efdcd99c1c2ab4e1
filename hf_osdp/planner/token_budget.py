"""Micro-batches by a budget of tokens: samples of unequal lengths, sorted and cut so that few tokens are padding.

A step's samples, and so its gradient, stay the same; only which of them run together changes. With rows of `l` tokens
a micro-batch holds as many samples `n` as the budget B allows, n ≤ B / l. Each term of its memory is a constant, or
grows with n, n·l or n·l² (attention); along n = B / l all of these are convex in l, and so is their highest sum. So
the highest peak of all is that of the longest or of the shortest rows, as long as the same operators run, and two
estimates are enough for the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    def width(self, tokens: int) -> int:
        """Return the tokens to which a row is padded."""
        return min(-(-tokens // _ROUND) * _ROUND, max(tokens, self.longest))

    def cut(self, lengths: Sequence[int], parts: int = 1) -> list[int]:
        """Return how many samples each micro-batch of a step takes, so that the step is fastest.

        Args:
            lengths: tokens of the samples, from long to short. The longest runs alone if it exceeds the budget.
            parts: least number of micro-batches, at most as many as there are samples.
        """
        widths = list(map(self.width, lengths))
        best: list[tuple[int, int]] = [(0, 0)]
        """For the first samples: their cost in tokens, and the size of the last micro-batch."""
        for end in range(1, len(widths) + 1):
            options = list[tuple[int, int]]()
            for start in range(end - 1, -1, -1):
                size = end - start
                counted = max(widths[start], self.shortest)
                if options and (size * counted > self.tokens or widths[start] > self.longest):
                    break
                options.append((best[start][0] + size * widths[start] + self.overhead, size))
            best.append(min(options))
        sizes, end = list[int](), len(widths)
        while end:
            sizes.insert(0, best[end][1])
            end -= sizes[0]
        while len(sizes) < parts:
            starts = [sum(sizes[:part]) for part in range(len(sizes))]
            _, part = max(
                (size * widths[start], p)
                for p, (size, start) in enumerate(zip(sizes, starts, strict=True))
                if size > 1
            )
            sizes[part : part + 1] = [sizes[part] - sizes[part] // 2, sizes[part] // 2]
        return sizes
