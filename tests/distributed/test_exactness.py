"""Whatever the layout and its options, training is that of one process: loss, gradient norm, which parameters have
gradients, every parameter and every state of the optimizer, in float64.
"""

from __future__ import annotations

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.training import Trained, alone, train

from .cases import CASES


def on_rank(name: str) -> Trained:
    """Train a case here."""
    return train(CASES[name])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * case.slow) for name, case in CASES.items()]
)
def test_training_equals_one_process(name):
    """Ranks serve case after case; a case that fails gets its ranks killed, and the next gets new ones."""
    case = CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    wanted = alone(case.alone)
    assert case.max_norm is None or min(wanted.norms) > case.max_norm, "clipping must act"
    ranks = max(1, case.world)
    found = (
        run_ranks(on_rank, ranks, name, timeout_s=280, shared=True, nodes=max(1, ranks // 2))
        if case.world
        else [on_rank(name)]
    )
    errors = found[0].worst_error(wanted)
    assert max(errors.values()) <= case.tolerance, errors
