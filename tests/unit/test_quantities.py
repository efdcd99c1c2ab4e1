"""Bytes and seconds as text, both ways."""

from __future__ import annotations

import pytest

from hf_osdp.quantities import format_bytes, format_count, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8GiB", 8 * 2**30), ("16 GB", 16 * 10**9), ("500MB", 500 * 10**6), ("1.5kib", 1536), ("12", 12), ("12b", 12), (" 2 TiB ", 2**41),
     ("1e9", 10**9), ("1e-3 GB", 10**6), (4096, 4096), (2**60 - 1, 2**60 - 1), (1e6, 10**6)],
)  # fmt: skip
def test_bytes_are_read(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "8 XB", "eight", "8GiB of memory", "-1GiB", "0x10", "1,5 GiB", "8 G iB", None, True, [8], b"8"]
)
def test_what_is_no_number_of_bytes_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"limit=.* is not a number of bytes; .*for example 8GiB"):
        parse_bytes(text, name="limit")


@pytest.mark.parametrize("amount", [0, -5, 0.5, "0GiB", "0.1", 2**60, "1e300", float("nan"), float("inf"), "1e999"])
def test_amounts_out_of_range_are_refused(amount):
    with pytest.raises(ValueError, match="must be between 1 byte and"):
        parse_bytes(amount)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"), (3 * 2**29, "1.5 GiB"), (2**40, "1.00 TiB"),
     (-2048, "-2.0 KiB"), (5 * 2**50, "5120.00 TiB")],
)  # fmt: skip
def test_bytes_are_written_in_binary_units(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (123.4, "123 s"), (1.5, "1.50 s"), (0.0123, "12.3 ms"), (12e-6, "12.0 us"), (-0.5, "-500.0 ms")],
)  # fmt: skip
def test_seconds_are_written_in_the_unit_that_suits(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(124439808, "124.4M"), (175e9, "175.0B"), (1.0e12, "1.0T"), (2500, "2.5K"), (999, "999"), (0, "0")]
)
def test_counts_are_written_short(count, text):
    assert format_count(count) == text
