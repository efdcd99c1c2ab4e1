"""The helper that every distributed test stands on."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from hf_osdp.sharding.environment import form_process_group
from tests.helpers.distributed import RankFailure, run_ranks


def _sum_of_ranks(offset):
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return dist.get_rank(), value.item(), os.environ["OMP_NUM_THREADS"]


def _fail_on(rank):
    if dist.get_rank() == rank:
        raise KeyError("the reason")
    dist.barrier()


def _hang_on(rank, mark):
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(77) or {mark}"])
    if dist.get_rank() == rank:
        time.sleep(60)
    dist.barrier()


def _run_out_of_time_on_0(raise_on_1):
    """Rank 0's limit comes a moment before that of the other."""
    if dist.get_rank() == 0:
        faulthandler.dump_traceback_later(1.0, exit=True)
        time.sleep(60)
    if raise_on_1:
        raise KeyError("the reason")
    dist.barrier()


def _die_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), 9)
    dist.barrier()


def _form_the_group():
    dist.init_process_group("gloo")
    dist.barrier()
    return os.environ["MORE"]


def test_results_come_in_rank_order():
    assert run_ranks(_sum_of_ranks, 3, 1) == [(0, 6.0, "1"), (1, 6.0, "1"), (2, 6.0, "1")]


@pytest.mark.parametrize(
    ("fn", "argument", "said", "rank", "error_type"),
    [
        (_fail_on, 1, "the reason", 1, "KeyError"),
        (_die_on, 1, "signal 9", 1, "died"),
        (
            _run_out_of_time_on_0,
            False,
            "_run_out_of_time_on_0",
            0,
            "timeout",
        ),  # not what rank 1 raises for losing the other
        (_run_out_of_time_on_0, True, "the reason", 1, "KeyError"),
    ],
)
def test_the_failure_of_the_first_rank_is_raised_with_its_traceback(fn, argument, said, rank, error_type):
    with pytest.raises(RankFailure, match=said) as caught:
        run_ranks(fn, 2, argument)
    assert (caught.value.rank, caught.value.error_type) == (rank, error_type)


def test_a_hanging_rank_is_ended_with_its_children_and_shows_its_stack():
    with pytest.raises(RankFailure, match="_hang_on") as caught:
        run_ranks(_hang_on, 2, 0, os.getpid(), timeout_s=3)
    assert caught.value.error_type == "timeout"
    assert (
        f"sleep(77) or {os.getpid()}"
        not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    )


def test_the_function_may_form_the_group_itself():
    assert run_ranks(_form_the_group, 2, init=False, env={"MORE": "yes"}) == ["yes", "yes"]


def test_a_local_function_is_refused():
    with pytest.raises(ValueError, match="top of an importable module"):
        run_ranks(lambda: None, 1)


def _one_gpu() -> tuple[str, ...]:
    form_process_group(needed=True)
    value = torch.ones(1)
    dist.all_reduce(value)
    names = ("LOCAL_RANK", "NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "CUDA_VISIBLE_DEVICES")
    return *(os.environ[name] for name in names), str(value.item())


def test_ranks_on_one_gpu_are_new_processes_that_nccl_takes_for_machines(monkeypatch):
    """Without a GPU they meet on gloo."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run_ranks(_one_gpu, 2, init=False, one_gpu=True) == [
        ("0", f"rank-{rank}", "lo", "1", "", "2.0") for rank in range(2)
    ]


def test_a_rank_on_one_gpu_that_fails_is_told(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RankFailure, match="KeyError: 'the reason'") as failure:
        run_ranks(_raise, 2, init=False, one_gpu=True)
    assert failure.value.error_type == "KeyError"


def _raise() -> None:
    raise KeyError("the reason")
