"""Properties that run in two sizes: a few examples every day, the same ones each time, and many others, slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings


def holds(*strategies: Any, few: int, many: int) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """Make a test of a function that asserts something of arguments drawn from these strategies.

    Args:
        *strategies: one an argument.
        few: examples of every day, derived from the function alone, so that a run can be repeated.
        many: examples under the mark `slow`, new ones each time; hypothesis prints how to repeat one that fails.
    """

    def decorate(check: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.slow)])
        def test(examples: int) -> None:
            sizes = settings(
                max_examples=examples, deadline=None, derandomize=examples == few, print_blob=True, database=None,
                suppress_health_check=[HealthCheck.too_slow],
            )  # fmt: skip
            sizes(given(*strategies)(check))()

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate
