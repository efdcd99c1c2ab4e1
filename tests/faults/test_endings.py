"""Programs that end right after a collective end with exit code 0."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

ROUNDS = 10
PROGRAM = """
import torch, torch.distributed as dist
from hf_osdp.sharding.environment import form_process_group
form_process_group(needed=True, device_type="cpu")
for _ in range(20):
    dist.all_gather([torch.zeros(1000) for _ in range(2)], torch.ones(1000))
"""


@pytest.mark.slow
def test_ends_after_a_collective_with_exit_code_0() -> None:
    """Without a wait at its end, one process in twelve aborts."""
    codes = []
    for _ in range(ROUNDS):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                env={**os.environ, **{name: str(value) for name, value in {**given, "RANK": rank}.items()}},
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]  # fmt: skip
        codes += [rank.wait(timeout=120) for rank in ranks]
    assert codes == [0] * (2 * ROUNDS)
