"""Affine costs and their envelopes, splits and recomputations, and what a description refuses."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_osdp.planner.affine import Affine, Envelope
from hf_osdp.planner.description import DType, ParameterSpec, Recomputation
from hf_osdp.planner.split import ModelSplit, OperatorSplit
from tests.helpers.descriptions import linear_envelope, transformer

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


def test_split_is_none_and_described_by_what_it_does():
    head, other = OperatorSplit(fqn="lm_head", slices=4), OperatorSplit(fqn="a.b", slices=2)
    told = {
        "blocks": ModelSplit(),
        "operators": ModelSplit(operators=True),
        "blocks, lm_head in 4 slices": ModelSplit(sliced=(head,)),
        "operators, 2 operators in 2 to 4 slices": ModelSplit(operators=True, sliced=(head, other)),
    }
    assert [split.is_none for split in told.values()] == [True, False, False, False]
    assert [split.describe() for split in told.values()] == list(told)


HEAD = OperatorSplit(fqn="lm_head", slices=2)
REFUSED = [
    *(("at least 2", lambda slices=slices: replace(HEAD, slices=slices)) for slices in (1, 0, -3)),
    ("'lm_head' is split 2 times", lambda: ModelSplit(sliced=(HEAD, replace(HEAD, slices=3)))),
    ("Parameter w has .* elements; it must have at most",
        lambda: ParameterSpec(name="w", shape=(2**40, 2**40), dtype=DType.FLOAT32)),
    ("Parameter w has a negative size", lambda: ParameterSpec(name="w", shape=(2, -1), dtype=DType.FLOAT32)),
    ("sequence_length=0 must be at least 1", lambda: replace(transformer(), sequence_length=0)),
    (r"Unit '\(root\)' is listed twice", lambda: replace(transformer(), units=transformer().units[:1] * 2)),
]  # fmt: skip


@pytest.mark.parametrize(("part", "make"), REFUSED)
def test_impossible_descriptions_and_splits_raise_value_error(part, make):
    with pytest.raises(ValueError, match=part):
        make()


@pytest.mark.parametrize(("part", "fields"), [
    *(("must lie between 0 and 1", {"budget": budget}) for budget in (0.0, 1.0, -0.1, float("nan"))),
    ("without saved_calls", {"budget": 0.5, "saved_calls": ("addmm#0",)}),
    (r"share=1\.5 of a recomputation must be from 0 to 1", {"share": 1.5}),
    ("must be different calls of operators, such as 'addmm#0'", {"saved_calls": ("addmm",)}),
    ("must be different calls", {"saved_calls": ("addmm#0", "addmm#0")}),
    ("'_to_copy#0', but outputs of casts and in-place operators cannot be saved", {"saved_calls": ("_to_copy#0",)}),
    ("'add_#1', but outputs of casts and in-place operators cannot be saved", {"saved_calls": ("mm#0", "add_#1")}),
])  # fmt: skip
def test_impossible_recomputations_raise_value_error(part, fields):
    with pytest.raises(ValueError, match=part):
        Recomputation(**fields)


def test_recomputation_is_described_by_what_it_saves():
    two = Recomputation(saved_calls=("addmm#0", "attention#0"), share=0.4)
    named, many = (replace(two, names=names) for names in (("c_attn", "attention"), tuple("abcdef")))
    assert [one.describe() for one in (Recomputation(), Recomputation(budget=0.53, share=0.25), two, named, many)] == [
        "recompute", "recompute 0.25: budget 0.53", "recompute 0.4: saves 2 operators",
        "recompute 0.4: saves c_attn, attention", "recompute 0.4: saves a, b, c, d and 2 more",
    ]  # fmt: skip
