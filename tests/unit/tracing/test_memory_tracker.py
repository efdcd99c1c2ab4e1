"""Known patterns of allocation, counted."""

import time
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_osdp.tracing.memory_tracker import MemoryTracker
from tests.helpers.distributed import run_ranks


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


def test_sizes_are_rounded_up_to_blocks():
    with MemoryTracker(block_bytes=512) as live:
        kept = torch.empty(1), torch.empty(129)
        assert live.current_bytes == 512 + 1024 and kept


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


def test_training_step_peaks_where_it_should():
    linear, x = nn.Linear(100, 100, bias=False), torch.ones(50, 100)
    with MemoryTracker(block_bytes=1) as live:
        live.track([*linear.parameters(), x])
        held = live.current_bytes
        assert held == 40_000 + 20_000
        y = linear(x)
        loss = y.sum()
        del y  # sum saves nothing
        assert live.current_bytes == held + 4
        loss.backward()  # the loss's gradient is a scalar, expanded
        assert live.current_bytes == held + 4 + 40_000
        optimizer = torch.optim.AdamW(linear.parameters(), foreach=False)
        optimizer.step()
        assert live.current_bytes >= held + 4 + 3 * 40_000
        optimizer.zero_grad()
        del loss
        assert live.current_bytes == held + 2 * 40_000 + 4  # both moments and the step count


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


@pytest.mark.parametrize(("counted", "made"), [("cuda", "cpu"), (None, "meta")])
def test_tensors_of_other_devices_are_left_out(counted, made):
    with MemoryTracker(block_bytes=1, device_type=counted) as live:
        kept = torch.empty(1000, device=made)
        assert live.current_bytes == 0 and kept.numel() == 1000


def _levels_of_fsdp2_steps() -> tuple[int, list[tuple[int, int, int, int]]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    levels = []
    for _ in range(2):
        with MemoryTracker(block_bytes=1) as live:
            live.track(model.parameters())
            live.track(value for state in optimizer.state.values() for value in state.values())
            before = live.current_bytes
            model(torch.ones(1, 64)).sum().backward()
            ends = time.monotonic() + 10  # so long gloo's thread may hold what it has reduced
            while live.current_bytes != before + whole // 2 and time.monotonic() < ends:
                time.sleep(0.01)
            after_backward = live.current_bytes
            optimizer.step()
            optimizer.zero_grad()
            levels.append((before, after_backward, live.current_bytes, live.peak_bytes))
    return whole, levels


def test_fsdp2_counts_shards_between_steps_and_whole_parameters_within():
    for whole, ((before, backward, after, peak), second) in run_ranks(_levels_of_fsdp2_steps, 2):
        assert (before, backward, after) == (whole // 2, whole, whole)  # shards, gradients, momenta in their place
        assert second[:3] == (whole, 3 * whole // 2, whole)
        # momenta of half the parameters; gloo's thread may hold a layer's gradient, a quarter of them, a bit longer
        assert peak > whole and second[3] == pytest.approx(peak + whole // 2, abs=whole // 4)
