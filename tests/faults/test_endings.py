"""Programs end: right after a collective with exit code 0, and soon where another rank is stopped."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS, TIMEOUT_S = 10, 5
PROGRAM = """
import torch, torch.distributed as dist
from hf_osdp.sharding.environment import form_process_group
form_process_group(needed=True, device_type="cpu")
for _ in range(20):
    dist.all_gather([torch.zeros(1000) for _ in range(2)], torch.ones(1000))
"""
STOPPED = f"""
import os, signal, sys, time
from datetime import timedelta
import torch.distributed as dist
from hf_osdp.checkpoint import writer
from hf_osdp.distributed.said_once import say_uncaught_once
say_uncaught_once()
dist.init_process_group("gloo", timeout=timedelta(seconds={TIMEOUT_S}))
if dist.get_rank() == 1:
    writer.flush = lambda path: (os.kill(os.getpid(), signal.SIGSTOP), time.sleep(60))  # stops within moments
one = writer.CheckpointWriter(in_background=sys.argv[2] == "True")
with one.new(sys.argv[1]) as staging:
    with staging.file_system.create_stream(staging.path / f"__{{dist.get_rank()}}_0.distcp", "wb") as file:
        file.write(b"shard")
while True:
    dist.barrier()
"""


def start(program: str, *arguments: object) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
    return [
        subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            env={**os.environ, **{name: str(value) for name, value in {**given, "RANK": rank}.items()}},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip


@pytest.mark.slow
def test_ends_after_a_collective_with_exit_code_0() -> None:
    """Without a wait at its end, one process in twelve aborts."""
    ranks = [rank for _ in range(ROUNDS) for rank in start(PROGRAM) if rank.communicate(timeout=120)]
    assert [rank.returncode for rank in ranks] == [0] * (2 * ROUNDS)


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [True, False])
def test_rank_stopped_while_it_writes_a_checkpoint_ends_the_other_with_one_line(
    tmp_path: Path, in_background: bool
) -> None:
    ranks = start(STOPPED, tmp_path / "checkpoint-1", in_background)
    try:
        said = ranks[0].communicate(timeout=120)[1].strip().splitlines()
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode == 1
    assert f"waited {TIMEOUT_S} s for rank 1{'.' if in_background else ' to write'}" in said[-1]
    assert not any("Traceback" in one for one in said) and not (tmp_path / "checkpoint-1").exists()
