"""Collectives of ProcessGroupNCCL on the device, against gloo's on the host; its groups, time-outs and aborts."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.helpers.distributed import RankFailure

from .training import on_devices

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


def value(dtype, count):
    """Small whole numbers, exact in each dtype."""
    rank = dist.get_rank()
    return ((torch.arange(count) * 3 + rank * 5) % 7 + 1).to(dtype)


def collectives(dtype, device, world):
    """Their results, by name."""
    rank, found = dist.get_rank(), {}
    mine = value(dtype, 8).to(device)
    for op in ("SUM", "MAX", "MIN", "PRODUCT"):
        found[op] = mine.clone()
        dist.all_reduce(found[op], op=getattr(ReduceOp, op))
    found["gathered"] = torch.empty(8 * world, dtype=dtype, device=device)
    dist.all_gather_into_tensor(found["gathered"], mine)
    found["scattered"] = torch.empty(8, dtype=dtype, device=device)
    dist.reduce_scatter_tensor(found["scattered"], value(dtype, 8 * world).to(device))
    found["broadcast"] = mine.clone()
    dist.broadcast(found["broadcast"], world - 1)
    found["exchanged"] = torch.empty(2 * world, dtype=dtype, device=device)
    dist.all_to_all_single(found["exchanged"], value(dtype, 2 * world).to(device))
    found["passed on"] = torch.empty(8, dtype=dtype, device=device)
    before, after = (rank - 1) % world, (rank + 1) % world
    way = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, found["passed on"], before)]
    for work in dist.batch_isend_irecv(way):
        work.wait()
    reduced = mine.clone()
    dist.reduce(reduced, 1)
    parts = [torch.empty(8, dtype=dtype, device=device) for _ in range(world)]
    dist.all_gather(parts, reduced if rank == 1 else mine)
    found["reduced"] = parts[1]
    return {name: tensor.cpu() for name, tensor in found.items()}


def alike():
    world = dist.get_world_size()
    for dtype in DTYPES:
        device, host = collectives(dtype, "cuda", world), collectives(dtype, "cpu", world)
        for name, wanted in host.items():
            assert torch.equal(device[name], wanted), (dtype, name, device[name], wanted)
    return True


@pytest.mark.parametrize("late", ["", "all"])
@pytest.mark.parametrize("processes", [2, 4])
def test_collectives_are_gloos(processes, late):
    assert all(on_devices(alike, processes, late=late, timeout_s=60.0))


def what_only_nccl_has():
    rank, world = dist.get_rank(), dist.get_world_size()
    mean = torch.full((3,), float(rank), device="cuda")
    dist.all_reduce(mean, op=ReduceOp.AVG)
    scaled = torch.full((3,), float(rank + 1), device="cuda")
    dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.25))
    large = torch.tensor([2**53 + 1 + rank], device="cuda")
    dist.all_reduce(large, op=ReduceOp.MAX)
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    return mean[0].item(), scaled[0].item(), large.item() - 2**53, [one["rank"] for one in objects]


def test_averages_scaled_sums_and_large_integers_are_exact():
    assert on_devices(what_only_nccl_has, 4) == [(1.5, 2.5, 4, [0, 1, 2, 3])] * 4


def split():
    """Sums in the world and in groups of two, whose communicators are split from the world's if that is there."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    one, world = torch.tensor([1.0 + rank], device="cuda"), torch.tensor([1.0 + rank], device="cuda")
    dist.all_reduce(one, group=groups[rank % 2])
    dist.all_reduce(world)
    return one.item(), world.item()


@pytest.mark.parametrize("late", ["", "all"])
@pytest.mark.parametrize("eager", [False, True])
def test_groups_of_some_ranks_sum_their_own(eager, late):
    sums = [(4.0, 10.0), (6.0, 10.0)]
    assert on_devices(split, 4, eager=eager, late=late) == sums * 2


def missing(seconds):
    """A collective to which rank 1 does not come."""
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    backend._set_default_timeout(timedelta(seconds=seconds))
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        time.sleep(3 * seconds)
    else:
        dist.all_reduce(torch.ones(1, device="cuda"), async_op=True).wait()


def test_collective_without_a_peer_times_out_in_torch():
    with pytest.raises(RankFailure) as failure:
        on_devices(missing, 2, 5.0, late="all", env={"TORCH_NCCL_BLOCKING_WAIT": "1"})
    assert failure.value.rank == 0 and failure.value.error_type == "DistBackendError"
    assert "Watchdog caught collective operation timeout" in str(failure.value)


def test_collective_without_peer_fails_at_the_devices_own_limit():
    with pytest.raises(RankFailure) as failure:
        on_devices(missing, 2, 10.0, env={"FAKE_NCCL_TIMEOUT_S": "2"})
    assert failure.value.rank == 0 and failure.value.error_type == "DistBackendError"


def aborted():
    """A collective to which rank 1 does not come, given up."""
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    started = time.monotonic()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1, device="cuda"), async_op=True)
        dist.group.WORLD._get_backend(torch.device("cuda")).abort()
        torch.cuda.synchronize()
    return time.monotonic() - started


def test_aborted_collective_lets_its_stream_go_on():
    assert max(on_devices(aborted, 2, late="all")) < 10
