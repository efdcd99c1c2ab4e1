"""Killed at random moments, a training loses nothing but steps. (`python -m tests.faults.kills` is the long version.)"""

from __future__ import annotations

import pytest

from tests.faults.kills import run


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_nothing_is_lost(tmp_path, kills):
    outcome = run(kills, 1, tmp_path)
    assert outcome.count >= kills and not outcome.problems, outcome
