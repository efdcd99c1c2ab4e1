"""Run a function on several gloo ranks of this machine, and leave nothing behind."""

from __future__ import annotations

import functools
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

_ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 3.0
"""How long the other ranks may go on, to end by themselves, once one has failed."""
_POLL_S = 0.02
_OUTPUT_TAIL = 4000
_EXIT_TIMEOUT = 1
"""What `faulthandler.dump_traceback_later(exit=True)` ends a process with."""
_FIXED = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Packages read these when they are imported."""


class RankFailure(AssertionError):
    """A rank raised, died or ran out of time.

    Attributes:
        rank: the rank that failed first.
        error_type: class name of what it raised; `"died"` or `"timeout"` where it raised nothing.
    """

    def __init__(self, message: str, *, rank: int, error_type: str):
        super().__init__(message)
        self.rank = rank
        self.error_type = error_type


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    init: bool = True,
    env: Mapping[str, str] | None = None,
    nodes: int = 1,
    one_gpu: bool = False,
) -> list[Any]:
    """Call `fn(*args)` on `world_size` fresh processes that form one gloo process group.

    Each process has what `torchrun` sets (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, ...), one OpenMP thread, and the
    repository on its path; torch and transformers are imported already (see `forking`). The rendezvous store listens on a port
    that the system picked, so runs cannot collide.

    Args:
        fn: a function at the top of an importable module (processes import it by name).
        world_size: number of ranks.
        *args: pickled and given to every rank.
        timeout_s: seconds after which every rank prints its stack and is ended.
        init: form the process group before `fn` is called; False leaves it to `fn`, which may do so once (a second group
            would find the addresses of the first in the store).
        env: further environment variables.
        nodes: how many nodes the ranks are told to be on, equally many on each; all run here.
        one_gpu: the ranks see this machine's first GPU, all the same one, and their NCCL takes each for a machine of its own; they
            are new processes, no forks. `fn` forms the process group.

    Returns:
        What each rank returned, in rank order (pickled: no live DTensors).

    Raises:
        RankFailure: with the traceback of the rank that failed first.
        ValueError: `fn` cannot be imported by name.
    """
    with ranks_of(fn, world_size, *args, timeout_s=timeout_s, init=init, env=env, nodes=nodes, one_gpu=one_gpu) as processes:
        task = processes[0].task
        _wait(processes, task, timeout_s)
        return [pickle.loads(_result(task, rank).read_bytes()) for rank in range(world_size)]


@contextmanager
def ranks_of(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    init: bool = True,
    env: Mapping[str, str] | None = None,
    nodes: int = 1,
    one_gpu: bool = False,
) -> Iterator[list[Rank]]:
    """The processes of `run_ranks` while they run; at the end none is left."""
    if fn.__module__ == "__main__" or "<locals>" in fn.__qualname__:
        raise ValueError(f"run_ranks needs a function at the top of an importable module, not {fn.__module__}.{fn.__qualname__}.")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    with tempfile.TemporaryDirectory(prefix="hf_osdp_ranks_") as folder:
        task = Path(folder) / "task"
        content = {"path": sys.path, "fn": pickle.dumps(fn), "args": pickle.dumps(args), "timeout_s": timeout_s, "init": init}
        task.write_bytes(pickle.dumps(content))
        processes: list[Rank] = []
        try:
            for rank in range(world_size):
                place = _place(rank, world_size // nodes) | (on_one_gpu(rank) if one_gpu else {}) | dict(env or {})
                processes.append(_start(rank, world_size, store.port, task, place, fresh=one_gpu))
            yield processes
        finally:
            for process in processes:
                _end(process)


def _place(rank: int, per_node: int) -> dict[str, str]:
    """What torchrun tells a rank of its node."""
    return {"LOCAL_RANK": str(rank % per_node), "LOCAL_WORLD_SIZE": str(per_node), "GROUP_RANK": str(rank // per_node)}


def on_one_gpu(rank: int) -> dict[str, str]:
    """With these NCCL lets several ranks share a GPU: it takes each for a machine of its own (NCCL_HOSTID), and sends through the
    loopback interface. Right for what is correct; times mean nothing."""
    return {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0], "LOCAL_RANK": "0",
        "NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
    }  # fmt: skip


def _start(rank: int, world_size: int, port: int, task: Path, env: Mapping[str, str], *, fresh: bool = False) -> Rank:
    """Start one rank in a session of its own, so that its children end with it; a fork, or a new process where it must be `fresh`."""
    variables = {
        **os.environ, **_FIXED,
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        **env,
    }  # fmt: skip
    if fresh:
        return FreshRank(task, rank, variables)
    return Rank(_ask({"task": str(task), "rank": rank, "env": variables}), task)


class Rank:
    """A rank's process, as `subprocess.Popen` shows one of its own."""

    def __init__(self, pid: int, task: Path):
        self.pid = pid
        self.task = task
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.returncode is None:
            self.returncode = _ask({"pid": self.pid})
        return self.returncode

    def wait(self) -> None:
        """Until it has ended."""
        while self.poll() is None:
            time.sleep(_POLL_S)


