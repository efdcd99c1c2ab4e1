"""Ranks that end as processes of their own do: by the interpreter's hooks, with what they wrote on stderr."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from . import distributed


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a rank ended."""

    code: int
    """Negative for a signal."""
    after_s: float
    """Seconds since the first rank ended."""
    output: str
    """stdout and stderr."""


def endings(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 30.0, one_gpu: bool = False) -> list[Ended]:
    """Call `fn(*args)` on each rank, without a process group, until all have ended by themselves; `one_gpu` as for `run_ranks`.

    Raises:
        AssertionError: they did not within the time.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="hf_osdp_endings_") as folder:
        task = Path(folder) / "task"
        content = {
            "path": sys.path,
            "fn": pickle.dumps(as_a_script),
            "args": pickle.dumps((fn, args)),
            "timeout_s": timeout_s + 30,
            "init": False,
        }
        task.write_bytes(pickle.dumps(content))
        ranks = []
        for rank in range(world_size):
            place = distributed._place(rank, world_size) | (distributed.on_one_gpu(rank) if one_gpu else {})
            ranks.append(distributed._start(rank, world_size, store.port, task, place, fresh=one_gpu))
        try:
            times = _times(ranks, time.monotonic() + timeout_s)
        finally:
            for rank in ranks:
                distributed._end(rank)
        outputs = [task.with_name(f"output{rank}").read_text() for rank in range(world_size)]
    assert len(times) == world_size, f"only ranks {sorted(times)} ended within {timeout_s} s\n" + "\n---\n".join(outputs)
    first = min(times.values())
    return [Ended(code=ranks[rank].returncode, after_s=times[rank] - first, output=outputs[rank]) for rank in range(world_size)]


def _times(ranks: list[distributed.Rank], deadline: float) -> dict[int, float]:
    """When each was seen to have ended."""
    times: dict[int, float] = {}
    while len(times) < len(ranks) and time.monotonic() < deadline:
        for number, rank in enumerate(ranks):
            if number not in times and rank.poll() is not None:
                times[number] = time.monotonic()
        time.sleep(0.01)
    return times


def as_a_script(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """On a rank: what the interpreter does with a script."""
    code = 0
    try:
        fn(*args)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(*sys.exc_info())
        code = 1
    util._exit_function()  # it is registered with atexit
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die() -> None:
    """As the kernel ends a process for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
