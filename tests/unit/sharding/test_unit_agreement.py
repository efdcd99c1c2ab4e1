"""Sequences of collectives that ranks learn to expect."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hf_osdp.sharding.unit_agreement import Expected, merged

SEQUENCES = st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=3)


def _contains(sequence: list[int], part: list[int]) -> bool:
    rest = iter(sequence)
    return all(element in rest for element in part)


@given(SEQUENCES)
def test_merged_contains_every_sequence_in_its_order(sequences):
    assert all(_contains(merged(sequences), sequence) for sequence in sequences)


def test_expected_keeps_what_a_rank_needed():
    expected = Expected([3, 6, 3, 9])
    assert expected.find(3, 1) == 2 and expected.find(3, 3) is None
    assert [expected.is_due() for _ in range(32)] == [False] * 31 + [True]
    expected.keep([1, 0, 1, 0])
    assert expected.sequence == [3, 3] and expected.seen == [False, False]
