"""Parts of several benchmarks."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def start_ranks(
    program: str, world_size: int, *words: str, as_rank: tuple[str, ...] = ("--as-rank",)
) -> list[dict[str, Any]]:
    """Run `program --as-rank RESULT WORDS` on gloo ranks of this machine; `as_rank` replaces the first word.

    Returns:
        The JSON rows that rank 0 wrote to the file RESULT.
    """
    with tempfile.TemporaryDirectory(prefix="hf_osdp_benchmark_") as folder:
        result = Path(folder) / "rows.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={world_size}",
            program,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run([*command, *as_rank, str(result), *words], env=environment, check=True)
        return json.loads(result.read_text(encoding="utf-8"))


def commit() -> str:
    """Return the commit of the checkout, marked if files differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    except OSError:  # git is not installed
        return "unknown"
    if found.returncode:
        return "unknown"
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True
    ).stdout.strip()
    return found.stdout.strip() + (" with changes" if changed else "")


class Forks:
    """Ranks that are forks of this process, which has imported what they need, each with a pipe to it.

    `serve(pipe, rank, *args)` runs in each, with the variables of torchrun if `launched`. What it prints is dropped,
    unless it raises.
    """

    def __init__(
        self, serve: Callable[..., None], *args: Any, world_size: int, title: str, launched: bool = True
    ) -> None:
        fork = multiprocessing.get_context("fork")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.title = title
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = fork.Pipe()
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
                         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
            own = (theirs, variables if launched else {}, f"{title}, rank {rank}", serve, rank, args)
            process = fork.Process(target=_serve, args=own, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def answers(self) -> list[Any]:
        """Return what each rank sends next, or raise EOFError, and end all, if one has failed."""
        try:
            return [pipe.recv() for pipe in self._pipes]
        except EOFError:
            self.end()
            raise

    def ask(self, question: Any) -> list[Any]:
        """Send a question to all ranks, and return their answers."""
        for pipe in self._pipes:
            pipe.send(question)
        return self.answers()

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(
    pipe: Connection, variables: dict[str, Any], title: str, serve: Callable[..., None], rank: int, args: Any
) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent, even if it is killed
    os.environ.update({name: str(value) for name, value in variables.items()})
    errors = os.dup(2)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        serve(pipe, rank, *args)
    except BaseException:
        os.write(errors, f"{title}:\n{traceback.format_exc()}".encode())
        os._exit(1)
    os._exit(0)
