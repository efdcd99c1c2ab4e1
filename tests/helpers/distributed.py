"""Run a function on several gloo ranks of this machine, and leave nothing behind."""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from .rank import TASK, serve_calls, write

ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 3.0
"""How long the other ranks may go on, to end by themselves, once one has failed."""
_POLL_S = 0.02
_OUTPUT_TAIL = 4000
_EXIT_TIMEOUT = 1
"""What `faulthandler.dump_traceback_later(exit=True)` ends a process with."""
_FIXED = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Packages read these when they are imported."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


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


class Rank:
    """A rank's process, as `subprocess.Popen` shows one of its own, and what it leaves."""

    def __init__(self, folder: Path, number: int, pid: int, exit_code: Callable[[], int | None]):
        self.pid = pid
        self.returncode: int | None = None
        self._exit_code = exit_code
        self._result, self._error, self._output = (
            folder / f"{name}{number}" for name in ("result", "error", "output")
        )

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.returncode is None:
            self.returncode = self._exit_code()
        return self.returncode

    def end(self) -> None:
        """Kill its session and reap it."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        while self.poll() is None:
            time.sleep(_POLL_S)

    @property
    def result(self) -> Any:
        """What the function returned."""
        return pickle.loads(self._result.read_bytes())

    @property
    def error(self) -> dict[str, Any] | None:
        """What it raised: time, type and traceback."""
        return pickle.loads(self._error.read_bytes()) if self._error.exists() else None

    @property
    def output(self) -> str:
        """Its stdout and stderr."""
        return self._output.read_text(errors="replace")

    @property
    def written_s(self) -> float:
        """When it last wrote."""
        return self._output.stat().st_mtime


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0, shared: bool = False, **options: Any
) -> list[Any]:
    """Call `fn(*args)` on `world_size` fresh processes that form one gloo process group.

    Each process has what `torchrun` sets (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, ...), one OpenMP thread, and the
    repository on its path; torch and transformers are imported already (see `rank`). The rendezvous store listens on a
    port that the system picked, so runs cannot collide.

    Args:
        fn: a function at the top of an importable module (processes import it by name).
        world_size: number of ranks.
        *args: pickled and given to every rank.
        timeout_s: seconds after which every rank prints its stack and is ended.
        shared: call it on ranks that have run other tests, which takes half as long: what torch works out once for
            each operator and mesh is there. For functions that leave a process as it was; after one that fails, or
            that has replaced something, the next call gets fresh ranks.
        **options: of `ranks_of`.

    Returns:
        What each rank returned, in rank order (pickled: no live DTensors).

    Raises:
        RankFailure: with the traceback of the rank that failed first.
        ValueError: `fn` cannot be imported by name.
    """
    if shared:
        assert options.keys() <= {"nodes"}, "shared ranks have no other options"
        return _call_shared(fn, args, timeout_s, (world_size, options.get("nodes", 1)))
    with ranks_of(fn, world_size, *args, timeout_s=timeout_s, **options) as ranks:
        _wait(ranks, timeout_s)
        if any(rank.returncode != 0 for rank in ranks):
            raise _failure(ranks, timeout_s)
        return [rank.result for rank in ranks]


def _wait(ranks: list[Rank], timeout_s: float, done: Callable[[], bool] = lambda: False) -> None:
    """Until all ranks have ended, or are done, or one has failed and the others had time to end by themselves."""
    deadline, failed_s = time.monotonic() + timeout_s + _GRACE_S, math.inf
    while any([rank.poll() is None for rank in ranks]) and time.monotonic() < min(deadline, failed_s + _GRACE_S):
        if any(rank.returncode for rank in ranks):
            failed_s = min(failed_s, time.monotonic())
        elif done():
            return
        time.sleep(_POLL_S)


class _SharedRanks:
    """Ranks that serve calls, one after the other, until one fails or replaces something."""

    def __init__(self, world_size: int, nodes: int):
        self.closing = ExitStack()
        self._folder = Path(self.closing.enter_context(tempfile.TemporaryDirectory(prefix="hf_osdp_calls_")))
        for rank in range(world_size):
            os.mkfifo(self._folder / f"bell{rank}")
        self._bells = [os.open(self._folder / f"bell{rank}", os.O_RDWR) for rank in range(world_size)]
        self.closing.callback(lambda: list(map(os.close, self._bells)))
        ranks = ranks_of(serve_calls, world_size, str(self._folder), timeout_s=_LONGEST_S, nodes=nodes)
        self._ranks, self._served = self.closing.enter_context(ranks), list[str]()

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> tuple[list[Any], bool]:
        """What each rank returned, and whether the ranks can serve another call."""
        number = len(self._served)
        written = [self._folder / f"done{number}.{rank}" for rank in range(len(self._ranks))]
        call = (timeout_s, dict(os.environ), pickle.dumps(fn), pickle.dumps(args))
        write(self._folder / f"call{number}", pickle.dumps(call))
        for bell in self._bells:
            os.write(bell, b".")
        _wait(self._ranks, timeout_s, done=lambda: all(path.exists() for path in written))
        if not all(path.exists() for path in written):
            error = _failure(self._ranks, timeout_s)
            error.args = (f"{error}\nThese ranks had served: {', '.join(self._served) or 'nothing'}.",)
            raise error
        self._served.append(fn.__qualname__)
        results, changed = zip(*(pickle.loads(path.read_bytes()) for path in written), strict=True)
        return [pickle.loads(result) for result in results], not any(changed)


_SHARED: dict[tuple[int, int], _SharedRanks] = {}
"""By numbers of ranks and of nodes; those that served last come last."""
_MOST_SHARED = 3
_LONGEST_S = 24 * 3600.0


def _call_shared(fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, size: tuple[int, int]) -> list[Any]:
    _check_importable(fn)
    ranks, goes_on = _SHARED.pop(size, None) or _SharedRanks(*size), False
    try:
        results, goes_on = ranks.call(fn, args, timeout_s)
    finally:
        if goes_on:
            _SHARED[size] = ranks
        else:
            ranks.closing.close()
    if len(_SHARED) > _MOST_SHARED:
        _SHARED.pop(next(iter(_SHARED))).closing.close()
    return results


@atexit.register
def _end_shared() -> None:
    while _SHARED:
        _SHARED.popitem()[1].closing.close()


def _check_importable(fn: Callable[..., Any]) -> None:
    if fn.__module__ == "__main__" or "<locals>" in fn.__qualname__:
        raise ValueError(
            f"run_ranks needs a function at the top of an importable module, not {fn.__module__}.{fn.__qualname__}."
        )


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
    """The processes of `run_ranks` while they run; at the end none is left.

    Args:
        fn: as for `run_ranks`, like what is not named here.
        world_size: number of ranks.
        *args: given to every rank.
        timeout_s: seconds after which every rank is ended.
        init: form the process group before `fn` is called; False leaves it to `fn`, which may do so once (a second
            group would find the addresses of the first in the store).
        env: further environment variables.
        nodes: how many nodes the ranks are told to be on, equally many on each; all run here.
        one_gpu: the ranks see this machine's first GPU, all the same one, and their NCCL takes each for a machine of
            its own; they are new processes, as CUDA cannot be used in a fork. `fn` forms the process group.
    """
    _check_importable(fn)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    common = {
        **os.environ, **_FIXED, "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "LOCAL_WORLD_SIZE": str(world_size // nodes), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="hf_osdp_ranks_") as name:
        folder = Path(name)
        content = {
            "path": sys.path,
            "fn": pickle.dumps(fn),
            "args": pickle.dumps(args),
            "timeout_s": timeout_s,
            "init": init,
        }
        (folder / TASK).write_bytes(pickle.dumps(content))
        ranks: list[Rank] = []
        try:
            for rank in range(world_size):
                place = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank % (world_size // nodes)),
                    "GROUP_RANK": str(rank // (world_size // nodes)),
                }
                own = {**common, **place, **(_on_one_gpu(rank) if one_gpu else {}), **(env or {})}
                ranks.append((_new_process if one_gpu else _fork)(folder, rank, own))
            yield ranks
        finally:
            for process in ranks:
                process.end()


def _on_one_gpu(rank: int) -> dict[str, str]:
    """With these NCCL lets several ranks share a GPU: it takes each for a machine of its own (NCCL_HOSTID), and sends
    through the loopback interface. Right for what is correct; times mean nothing."""
    return {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0], "LOCAL_RANK": "0",
        "NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
    }  # fmt: skip


def _new_process(folder: Path, rank: int, env: Mapping[str, str]) -> Rank:
    with (folder / f"output{rank}").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.rank", str(folder), str(rank)],
            cwd=ROOT, env={**env, "OSDP_TEST_PARENT": str(os.getpid())}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return Rank(folder, rank, process.pid, process.poll)


def _fork(folder: Path, rank: int, env: Mapping[str, str]) -> Rank:
    server = _server(os.environ.get("OSDP_TEST_PRELOAD", ""))
    pid = _ask(server, {"folder": str(folder), "rank": rank, "env": env})
    return Rank(folder, rank, pid, lambda: _ask(server, {"pid": pid}))


def _ask(process: subprocess.Popen, request: dict[str, Any]) -> Any:
    """One question to the process whose forks the ranks are."""
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"The process that forks ranks has ended with code {process.wait()}.")
    return json.loads(line)


@functools.cache
def _server(preload: str) -> subprocess.Popen:
    """Started at the first use, one for each list of packages; it ends when its input does, with this process."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.rank", "serve"],
        cwd=ROOT, env={**os.environ, **_FIXED, "OSDP_TEST_PRELOAD": preload}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def _failure(ranks: list[Rank], timeout_s: float) -> RankFailure:
    """The error of the rank that failed first, with every other rank's state in a line."""
    codes = [rank.poll() for rank in ranks]
    died = [number for number, code in enumerate(codes) if code is not None and code < 0]
    errors = {number: rank.error for number, rank in enumerate(ranks) if rank.error}
    # A rank that died or ran out of time raises nothing itself; the others then do because they lost it.
    first_error = min((error["time"] for error in errors.values()), default=math.inf)
    timed_out = [
        number for number, rank in enumerate(ranks) if codes[number] == _EXIT_TIMEOUT and rank.written_s <= first_error
    ]
    if errors and not died and not timed_out:
        number = min(errors, key=lambda r: errors[r]["time"])
        others = ", ".join(f"rank {r}: {errors[r]['type']}" for r in sorted(errors) if r != number)
        message = f"rank {number} of {len(ranks)} raised\n{errors[number]['traceback']}" + (
            f"\nthen {others}" if others else ""
        )
        return RankFailure(message, rank=number, error_type=errors[number]["type"])
    bad = died or timed_out or [number for number, code in enumerate(codes) if code != 0]
    what = f"was ended by signal {-codes[bad[0]]}" if died else f"did not end within {timeout_s} s"
    output = "\n".join(f"--- rank {number}\n{ranks[number].output[-_OUTPUT_TAIL:]}" for number in bad)
    return RankFailure(
        f"rank {bad[0]} {what} (exit codes {codes})\n{output}", rank=bad[0], error_type="died" if died else "timeout"
    )


# ---- whole programs


def free_port() -> str:
    """A port that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    """Variables for a program that is started as a user starts one, launcher included: on the CPU, with this
    repository on its path.
    """
    return {**os.environ, **_FIXED, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **more}


def run_program(
    command: Sequence[object], *, cwd: Path = ROOT, timeout_s: float = 240.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with both outputs as text."""
    words, env = [str(word) for word in command], environment(**variables)
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s)
