"""Affine costs and their envelopes, splits and recomputations, and what a description refuses."""

import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_osdp.planner.affine import Affine, Envelope
from tests.helpers.descriptions import linear_envelope

constants, slopes = (st.integers(0, most).map(float) for most in (10**9, 10**6))
moments = st.lists(st.builds(Affine, constant=constants, per_sample=slopes), min_size=1, max_size=30)


@settings(suppress_health_check=[HealthCheck.too_slow])  # where other programs keep the cores busy
@given(moments, st.integers(1, 10**5))
def test_envelope_is_the_highest_of_its_moments_alone(given_moments, samples):
    envelope = Envelope.above(given_moments)
    assert envelope.bytes(samples) == max(moment.bytes(samples) for moment in given_moments)
    lines = [(moment.per_sample, moment.constant) for moment in envelope.pieces]
    assert [slope for slope, _ in lines] == sorted({slope for slope, _ in lines})
    crossings = [(c - d) / (t - s) for (s, c), (t, d) in itertools.pairwise(lines)]
    assert crossings == sorted(crossings), "each is the highest between two crossings"


def test_envelope_of_one_sample_may_lie_on_no_piece():
    peak = Envelope(pieces=(Affine(constant=10, per_sample=5),), single=100.0)
    assert [peak.bytes(samples) for samples in (1, 2, 3)] == [100, 20, 25]
    raised = peak.plus(Affine(constant=1, per_sample=1))
    assert [raised.bytes(samples) for samples in (1, 2)] == [102, 23]


def test_bytes_are_rounded_up_and_never_negative():
    assert linear_envelope(constant=0.25, per_sample=1).bytes(3) == Affine(constant=0.25, per_sample=1).bytes(3) == 4
    assert linear_envelope(constant=-100, per_sample=1).bytes(3) == Affine(constant=-100, per_sample=1).bytes(3) == 0
    assert Envelope.above([]).bytes(7) == Envelope().bytes(7) == 0
    line = linear_envelope(constant=10, per_sample=5)
    assert [line.scaled(0.5, constants=constants).bytes(2) for constants in (True, False)] == [10, 15]
