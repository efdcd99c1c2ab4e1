"""Streams and events that are late, and torch's CUDA sanitizer: on planted races, and on our trainings."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.helpers.distributed import RankFailure

from .training import on_devices, train
from .variants import VARIANTS


def product_on_a_stream(waits):
    """2 * 5 on another stream, which the current one reads."""
    factor, product = torch.full((4,), 2.0, device="cuda"), torch.zeros(4, device="cuda")
    side = torch.cuda.Stream()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.mul(factor, 5, out=product)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    return (product + 0).tolist()


def test_late_work_on_another_stream_is_done_once_awaited():
    assert on_devices(product_on_a_stream, 1, True, late="all") == [[10.0] * 4]


def test_late_work_on_another_stream_is_missing_before_waiting():
    assert on_devices(product_on_a_stream, 1, False, late="all") == [[0.0] * 4]


def copied_out(waits):
    """A copy to page-locked memory, read by the host."""
    kept = torch.zeros(4, pin_memory=True)
    kept.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    return kept.tolist()


def test_late_copy_to_page_locked_memory_is_there_once_awaited():
    assert on_devices(copied_out, 1, True, late="all") == [[1.0] * 4]
    assert on_devices(copied_out, 1, False, late="all") == [[0.0] * 4]


def copied_in():
    """The host changes page-locked memory that a copy still reads, and pageable memory, which it has read."""
    found = []
    for pinned in (True, False):
        source = torch.ones(4, pin_memory=pinned)
        there = source.to("cuda", non_blocking=True)
        source.zero_()
        found.append(there.tolist())
    return found


def test_late_copy_reads_only_page_locked_memory_late():
    assert on_devices(copied_in, 1, late="all") == [[[0.0] * 4, [1.0] * 4]]


def events():
    event, side = torch.cuda.Event(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        event.record()
    first = event.query()
    event.synchronize()
    return first, event.query()


def test_event_is_done_after_its_latency_or_a_wait():
    assert on_devices(events, 1, late="all") == [(False, True)]
    assert on_devices(events, 1) == [(True, True)]


def freed_while_read(records):
    """Memory of the current stream, read on another, freed, and taken again by the current stream."""
    side, summed = torch.cuda.Stream(), torch.zeros(1, device="cuda")
    one = torch.ones(1 << 16, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.sum(one, 0, keepdim=True, out=summed)
    if records:
        one.record_stream(side)
    address = one.data_ptr()
    del one
    again = torch.zeros(1 << 16, device="cuda")
    torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    return again.data_ptr() == address, summed.item()


def test_record_stream_keeps_memory_that_another_stream_reads_late():
    assert on_devices(freed_while_read, 1, True, late="all") == [(False, float(1 << 16))]


def test_memory_read_late_is_overwritten_without_record_stream():
    assert on_devices(freed_while_read, 1, False, late="all") == [(True, 0.0)]


def written_twice(waits):
    value, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        value.mul_(5)
    torch.cuda.synchronize()
    return value.tolist()


def test_sanitizer_reports_a_race():
    with pytest.raises(RankFailure) as failure:
        on_devices(written_twice, 1, False, sanitizes=True)
    assert failure.value.error_type == "CUDASanitizerErrors"


def test_sanitizer_reports_nothing_without_one():
    assert on_devices(written_twice, 1, True, sanitizes=True) == [[5.0] * 4]


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
