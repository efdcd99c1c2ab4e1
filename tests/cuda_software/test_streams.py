"""Streams and events that are late, and torch's CUDA sanitizer: on planted races, and on our trainings."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.helpers.distributed import RankFailure

from .training import on_devices, train
from .variants import VARIANTS


def written_twice(waits):
    value, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        value.mul_(5)
    torch.cuda.synchronize()
    return value.tolist()


def test_sanitizer_reports_a_race_and_nothing_else():
    assert on_devices(written_twice, 1, True, sanitizes=True) == [[5.0] * 4]
    with pytest.raises(RankFailure) as failure:
        on_devices(written_twice, 1, False, sanitizes=True)
    assert failure.value.error_type == "CUDASanitizerErrors"


def trained(name):
    return train(VARIANTS[name], "cuda")


def without_waits(name):
    """A training whose offloading does not wait for its copies."""
    from hf_osdp.modeling.activations import _OffloadedStorage
    from hf_osdp.sharding import host

    _OffloadedStorage.wait = lambda storage: None
    host._wait = lambda copies, **_: copies.clear()
    return trained(name)


OFFLOADS = ["activations on the host", "states on the host"]


@pytest.mark.parametrize("name", OFFLOADS)
def test_sanitizer_reports_our_offloading_without_its_waits(name):
    with pytest.raises(RankFailure) as failure:
        on_devices(without_waits, 2, name, sanitizes=True)
    assert failure.value.error_type in ("CUDASanitizerErrors", "SystemError"), "the latter from backward's thread"


@functools.cache
def prompt(name):
    return on_devices(trained, 2, name)[0]


def equal(one, other):
    return (one.losses, one.norms) == (other.losses, other.norms) and all(
        torch.equal(one.parameters[key], value) for key, value in other.parameters.items()
    )


@pytest.mark.parametrize("late", ["main", "side"])
@pytest.mark.parametrize("name", VARIANTS)
def test_late_streams_change_no_training_and_sanitizer_reports_nothing(name, late):
    assert equal(on_devices(trained, 2, name, late=late, sanitizes=late == "main")[0], prompt(name))


@pytest.mark.parametrize("name", OFFLOADS)
def test_late_copies_change_our_offloading_without_its_waits(name):
    """Or end it, where what is not there yet is an index. Where nothing is late, nobody sees what is missing."""
    assert equal(on_devices(without_waits, 2, name)[0], prompt(name))
    try:
        found = on_devices(without_waits, 2, name, late="side", timeout_s=45)[0]
    except RankFailure:
        return
    assert not equal(found, prompt(name))
