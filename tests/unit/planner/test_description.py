"""Lines and envelopes of costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_osdp.planner.affine import Affine, Envelope

LINES = st.lists(
    st.builds(
        lambda constant, slope: Affine(constant=float(constant), per_sample=float(slope)),
        st.integers(-(10**9), 10**9),
        st.integers(-(10**6), 10**6),
    ),
    min_size=1,
    max_size=30,
)


@given(LINES, st.integers(1, 10**5))
def test_an_envelope_is_the_highest_of_its_lines(lines, samples):
    assert Envelope.above(lines)(samples) == max(line(samples) for line in lines)


@given(LINES)
def test_an_envelope_keeps_only_lines_that_are_somewhere_the_highest(lines):
    kept = Envelope.above(lines).pieces
    slopes = [line.per_sample for line in kept]
    assert slopes == sorted(set(slopes))
    for number, line in enumerate(kept):
        others = [other for other in kept if other is not line]
        crossings = {1.0} | {(o.constant - line.constant) / (line.per_sample - o.per_sample) for o in others}
        assert not others or number in (0, len(kept) - 1) or any(
            line.constant + line.per_sample * x >= max(o.constant + o.per_sample * x for o in others) - 1e-3 for x in crossings if x >= 1
        )  # fmt: skip


def test_one_sample_may_lie_on_no_line():
    peak = Envelope.above([Affine(constant=10, per_sample=5)], single=100.0)
    assert [peak.bytes(samples) for samples in (1, 2, 3)] == [100, 20, 25]
    assert peak.plus(Affine(constant=1, per_sample=1)).bytes(1) == 102
    assert peak.plus(Affine(constant=1, per_sample=1)).bytes(2) == 23


def test_no_moment_is_no_bytes():
    assert Envelope.above([]).bytes(7) == 0
    assert Envelope().bytes(7) == 0


@pytest.mark.parametrize(("constants", "expected"), [(True, 10), (False, 15)])
def test_scaling_leaves_constants_unless_asked(constants, expected):
    assert Envelope.linear(constant=10, per_sample=5).scaled(0.5, constants=constants).bytes(2) == expected


def test_bytes_are_rounded_up_and_never_negative():
    assert Envelope.linear(constant=0.25, per_sample=1).bytes(3) == 4
    assert Envelope.linear(constant=-100, per_sample=1).bytes(3) == 0
