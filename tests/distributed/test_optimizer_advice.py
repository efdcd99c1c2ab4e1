"""What an optimizer's refusal recommends can be made before sharding and rebound."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from hf_osdp.errors import OSDPError
from hf_osdp.runtime.optimizer import check_optimizer, parameter_names, rebind_parameters


def test_every_recommended_optimizer_can_be_rebound():
    with pytest.raises(OSDPError) as refused:
        check_optimizer(torch.optim.Adafactor([nn.Parameter(torch.ones(2, 2))]))
    recommended = re.findall(r"\w+", str(refused.value).partition("such as ")[2].replace(" or ", " "))
    assert recommended == ["AdamW", "Adam", "SGD", "RMSprop"]
    model = nn.Linear(2, 2)
    for name in recommended:
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        rebind_parameters(optimizer, parameter_names(model), model)


def test_an_optimizer_that_is_made_with_state_is_told_so():
    model = nn.Linear(2, 2)
    with pytest.raises(OSDPError, match=r"^Adagrad has state .* make it from the sharded model's parameters"):
        rebind_parameters(torch.optim.Adagrad(model.parameters()), parameter_names(model), model)
