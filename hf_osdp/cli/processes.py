"""Processes that search beside the command; they import the planner alone, neither torch nor transformers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

AT_ONCE = 2
"""Searches at the same time: each takes some 200 MB."""


@contextmanager
def searching_processes() -> Iterator[Executor]:
    """Yield an executor of a process for each core, `AT_ONCE` at most; they start when they are first used.

    Ctrl-C ends the command alone, which then ends them.
    """
    from ..measurement.timing import usable_cores  # imports torch

    executor = ProcessPoolExecutor(
        min(AT_ONCE, usable_cores()), get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN)
    )
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)
