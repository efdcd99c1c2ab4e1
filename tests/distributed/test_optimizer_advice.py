"""What an optimizer's refusal recommends can be made before sharding and rebound."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from hf_osdp.errors import OSDPError
from hf_osdp.sharding.optimizer import parameter_names, rebind_parameters
from hf_osdp.sharding.optimizer_check import check_optimizer


def test_every_recommended_optimizer_can_be_rebound():
    with pytest.raises(OSDPError) as refused:
        check_optimizer(torch.optim.Adafactor([nn.Parameter(torch.ones(2, 2))]))
    recommended = re.findall(r"\w+", str(refused.value).partition("such as ")[2].replace(" or ", " "))
    assert recommended == ["AdamW", "Adam", "SGD", "RMSprop"]
    model = nn.Linear(2, 2)
    for name in recommended:
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        rebind_parameters(optimizer, parameter_names(model), model)


def test_a_new_adagrad_is_rebound_and_a_used_one_is_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    rebind_parameters(optimizer, parameter_names(model), model)
    assert all(optimizer.state[parameter]["sum"].eq(0.5).all() for parameter in model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(OSDPError, match=r"^Adagrad has state .* make it from the sharded model's parameters"):
        rebind_parameters(optimizer, parameter_names(model), model)
