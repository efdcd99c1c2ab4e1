"""Errors of all ranks, which each would print, in one line on one rank."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import OSDPError, one_line
from .launcher import launched_rank, launched_world_size, number
from .process_group import lost_ranks_explained

_BETWEEN_RANKS_S = 5.0
"""Seconds that other ranks wait before they print: if rank 0 fails too, its exit makes the launcher end them. On a
machine without rank 0 its first rank prints before the others.
"""
_PACKAGE = Path(__file__).resolve().parents[1]
_log = logging.getLogger(__name__)


def say_once(error: BaseException, name: str = "error") -> None:
    """Print an error in one line on stderr; on another rank than 0 after seconds, in which the launcher ends this
    rank if rank 0 has failed too.
    """
    line = f"{name}: {one_line(error)}"
    _log.debug("%s", line, exc_info=error)
    if launched_rank():
        time.sleep(_BETWEEN_RANKS_S * (2 if number("LOCAL_RANK") else 1))
    print(line, file=sys.stderr, flush=True)


def is_ours(error: BaseException) -> bool:
    """Return whether this package wrote an error's message: of its own errors, and of `ValueError`s raised in it."""
    if isinstance(error, OSDPError) or hasattr(error, "explained_by_osdp"):
        return True
    frames = traceback.extract_tb(error.__traceback__) if isinstance(error, ValueError) else []
    return bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(_PACKAGE)


def _say_uncaught(
    before: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught error of this package, or of a rank that lost others, by `say_once`, and others as before."""
    if is_ours(error):
        say_once(error, kind.__name__)
    elif explained := lost_ranks_explained(error):
        say_once(explained.with_traceback(trace), type(explained).__name__)
    else:
        before(kind, error, trace)


def say_uncaught_once() -> None:
    """If this process is one of several, print this package's uncaught errors in one line, on one rank."""
    if launched_world_size() > 1 and getattr(sys.excepthook, "func", None) is not _say_uncaught:
        sys.excepthook = partial(_say_uncaught, sys.excepthook)
