"""Our trainings on the device, over NCCL, against the same ones on the CPU, over gloo."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .training import on_devices, train
from .variants import TOLERANCES, VARIANTS, of_common_operators


def on_both(name):
    return train(VARIANTS[name], "cpu"), train(VARIANTS[name], "cuda")


@pytest.mark.parametrize("name", VARIANTS)
def test_two_processes_train_as_over_gloo(name):
    host, device = on_devices(on_both, 2, name)[0]
    errors = host.worst_error(device)
    assert max(errors.values()) < TOLERANCES.get(name, 1e-12), errors


FOUR = tuple(name for name in VARIANTS if name not in ("fused", "unclipped", "recomputed"))


@pytest.mark.parametrize("names", [FOUR[::2], FOUR[1::2]], ids=["one half", "the other"])
def test_four_processes_train_as_over_gloo(names):
    """Several in one group, as meshes of one training are left to the next."""
    for name, (host, device) in zip(names, on_devices(all_on_both, 4, names)[0], strict=True):
        errors = host.worst_error(device)
        assert max(errors.values()) < TOLERANCES.get(name, 1e-12), (name, errors)


def all_on_both(names):
    short = (replace(VARIANTS[name], steps=2) for name in names)
    return [(train(variant, "cpu"), train(variant, "cuda")) for variant in short]


def with_common_operators(precision):
    variant = replace(VARIANTS[precision], prepare=of_common_operators)
    return train(variant, "cpu"), train(variant, "cuda")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_over_nccl_are_those_over_gloo_where_kernels_are_the_same(precision):
    host, device = on_devices(with_common_operators, 4, precision)[0]
    assert max(host.worst_error(device).values()) == 0
