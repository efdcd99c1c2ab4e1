"""What NCCL hands back for a collective, and which device a process takes: in processes, which a fault would end."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_osdp.distributed.device import own_gpu
from hf_osdp.measurement.timing import CollectiveClock
from hf_osdp.sharding.environment import form_process_group

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def collectives_under_the_clock() -> None:
    form_process_group(needed=True)
    whole, part = (torch.ones(4096, device=own_gpu()) for _ in range(2))
    with CollectiveClock(own_gpu()) as clock:
        for async_op in (False, True):
            for work in (
                dist.all_reduce(whole, async_op=async_op),
                dist.all_gather_into_tensor(whole, part, async_op=async_op),
                dist.reduce_scatter_tensor(part, whole, async_op=async_op),
            ):
                assert (work is not None) == async_op
    torch.cuda.synchronize()
    assert clock.calls() == (), "a group of one rank is no link"
    assert len(clock._seen) == 6


def a_group_formed_with_a_device_id() -> None:
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=last)
    assert own_gpu() == last
    assert torch.cuda.current_device() == last.index


@pytest.mark.parametrize("scene", [collectives_under_the_clock, a_group_formed_with_a_device_id])
def test_one_rank(scene):
    program = f"from tests.gpu.test_nccl_works import {scene.__name__}; {scene.__name__}()"
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stderr
