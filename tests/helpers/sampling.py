"""Which cases of a long list run every day."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], daily: Collection[Any]) -> list[Any]:
    """Arguments for `pytest.mark.parametrize`: all cases, under the mark `slow` but for some.

    Args:
        cases: values, or tuples of them where a test has several arguments.
        daily: those that run every day.
    """

    def slow(case: Any) -> Any:
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)

    cases = list(cases)
    assert all(case in cases for case in daily), f"{[case for case in daily if case not in cases]} are no cases"
    return [case if case in daily else slow(case) for case in cases]
