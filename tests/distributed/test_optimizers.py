"""Optimizers that must not run on shards, and those that cannot be rebound. One process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_osdp.errors import OSDPError
from hf_osdp.sharding.optimizer import parameter_names, rebind_parameters, release_parameters
from hf_osdp.sharding.optimizer_check import check_optimizer


class Lamb(torch.optim.AdamW):
    """As other packages call it."""


class MyLamb(Lamb):
    """A subclass by a user."""


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "SparseAdam", "Muon", "Rprop"])
def test_optimizers_that_look_at_whole_parameters_are_refused(name):
    optimizer = getattr(torch.optim, name)([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(OSDPError, match=f"^{name} .*use an element-wise optimizer"):
        check_optimizer(optimizer)


def test_a_subclass_is_refused_by_its_base():
    with pytest.raises(OSDPError, match=r"^MyLamb scales by the norm of each whole parameter"):
        check_optimizer(MyLamb([nn.Parameter(torch.ones(2))]))


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD"])
def test_element_wise_optimizers_are_let_through(name):
    check_optimizer(getattr(torch.optim, name)([nn.Parameter(torch.ones(2))], lr=0.1))


def test_a_strange_parameter_is_refused_and_the_optimizer_left_as_it_was():
    model = nn.Linear(2, 2)
    strange = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([*model.parameters(), strange], lr=0.1)
    with pytest.raises(OSDPError, match=r"shape \(5,\) that the model does not have"):
        release_parameters(optimizer, parameter_names(model))
    assert optimizer.param_groups[0]["params"][-1] is strange


def test_a_parameter_that_is_gone_is_named():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OSDPError, match="no parameter 'weight'"):
        rebind_parameters(optimizer, parameter_names(model), nn.Module())
