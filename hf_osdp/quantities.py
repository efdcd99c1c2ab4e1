"""Parse and format bytes, seconds and counts. Inside the package they are plain `int` and `float`."""

from __future__ import annotations

import math
import re

from .errors import shown

_UNIT_BYTES = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
MOST_BYTES = 2**48
"""Most memory of a device, a host or a limit, and largest option of a search. No machine has more, and sums over all
units must not overflow in the solver.
"""
_LEAST_LIMIT = 1024
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(value: int | float | str, *, name: str = "memory_limit") -> int:
    """Parse bytes from a number or from text such as `"8GiB"` (2**30) or `"16 GB"` (10**9); errors call the value
    `name`.

    Raises:
        ValueError: the text is not a number with a known unit, or the amount is not between 1 byte and `MOST_BYTES`.
    """
    remedy = "write it as bytes or with a unit, for example 8GiB or 500MB"
    amount = (
        None if isinstance(value, (bool, str)) or not isinstance(value, (int, float)) else value
    )  # an int stays exact
    if (
        isinstance(value, str)
        and (match := _QUANTITY.fullmatch(value))
        and (unit := match[2].lower() or "b") in _UNIT_BYTES
    ):
        amount = float(match[1]) * _UNIT_BYTES[unit]
    if amount is None:
        raise ValueError(f"{name}={shown(value)} is not a number of bytes; {remedy}.")
    if not 1 <= amount <= MOST_BYTES:
        most = f"{MOST_BYTES // 2**40} TiB"
        raise ValueError(f"{name}={shown(value)} must be between 1 byte and {most}; {remedy}.")
    return int(amount)


def parse_limit(value: int | float | str, *, name: str = "memory_limit") -> int:
    """Parse a device's memory limit like `parse_bytes`; raise ValueError also if the value is so small that its
    unit must be missing.
    """
    limit, number = parse_bytes(value, name=name), str(value).strip()
    if limit < _LEAST_LIMIT and number.isdecimal():
        raise ValueError(
            f"{name}={value!r} has no unit, and {number} bytes are too few for any model; write {number}GiB, or"
            " another unit."
        )
    return limit


def parse_share(value: int | float | str, whole_bytes: int, *, name: str) -> int:
    """Return the bytes of a share below 1 of a whole, as number or text, or those that `parse_limit` reads."""
    try:
        share = float(value)
    except ValueError:
        share = math.inf
    if 1 <= share < _LEAST_LIMIT:
        raise ValueError(f"{name}={shown(value)} must be a share below 1, or bytes with a unit, such as 24GiB.")
    return round(share * whole_bytes) if 0 <= share < 1 else parse_limit(value, name=name)


def format_bytes(count: int | float) -> str:
    """`1536` → `"1.5 KiB"`. Binary units, as is usual for device memory."""
    sign, amount = ("-", -count) if count < 0 else ("", count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{sign}{amount:.0f} {unit}" if unit == "B" else f"{sign}{amount:.1f} {unit}"
        amount /= 1024
    return f"{sign}{amount:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """`0.0123` → `"12.3 ms"`."""
    magnitude = abs(seconds)
    if magnitude >= 100 or seconds == 0:
        return f"{seconds:.0f} s"
    if magnitude >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if magnitude >= 1e-3 else f"{seconds * 1e6:.1f} us"


def format_count(count: int | float) -> str:
    """`124439808` → `"124.4M"`."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(count) >= limit:
            return f"{count / limit:.1f}{suffix}"
    return f"{count:.0f}"


def check_numbers(value: object, *names: str, above_zero: bool = False) -> None:
    """Raise a ValueError unless these fields are finite and at least 0, or above 0."""
    for name in names:
        number = getattr(value, name)
        if not (0 < number < math.inf if above_zero else 0 <= number < math.inf):
            least = "above" if above_zero else "at least"
            raise ValueError(f"{type(value).__name__}.{name}={number} must be finite and {least} 0.")