class FreshRank(Rank):
    """A rank that is no fork: CUDA cannot be used in a fork of a process that has asked for it."""

    def __init__(self, task: Path, rank: int, env: Mapping[str, str]):
        with _output(task, rank).open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.rank", str(task), str(rank)],
                cwd=_ROOT, env={**env, "OSDP_TEST_PARENT": str(os.getpid())}, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        super().__init__(self._process.pid, task)

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        self.returncode = self._process.poll()
        return self.returncode


def _ask(request: dict[str, Any]) -> Any:
    """One question to the process whose forks the ranks are."""
    process = _forking(os.environ.get("OSDP_TEST_PRELOAD", ""))
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"The process that forks ranks has ended with code {process.wait()}.")
    return json.loads(line)


@functools.cache
def _forking(preload: str) -> subprocess.Popen:
    """Started at the first use, one for each list of packages; it ends when its input does, with this process."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.forking"],
        cwd=_ROOT, env={**os.environ, **_FIXED, "OSDP_TEST_PRELOAD": preload}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def _wait(processes: list[Rank], task: Path, timeout_s: float) -> None:
    """Return when every rank has ended well; raise for the first that did not."""
    deadline = time.monotonic() + timeout_s + _GRACE_S
    failed_at = None
    while any(process.poll() is None for process in processes):
        failed = any(process.returncode not in (None, 0) for process in processes)
        failed_at = failed_at or (time.monotonic() if failed else None)
        if time.monotonic() > deadline or (failed_at and time.monotonic() > failed_at + _GRACE_S):
            break
        time.sleep(_POLL_S)
    if all(process.returncode == 0 for process in processes):
        return
    raise _failure(processes, task, timeout_s)


def _failure(processes: list[Rank], task: Path, timeout_s: float) -> RankFailure:
    """The error of the rank that failed first, with every other rank's state in a line."""
    codes = [process.poll() for process in processes]
    died = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
    errors = {}
    for rank in range(len(processes)):
        path = task.with_name(f"error{rank}")
        if path.exists():
            errors[rank] = pickle.loads(path.read_bytes())
    # A rank that died or ran out of time raises nothing itself; the others then do because they lost it.
    first_error = min((error["time"] for error in errors.values()), default=math.inf)
    timed_out = [rank for rank, code in enumerate(codes) if code == _EXIT_TIMEOUT and _output(task, rank).stat().st_mtime <= first_error]
    if errors and not died and not timed_out:
        rank = min(errors, key=lambda r: errors[r]["time"])
        others = ", ".join(f"rank {r}: {errors[r]['type']}" for r in sorted(errors) if r != rank)
        message = f"rank {rank} of {len(processes)} raised\n{errors[rank]['traceback']}" + (f"\nthen {others}" if others else "")
        return RankFailure(message, rank=rank, error_type=errors[rank]["type"])
    bad = died or timed_out or [rank for rank, code in enumerate(codes) if code != 0]
    what = f"was ended by signal {-codes[bad[0]]}" if died else f"did not end within {timeout_s} s"
    output = "\n".join(f"--- rank {r}\n{_output(task, r).read_text(errors='replace')[-_OUTPUT_TAIL:]}" for r in bad)
    return RankFailure(f"rank {bad[0]} {what} (exit codes {codes})\n{output}", rank=bad[0], error_type="died" if died else "timeout")


def _end(process: Rank) -> None:
    """Kill the rank's session and reap it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _result(task: Path, rank: int) -> Path:
    return task.with_name(f"result{rank}")


def _output(task: Path, rank: int) -> Path:
    return task.with_name(f"output{rank}")
