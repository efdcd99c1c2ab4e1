"""What a cut may say."""

from __future__ import annotations

import pytest

from hf_osdp.planner.split import ModelSplit, OperatorSplit


def test_default_cuts_nothing():
    assert ModelSplit().is_none
    assert not ModelSplit(operators=True).is_none
    assert not ModelSplit(sliced=(OperatorSplit(fqn="lm_head", slices=2),)).is_none


@pytest.mark.parametrize("slices", [1, 0, -3, 2.0, True])
def test_a_split_has_two_slices_or_more(slices):
    with pytest.raises(ValueError, match="at least 2"):
        OperatorSplit(fqn="lm_head", slices=slices)


@pytest.mark.parametrize("fqn", ["", ".", "a..b", " lm_head", "a. b", None])
def test_names_are_names(fqn):
    with pytest.raises(ValueError, match="no module's name"):
        OperatorSplit(fqn=fqn, slices=2)


def test_an_operator_is_split_once():
    with pytest.raises(ValueError, match="'lm_head' is split 2 times"):
        ModelSplit(sliced=(OperatorSplit(fqn="lm_head", slices=2), OperatorSplit(fqn="lm_head", slices=3)))


@pytest.mark.parametrize("splits", [["lm_head"], ("lm_head",), [OperatorSplit(fqn="a", slices=2)]])
def test_splits_are_a_tuple_of_splits(splits):
    with pytest.raises(ValueError, match="tuple of OperatorSplit"):
        ModelSplit(sliced=splits)
