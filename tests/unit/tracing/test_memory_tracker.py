"""Known patterns of allocation, counted."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_osdp.tracing.memory_tracker import MemoryTracker


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode], ids=["real", "fake"])
def test_tracker_counts_storages_once_and_while_they_live(mode):
    with mode(), MemoryTracker(block_bytes=1) as live:
        a = torch.empty(1000)
        b = a.view(10, 100)
        assert live.current_bytes == 4000
        c = b + 1
        assert live.current_bytes == 8000
        a.add_(1)
        torch.add(a, 1, out=a)
        torch._foreach_mul_([a, c], 2.0)
        assert (live.current_bytes, live.peak_bytes) == (8000, 8000)
        del c
        assert (live.current_bytes, live.peak_bytes) == (4000, 8000)
        live.reset_peak()
        assert live.peak_bytes == 4000
        del a
        assert live.current_bytes == 4000
        del b
        assert live.current_bytes == 0


def test_resized_storages_count_present_size_in_nested_trackers():
    original = torch.UntypedStorage.resize_
    with MemoryTracker(block_bytes=1) as outer, MemoryTracker(block_bytes=1) as live:
        a = torch.empty(1000)
        a.untyped_storage().resize_(0)
        assert outer.current_bytes == live.current_bytes == 0
        a.untyped_storage().resize_(4000)
        assert (live.current_bytes, live.peak_bytes) == (4000, 4000)
    assert torch.UntypedStorage.resize_ is original


def test_tensors_from_before_count_only_when_tracked():
    weight = nn.Parameter(torch.zeros(10, 10))
    with MemoryTracker(block_bytes=1) as live:
        view = weight.t()
        assert live.current_bytes == 0
        live.track([weight, weight, None, view])
        assert live.current_bytes == 400
    del weight, view
    assert live.current_bytes == 0


def test_experts_compute_under_the_tracker_what_they_compute_without():
    """In float32, where torch's shape function for grouped products is replaced, on fake tensors alone."""
    a, weights, ends = torch.randn(6, 8), torch.randn(2, 8, 4), torch.tensor([2, 6], dtype=torch.int32)
    with MemoryTracker() as live:
        product = torch.nn.functional.grouped_mm(a, weights, offs=ends)
    torch.testing.assert_close(product, torch.cat([a[:2] @ weights[0], a[2:] @ weights[1]]))
    assert live.peak_bytes
    with FakeTensorMode() as fake, MemoryTracker():
        a, weights, ends = map(fake.from_tensor, (a, weights, ends))
        assert torch.nn.functional.grouped_mm(a, weights, offs=ends).shape == product.shape
