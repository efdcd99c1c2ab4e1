"""Hooks of a model that is freed while a step runs."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from hf_osdp.sharding.weight_reads import _step_begins


class Freed:
    """Stands in for the checks of a model that is gone."""


def test_step_hook_of_a_freed_model_does_nothing():
    checks = weakref.ref(Freed())
    assert checks() is None
    _step_begins(checks, torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
