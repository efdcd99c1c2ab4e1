"""The kernel's byte counters of a network interface."""

from __future__ import annotations

from pathlib import Path


def sent_bytes(interface: str, table: str | None = None) -> int:
    """Return the bytes, including headers, that left through an interface of this network namespace since its
    creation.

    Args:
        interface: its name.
        table: the text of /proc/net/dev; None reads the file of this process.

    Raises:
        ValueError: there is no such interface.
    """
    table = Path("/proc/self/net/dev").read_text(encoding="ascii") if table is None else table
    for line in table.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])  # eight columns received, then bytes sent
    raise ValueError(f"There is no interface {interface!r} here; run this in benchmarks/two_machines/emulate.py.")
