"""What this process still does in the background, and waits for before it ends early."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

Wait = Callable[[], None]
"""Collective: every rank has begun the same things in the same order."""


class _Process:
    """What there is one of."""

    waits: ClassVar[dict[Wait, None]] = {}
    """In the order in which they began."""


def began(wait: Wait) -> None:
    """Something goes on in the background from now, until `is_over`.

    Args:
        wait: returns when it is done, and calls `is_over` with itself; raises what it failed with.
    """
    _Process.waits[wait] = None


def is_over(wait: Wait) -> None:
    """It need not be waited for any more."""
    _Process.waits.pop(wait, None)


def wait_for_all() -> None:
    """Until nothing is left in the background. Collective where something is.

    Raises:
        Exception: what one of them failed with.
    """
    for wait in list(_Process.waits):
        wait()
