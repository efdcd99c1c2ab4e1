"""Our trainings on the device, over NCCL, against the same ones on the CPU, over gloo."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .training import on_devices, train
from .variants import TOLERANCES, VARIANTS, of_common_operators


def check(processes, names, **changes):
    """Compare trainings on the device with those on the host: several in one group, as meshes of one are left to the
    next.
    """
    for name, (host, device) in zip(names, on_devices(on_both, processes, names, changes)[0], strict=True):
        errors = host.worst_error(device)
        tolerance = 0 if "prepare" in changes else TOLERANCES.get(name, 1e-12)
        assert max(errors.values()) <= tolerance, (name, errors)


def on_both(names, changes):
    variants = (replace(VARIANTS[name], **changes) for name in names)
    return [(train(variant, "cpu"), train(variant, "cuda")) for variant in variants]


@pytest.mark.parametrize("name", VARIANTS)
def test_two_processes_train_as_over_gloo(name):
    check(2, (name,))


FOUR = tuple(name for name in VARIANTS if name not in ("fused", "unclipped", "recomputed"))


@pytest.mark.parametrize("names", [FOUR[::2], FOUR[1::2]], ids=["one half", "the other"])
def test_four_processes_train_as_over_gloo(names):
    check(4, names, steps=2)


def test_16_bits_over_nccl_equal_gloo_where_kernels_agree():
    check(4, ("bf16", "fp16"), prepare=of_common_operators)
