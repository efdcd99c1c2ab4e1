"""Start this program again, on every rank, under a lower memory limit: the same command line in the same process.

The launcher sees no end: a process is replaced by another with its number. What it said to these processes stays true, but for the
place where they meet, which is new: nothing of the first start is in its store.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ON_OOM = ("raise", "replan")
LIMIT_VARIABLE = "OSDP_MEMORY_LIMIT_AFTER_OOM"
"""Bytes under which to plan; it only lowers what was asked for."""
COUNT_VARIABLE = "OSDP_RESTART_COUNT"
"""How many times this run started itself again."""
MOST_RESTARTS = 3
_QUIET_S = 1.0
"""For each of at most three waits for the device before the process is replaced; together less than `ending.END_S`."""
_CHANGED = (LIMIT_VARIABLE, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
_STARTED_IN = os.getcwd()


def check_on_oom(on_oom: str, *, planning: bool) -> None:
    """Refuse a value that is not known, or has no effect.

    Raises:
        ValueError: it is not one of `ON_OOM`, or there is to be no other plan than a given one.
    """
    if on_oom not in ON_OOM:
        raise ValueError(f"on_oom={on_oom!r} is not known; use one of {', '.join(ON_OOM)}.")
    if on_oom == "replan" and not planning:
        raise ValueError('plan runs a given plan as it is, so on_oom="replan" would have no effect; leave one of the two out.')


def limit_after_oom(limit_bytes: int, environment: Mapping[str, str] | None = None) -> int:
    """A memory limit, lowered where the run started again because it was too high.

    Args:
        limit_bytes: what was asked for, or what the device has.
        environment: variables to read; None reads this process's.

    Raises:
        ValueError: the variable is not a number of bytes.
    """
    text = (os.environ if environment is None else environment).get(LIMIT_VARIABLE, "")
    if not text:
        return limit_bytes
    if not text.isdecimal() or not 0 < int(text) < 2**60:
        raise ValueError(f"{LIMIT_VARIABLE}={text[:40]!r} is not a number of bytes; it is set when a run starts itself again: unset it.")
    return min(limit_bytes, int(text))


def hindrance(environment: Mapping[str, str] | None = None) -> str | None:
    """Why this process cannot start again by its command line; None where it can.

    Args:
        environment: variables to read; None reads this process's.
    """
    import torch.distributed as dist

    from . import lifeline

    environment = os.environ if environment is None else environment
    if _restarts(environment) >= MOST_RESTARTS:
        return f"it did so {MOST_RESTARTS} times"
    if multiprocessing.parent_process() is not None or "ipykernel" in sys.modules or hasattr(sys, "ps1"):
        return "a notebook, or another program, holds this process; set the limit there and start it again"
    if os.name != "posix" or not sys.executable or len(sys.orig_argv) < 2 or sys.orig_argv[-1] == "-" or sys.argv[:1] == [""]:
        return "the command line that started it is not known"
    if dist.is_initialized() and dist.get_world_size() > 1 and lifeline.current() is None:
        return "ranks have no lifeline"
    return None


def start_again(limit_bytes: int) -> str:
    """Start again, with all other ranks where there are any. Returns only where that failed: why."""
    from . import lifeline

    line = lifeline.current()
    if line is None:
        replace_this_process({LIMIT_VARIABLE: str(limit_bytes)})
    line.start_again(limit_bytes)
    return "another rank ended before"


def common_variables(limit_bytes: int, host: str) -> str:
    """On rank 0: what all ranks change in their environment, as JSON. They meet at a port that rank 0 opens, and no launcher.

    Args:
        limit_bytes: the limit to plan under.
        host: rank 0's machine as others reach it.
    """
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    return json.dumps(dict(zip(_CHANGED, (str(limit_bytes), host, str(port), "False"), strict=True)))


def read_variables(text: str) -> dict[str, str]:
    """What `common_variables` wrote, and nothing else.

    Raises:
        ValueError: it is something else.
    """
    said = json.loads(text)
    if (
        not isinstance(said, dict)
        or tuple(said) != _CHANGED
        or not all(isinstance(value, str) and "\0" not in value for value in said.values())
    ):
        raise ValueError("These are not the variables of a new start.")
    return said


def replace_this_process(variables: Mapping[str, str]) -> Any:
    """Run the command line again in this process, which does not return; any thread may call it.

    Args:
        variables: what is to be different in the environment.

    Raises:
        OSError: the system does not do it.
    """
    for child in multiprocessing.active_children():  # workers of data loaders: their parent would seem alive
        child.kill()
    for number in _open_files():
        with suppress(OSError):  # the one that listed them
            os.set_inheritable(number, number <= 2)  # ports, devices: what stays open stays taken
    _end_kernels()
    environment = {**_first_environment(), **variables, COUNT_VARIABLE: str(_restarts(os.environ) + 1)}
    os.chdir(_STARTED_IN)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _end_kernels() -> None:
    """Let no kernel of this program run when the next one begins: it would hold memory, and write to it.

    Kernels of NCCL wait for ranks that have left, so that those that do not end by themselves are aborted. Each of the two may hang
    where the device has failed: it then has `_QUIET_S`. What aborted work raises in other threads is held back.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or _within(_QUIET_S, torch.cuda.synchronize):
        return
    sys.excepthook = lambda *_: time.sleep(3 * _QUIET_S)  # the main thread must not end before the program is replaced
    _within(_QUIET_S, _abort_communicators)
    if not _within(_QUIET_S, torch.cuda.synchronize):
        print("hf_osdp: Kernels still run on the device as this process starts again.", file=sys.stderr, flush=True)


def _within(seconds: float, call: Callable[[], object]) -> bool:
    """Whether a call ended in time, and without an error."""
    done: list[bool] = []

    def run() -> None:
        with suppress(Exception):
            call()
            done.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(done)


def _abort_communicators() -> None:
    """Abort NCCL's, all together: one after the other may deadlock (pytorch/pytorch#119797)."""
    import torch
    import torch.distributed as dist

    backends = []
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # a group of gloo
            backends.append(group._get_backend(torch.device("cuda")))
    backends = [backend for backend in backends if backend.name() == "nccl"]
    if backends:
        backends[0]._group_start()
        for backend in backends:
            backend.abort()
        backends[0]._group_end()


def _restarts(environment: Mapping[str, str]) -> int:
    text = environment.get(COUNT_VARIABLE, "")
    return int(text) if text.isdecimal() else 0


def _open_files() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return list(range(1024))


def _first_environment() -> dict[str, str]:
    """As this process was started: libraries have changed it since."""
    try:
        pairs = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)
    found = {os.fsdecode(name): os.fsdecode(value) for name, _, value in (pair.partition(b"=") for pair in pairs if pair)}
    return found if "PATH" in found else dict(os.environ)  # a process that gave itself a title has written over them
