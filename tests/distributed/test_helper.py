"""The helper that every distributed test stands on."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from hf_osdp.distributed import said_once
from hf_osdp.distributed.mesh import Meshes
from tests.helpers.distributed import RankFailure, run_ranks


def _fail_on(rank):
    if dist.get_rank() == rank:
        raise KeyError("the reason")
    dist.barrier()


def _hang_on(rank, mark):
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(77) or {mark}"])
    if dist.get_rank() == rank:
        time.sleep(60)
    dist.barrier()


def _die_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), 9)
    dist.barrier()


def _replaces() -> int:
    if dist.get_rank():
        said_once.say_once = None
    return os.getpid()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("fn", "said", "error_type"), [(_fail_on, "the reason", "KeyError"), (_die_on, "signal 9", "died")]
)
def test_failure_of_the_first_rank_is_raised_with_traceback(fn, said, error_type, shared):
    with pytest.raises(RankFailure, match=said) as caught:
        run_ranks(fn, 2, 1, shared=shared)
    assert (caught.value.rank, caught.value.error_type) == (1, error_type)


def test_shared_ranks_serve_until_one_fails_or_replaces_something():
    first, second = (run_ranks(os.getpid, 2, shared=True) for _ in range(2))
    assert first == second == run_ranks(_replaces, 2, shared=True)
    third = run_ranks(os.getpid, 2, shared=True)
    with pytest.raises(RankFailure):
        run_ranks(_fail_on, 2, 0, shared=True)
    assert not {*first, *third} & {*run_ranks(os.getpid, 2, shared=True)} and first != third


def _threads_of_a_mesh() -> int:
    Meshes("cpu").mesh(1)
    return len(os.listdir("/proc/self/task"))


def test_groups_of_a_call_end_with_it():
    counts = [run_ranks(_threads_of_a_mesh, 2, shared=True)[0] for _ in range(5)]
    assert len(set(counts[1:])) == 1, counts


def test_hanging_rank_is_ended_with_children_and_shows_stack():
    with pytest.raises(RankFailure, match="_hang_on") as caught:
        run_ranks(_hang_on, 2, 0, os.getpid(), timeout_s=3, shared=True)
    assert caught.value.error_type == "timeout"
    deadline = time.monotonic() + 10  # on busy cores what was killed is listed for a moment
    while f"sleep(77) or {os.getpid()}" in subprocess.check_output(["ps", "-eo", "args"], text=True):
        assert time.monotonic() < deadline
        time.sleep(0.1)
