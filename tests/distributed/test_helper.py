"""The helper that every distributed test stands on."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

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


@pytest.mark.parametrize(
    ("fn", "argument", "said", "rank", "error_type"),
    [
        (_fail_on, 1, "the reason", 1, "KeyError"),
        (_die_on, 1, "signal 9", 1, "died"),
    ],
)
def test_failure_of_the_first_rank_is_raised_with_traceback(fn, argument, said, rank, error_type):
    with pytest.raises(RankFailure, match=said) as caught:
        run_ranks(fn, 2, argument)
    assert (caught.value.rank, caught.value.error_type) == (rank, error_type)


def test_hanging_rank_is_ended_with_children_and_shows_stack():
    with pytest.raises(RankFailure, match="_hang_on") as caught:
        run_ranks(_hang_on, 2, 0, os.getpid(), timeout_s=3)
    assert caught.value.error_type == "timeout"
    deadline = time.monotonic() + 10  # on busy cores what was killed is listed for a moment
    while (
        f"sleep(77) or {os.getpid()}" in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
