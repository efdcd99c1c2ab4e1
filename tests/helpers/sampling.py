"""Which cases of a long list run every day."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], daily: Container[Any]) -> list[Any]:
    """Arguments for `pytest.mark.parametrize`: all cases, under the mark `slow` but for some.

    Args:
        cases: values, or tuples of them where a test has several arguments.
        daily: those that run every day.
    """

    def slow(case: Any) -> Any:
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)

    return [case if case in daily else slow(case) for case in cases]
