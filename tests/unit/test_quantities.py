"""Bytes, seconds and counts as text, both ways."""

from __future__ import annotations

import pytest

from hf_osdp.quantities import format_bytes, format_count, format_seconds, parse_bytes, parse_share


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8GiB", 8 * 2**30), ("16 GB", 16 * 10**9), ("500MB", 500 * 10**6), ("1.5kib", 1536), ("12", 12), ("12b", 12),
     (" 2 TiB ", 2**41), ("1e9", 10**9), ("1e-3 GB", 10**6), (4096, 4096), (1e6, 10**6), (2**48, 2**48),
     ("256TiB", 2**48)],
)  # fmt: skip
def test_parse_bytes_reads_numbers_with_and_without_units(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("value", [2**48 + 1, "257TiB", 2**60 - 1, float("inf")])
def test_more_memory_than_the_search_can_hold_is_refused(value):
    with pytest.raises(ValueError, match=r"^limit=.* must be between 1 byte and 256 TiB; write it as"):
        parse_bytes(value, name="limit")


@pytest.mark.parametrize(("write", "value", "text"), [
    *((format_bytes, *pair) for pair in (
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**40, "1.00 TiB"), (-2048, "-2.0 KiB"), (5 * 2**50, "5120.00 TiB"))),
    *((format_seconds, *pair) for pair in (
        (0, "0 s"), (123.4, "123 s"), (1.5, "1.50 s"), (0.0123, "12.3 ms"), (12e-6, "12.0 us"),
        (-0.5, "-500.0 ms"))),
    *((format_count, *pair) for pair in (
        (124439808, "124.4M"), (175e9, "175.0B"), (1.0e12, "1.0T"), (2500, "2.5K"), (999, "999"), (0, "0"))),
])  # fmt: skip
def test_quantities_are_written_in_units_that_suit(write, value, text):
    assert write(value) == text


@pytest.mark.parametrize(
    ("value", "nbytes"), [(0.25, 256), ("0.25", 256), ("1KiB", 1024), (2048, 2048), ("0.5 GiB", 2**29)]
)
def test_shares_are_below_one_and_bytes_above(value, nbytes):
    assert parse_share(value, 1024, name="beside") == nbytes


@pytest.mark.parametrize("value", ["30%", -1, 1, 1.0, "1.5", "much"])
def test_other_shares_are_refused(value):
    with pytest.raises(ValueError, match="beside="):
        parse_share(value, 1024, name="beside")
