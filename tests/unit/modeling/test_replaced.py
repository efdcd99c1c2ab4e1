"""Attributes replaced for a while are as before afterwards, whatever the owner is."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from hf_osdp.integrations.samples import _preserve_generators
from hf_osdp.modeling.replaced import replaced


@dataclass(frozen=True)
class Frozen:
    owner: random.Random


def test_generator_of_frozen_dataset_is_replaced_and_restored():
    dataset = Frozen(random.Random(0))
    given = dataset.owner
    with _preserve_generators(dataset):
        assert dataset.owner is not given
    assert dataset.owner is given


def test_attribute_of_a_compiled_submodule_is_as_before_afterwards():
    block = nn.Linear(1, 1)
    block.gradient_checkpointing = True
    model = nn.Sequential(torch.compile(block))
    with replaced(block, gradient_checkpointing=False), replaced(model[0], gradient_checkpointing=False):
        assert not block.gradient_checkpointing and not model[0].gradient_checkpointing
    assert block.gradient_checkpointing and model[0].gradient_checkpointing


def test_inherited_attribute_is_inherited_again_after_an_error():
    class Base:
        name = staticmethod(lambda: "base")

    class Derived(Base):
        pass

    for owner in (Base, Derived):
        before = vars(owner).get("name")
        with pytest.raises(KeyError), replaced(owner, name=lambda: "other"):
            assert owner.name() == "other"
            raise KeyError
        assert vars(owner).get("name") is before and owner.name() == "base"
