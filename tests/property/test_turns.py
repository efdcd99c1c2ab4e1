"""The order of collectives against a model of it: ranks, as threads, that need different ones in a phase."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_osdp.errors import OSDPError
from hf_osdp.sharding import turns as tested
from hf_osdp.sharding.turns import _KEPT, LAST, Turns, merged

Sequence = list[int]
SEQUENCES = st.lists(st.integers(1, 5), max_size=6)
PHASES = st.integers(2, 3).flatmap(
    lambda ranks: st.lists(st.lists(SEQUENCES, min_size=ranks, max_size=ranks), min_size=1, max_size=4)
)


class Ranks:
    """What `turns.py` calls of torch.distributed, among threads."""

    ReduceOp = SimpleNamespace(MAX="max")

    def __init__(self, count: int) -> None:
        self.place, self.barrier, self.sent = local(), Barrier(count, timeout=10), [torch.empty(0)] * count
        self.collectives = 0

    def get_rank(self) -> int:
        return self.place.rank

    def all_gather_objects(self, mine: Any, host: object) -> list[Any]:
        self.sent[self.place.rank] = mine
        self.barrier.wait()
        found = list(self.sent)
        self.barrier.wait()
        return found

    def all_reduce(self, tensor: torch.Tensor, *, op: object, group: object, async_op: bool = False) -> Any:
        self.collectives += self.place.rank == 0
        tensor.copy_(torch.stack(self.all_gather_objects(tensor.clone(), group)).amax(0))
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)


def on_threads(count: int, act: Callable[[Turns, Sequence], Any]) -> tuple[list[Any], Ranks]:
    """Call on each rank with its machine, and the list of all collectives that it issues."""
    ranks = Ranks(count)

    def run(rank: int) -> Any:
        ranks.place.rank, issued = rank, []
        return act(Turns(issued.append, str, ranks), issued)

    with patch.multiple(tested, dist=ranks, all_gather_objects=ranks.all_gather_objects), ThreadPoolExecutor() as pool:
        return list(pool.map(run, range(count))), ranks


def issued_by_model(expected: Sequence, needs: list[Sequence]) -> tuple[Sequence, Sequence]:
    """Return all that is expected, in order, and then of what ranks still need the largest number first; and the order
    of the next phase.
    """
    left = []
    for need in needs:
        position, rest = 0, list(need)
        while rest and rest[0] in expected[position:]:
            position = expected.index(rest.pop(0), position) + 1
        left.append(rest)
    agreed = []
    while wanted := [rest[0] for rest in left if rest]:
        agreed.append(max(wanted))
        left = [rest[1:] if rest[:1] == agreed[-1:] else rest for rest in left]
    return expected + agreed, merged([*needs, expected]) if agreed else expected


@settings(deadline=None, max_examples=150)
@given(PHASES)
def test_all_ranks_issue_what_the_model_does(phases):
    def act(turns: Turns, issued: Sequence) -> list[Sequence]:
        found = []
        for needs in phases:
            turns.begin_backward(is_last=False)
            for collective in needs[tested.dist.get_rank()]:
                turns.need(collective)
                issued.append(collective)
            turns.end()
            found.append(list(issued))
            issued.clear()
        return found

    found, _ = on_threads(len(phases[0]), act)
    expected: Sequence = []
    for number, needs in enumerate(phases):
        wanted, expected = issued_by_model(expected, needs)
        assert all(one[number] == wanted for one in found)
        assert all(_contains(wanted, need) for need in needs)


def test_an_expected_order_needs_one_agreement_and_ends_without_use():
    def act(turns: Turns, issued: Sequence) -> list[int]:
        counts = []
        for number in range(_KEPT + 2):
            before = tested.dist.collectives
            turns.begin_backward(is_last=True)
            for collective in (3, 1, 2) if number else (4, 3, 1, 2):
                turns.need(collective)
            turns.end()
            counts.append(tested.dist.collectives - before)
        return counts if not tested.dist.get_rank() else issued

    (counts, lent), _ = on_threads(2, act)
    assert counts[0] == 6 and set(counts[1:]) == {2}, "one at the beginning, one at the end"
    assert lent == [4] * (_KEPT - 1)


@pytest.mark.parametrize("reads", [False, True])
def test_ranks_in_different_parts_are_refused(reads):
    def act(turns: Turns, issued: Sequence) -> str:
        with pytest.raises(OSDPError) as raised:
            if tested.dist.get_rank() and reads:
                turns.need(7)
            else:
                turns.begin_call(trains=not tested.dist.get_rank())
                turns.end()
        return str(raised.value)

    for line in on_threads(2, act)[0]:
        other = "a read of a weight outside of the model's call" if reads else "the first call of the model without"
        assert "rank 0 the first call of the model" in line and f"rank 1 {other}" in line


def test_what_comes_last_is_agreed_on_and_not_expected():
    def act(turns: Turns, issued: Sequence) -> Sequence:
        for _ in range(2):
            turns.begin_backward(is_last=True)
            if tested.dist.get_rank():
                turns.agree(LAST)
                issued.append(LAST)
            else:
                turns.need(5)
            turns.end()
        return issued

    assert on_threads(2, act)[0] == [[LAST, LAST], [5, LAST, 5, LAST]]


@given(st.lists(SEQUENCES, min_size=1, max_size=3))
def test_merged_contains_every_sequence_in_its_order(sequences):
    assert all(_contains(merged(sequences), sequence) for sequence in sequences)


def _contains(sequence: Sequence, part: Sequence) -> bool:
    rest = iter(sequence)
    return all(element in rest for element in part)
