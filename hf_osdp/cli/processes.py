"""Processes that search beside the command; they import the planner alone, neither torch nor transformers."""

from __future__ import annotations

import copyreg
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from types import MappingProxyType
from typing import Any

AT_ONCE = 2
"""Searches at the same time: each takes some 200 MB."""
copyreg.pickle(MappingProxyType, lambda mapping: (_read_only, (dict(mapping),)))  # fields of hardware


@contextmanager
def searching_processes() -> Iterator[Executor]:
    """Yield an executor of a process for each core, `AT_ONCE` at most; they start when they are first used."""
    from ..measurement.timing import usable_cores  # imports torch

    executor = ProcessPoolExecutor(min(AT_ONCE, usable_cores()), get_context("spawn"), _leave_interrupts)
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def _read_only(mapping: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(mapping)


def _leave_interrupts() -> None:
    """Leave Ctrl-C to the command, which then ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
