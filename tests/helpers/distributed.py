"""Run a function on several gloo ranks of this machine, and leave nothing behind."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
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
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed import TCPStore

from .rank import ROOT, main

_GRACE_S = 3.0
"""How long the other ranks may go on, to end by themselves, once one has failed."""
_OUTPUT_TAIL = 4000
_EXIT_TIMEOUT = 1
"""What `faulthandler.dump_traceback_later(exit=True)` ends a process with."""
_FIXED = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Packages read these when they are imported."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
_SLOW_PACKAGES = (
    "torch.distributed.checkpoint", "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama", "transformers.trainer", "datasets", "pytest",
    "hf_osdp.integrations.plain_loop",
    "hf_osdp.integrations.trainer", "hf_osdp.cli.app", "ortools.sat.python.cp_model", "pydantic", "torch.profiler",
)  # fmt: skip
"""What ranks import, which takes one some seconds."""


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

    def __init__(self, process: Any, connection: Connection, output: Path):
        self.connection, self._process, self._output = connection, process, output
        self.pid: int = process.pid

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    @property
    def output(self) -> str:
        """Its stdout and stderr."""
        return self._output.read_text(errors="replace")

    def hear(self) -> dict[str, Any]:
        """What it says next: its result, or its error with type and time, also if it ended without a word."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._process.join(_GRACE_S)
            return {"type": "timeout" if self.poll() == _EXIT_TIMEOUT else "died", "time": time.time()}

    def end(self) -> None:
        """Kill its session and reap it."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.kill()  # where it has no session yet
        self._process.join()
        self.connection.close()


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
        return [pickle.loads(said["result"]) for said in _heard(ranks, timeout_s)]


def _heard(ranks: list[Rank], timeout_s: float) -> list[dict[str, Any]]:
    """What each rank says to a call; once one has failed, the others have little time to end by themselves."""
    deadline, said = time.monotonic() + timeout_s + _GRACE_S, dict[int, dict[str, Any]]()
    numbers = {rank.connection: number for number, rank in enumerate(ranks)}
    while len(said) < len(ranks) and (left_s := deadline - time.monotonic()) > 0:
        for connection in wait([one for one, number in numbers.items() if number not in said], left_s):
            number = numbers[connection]
            said[number] = ranks[number].hear()
            if "type" in said[number]:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    errors = {number: one for number, one in said.items() if "type" in one}
    if len(said) < len(ranks) and not errors:
        errors = {number: {"type": "timeout", "time": 0.0} for number in range(len(ranks)) if number not in said}
    if errors:
        raise _failure(ranks, errors, timeout_s)
    return [said[number] for number in range(len(ranks))]


def _failure(ranks: list[Rank], errors: Mapping[int, dict[str, Any]], timeout_s: float) -> RankFailure:
    """The error of the rank that failed first, with every other rank's state in a line."""

    def order(number: int) -> tuple[bool, float]:
        """A rank that died raises nothing itself; the others then do because they lost it."""
        return (ranks[number].poll() or 0) >= 0, errors[number]["time"]

    first, *later = sorted(errors, key=order)
    error, code = errors[first], ranks[first].poll()
    if "traceback" in error:
        then = ", ".join(f"rank {number}: {errors[number]['type']}" for number in later)
        message = f"rank {first} of {len(ranks)} raised\n{error['traceback']}" + (f"\nthen {then}" if then else "")
    else:
        ended = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        what = f"did not end within {timeout_s} s" if error["type"] == "timeout" else ended
        silent = [number for number in sorted(errors) if "traceback" not in errors[number]]
        outputs = (f"\n--- rank {number}\n{ranks[number].output[-_OUTPUT_TAIL:]}" for number in silent)
        message = f"rank {first} {what} (exit codes {[rank.poll() for rank in ranks]}){''.join(outputs)}"
    return RankFailure(message, rank=first, error_type=error["type"])


class _SharedRanks:
    """Ranks that serve calls, one after the other, until one fails or replaces something."""

    def __init__(self, world_size: int, nodes: int):
        self.closing, self._served = ExitStack(), list[str]()
        self._ranks = self.closing.enter_context(_started(world_size, _LONGEST_S, nodes=nodes, shared=True))

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> tuple[list[Any], bool]:
        """What each rank returned, and whether the ranks can serve another call."""
        try:
            _send(self._ranks, fn, args, timeout_s)
            said = _heard(self._ranks, timeout_s)
        except RankFailure as error:
            error.args = (f"{error}\nThese ranks had served: {', '.join(self._served) or 'nothing'}.",)
            raise
        self._served.append(fn.__qualname__)
        return [pickle.loads(one["result"]) for one in said], not any(one["changed"] for one in said)


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
    with _started(world_size, timeout_s, init=init, env=env, nodes=nodes, one_gpu=one_gpu) as ranks:
        _send(ranks, fn, args, timeout_s)
        yield ranks


def _send(ranks: list[Rank], fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> None:
    _check_importable(fn)
    call = pickle.dumps((timeout_s, dict(os.environ), pickle.dumps(fn), pickle.dumps(args)))
    for rank in ranks:
        rank.connection.send_bytes(call)


@contextmanager
def _started(
    world_size: int, timeout_s: float, *, init: bool = True, env: Mapping[str, str] | None = None, nodes: int = 1,
    one_gpu: bool = False, shared: bool = False,
) -> Iterator[list[Rank]]:  # fmt: skip
    """Processes that wait for calls."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    on_node = world_size // nodes
    common = {
        **os.environ, **_FIXED, "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "LOCAL_WORLD_SIZE": str(on_node), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0", "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }  # fmt: skip
    # The group waits longer than a call may take: the stacks of all ranks tell more than gloo's own time-out on one.
    group_s = timeout_s + 60 if init else 0.0
    with tempfile.TemporaryDirectory(prefix="hf_osdp_ranks_") as folder:
        ranks: list[Rank] = []
        try:
            for rank in range(world_size):
                place = {"RANK": rank, "LOCAL_RANK": rank % on_node, "GROUP_RANK": rank // on_node}
                own = {name: str(number) for name, number in place.items()}
                variables = {**common, **own, **(_on_one_gpu(rank) if one_gpu else {}), **(env or {})}
                output = Path(folder, f"output{rank}")
                ours, its = multiprocessing.Pipe()
                arguments = (its, str(output), variables, group_s, shared)
                # Packages take processes of other names for workers of a loader.
                process = _processes(one_gpu)(target=main, args=arguments, name="MainProcess")
                process.start()
                its.close()
                ranks.append(Rank(process, ours, output))
            yield ranks
        finally:
            for rank in ranks:
                rank.end()


@functools.cache
def _processes(one_gpu: bool) -> Callable[..., Any]:
    """Forks of one process that has imported the slow packages once, which has one thread of Python's, forms no group
    and sets nothing; or new processes, as CUDA cannot be used in a fork.
    """
    if one_gpu:
        return multiprocessing.get_context("spawn").Process
    more = filter(None, os.environ.get("OSDP_TEST_PRELOAD", "").split(","))
    forkserver.set_forkserver_preload([*_SLOW_PACKAGES, *more, "tests.helpers.frozen"])
    with mock.patch.dict(os.environ, {**_FIXED, "PYTHONPATH": str(ROOT)}):
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver").Process


def _on_one_gpu(rank: int) -> dict[str, str]:
    """With these NCCL lets several ranks share a GPU: it takes each for a machine of its own (NCCL_HOSTID), and sends
    through the loopback interface. Right for what is correct; times mean nothing."""
    return {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0], "LOCAL_RANK": "0",
        "NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
    }  # fmt: skip


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
