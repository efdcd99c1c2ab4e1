"""Samples of unequal lengths are cut at the least cost, within the budget."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hf_osdp.planner.token_budget import TokenBudget

budgets = st.builds(
    TokenBudget,
    tokens=st.integers(16, 200),
    shortest=st.integers(1, 24),
    longest=st.integers(24, 80),
    overhead=st.integers(0, 100),
)


def cost(budget: TokenBudget, lengths: list[int], sizes: list[int]) -> int | None:
    """Return the tokens that a cut costs; None if a micro-batch of several samples exceeds the budget."""
    total = start = 0
    for size in sizes:
        width = budget.width(lengths[start])
        if size > 1 and (size * max(width, budget.shortest) > budget.tokens or width > budget.longest):
            return None
        total, start = total + size * width + budget.overhead, start + size
    return total


def compositions(count: int) -> list[list[int]]:
    cuts = range(1, count)
    every = ([0, *(cut for cut in cuts if chosen >> cut & 1), count] for chosen in range(0, 2**count, 2))
    return [[b - a for a, b in pairwise(ends)] for ends in every]


@given(budgets, st.lists(st.integers(1, 64), min_size=1, max_size=8))
def test_no_cut_costs_less(budget, lengths):
    lengths.sort(reverse=True)
    costs = [cost(budget, lengths, sizes) for sizes in compositions(len(lengths))]
    assert cost(budget, lengths, budget.cut(lengths)) == min(found for found in costs if found is not None)


@given(budgets, st.lists(st.integers(1, 64), min_size=1, max_size=40), st.data())
def test_every_rank_can_have_as_many_micro_batches(budget, lengths, data):
    lengths.sort(reverse=True)
    own = budget.cut(lengths)
    parts = data.draw(st.integers(len(own), len(lengths)))
    sizes = budget.cut(lengths, parts)
    assert len(sizes) == parts and sum(sizes) == len(lengths) and min(sizes) >= 1
    assert cost(budget, lengths, sizes) is not None
