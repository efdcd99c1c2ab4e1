"""Our trainings on the device, over NCCL, against the same ones on the CPU, over gloo."""

from __future__ import annotations

import pytest

from .training import on_devices, train
from .variants import TOLERANCES, VARIANTS


def on_both(name):
    return train(VARIANTS[name], "cpu"), train(VARIANTS[name], "cuda")


@pytest.mark.parametrize("name", VARIANTS)
def test_two_processes_train_as_over_gloo(name):
    host, device = on_devices(on_both, 2, name)[0]
    errors = host.worst_error(device)
    assert max(errors.values()) < TOLERANCES.get(name, 1e-12), errors


@pytest.mark.parametrize("name", ["everything", "two stages", "hsdp"])
def test_four_processes_train_as_over_gloo(name):
    host, device = on_devices(on_both, 4, name)[0]
    errors = host.worst_error(device)
    assert max(errors.values()) < TOLERANCES.get(name, 1e-12), errors
