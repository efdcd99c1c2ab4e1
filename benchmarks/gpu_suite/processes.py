"""Run a part of a step in a separate process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def apart(fn: Callable[..., Any], *args: Any, **env: str) -> Any:
    """Return the function's result from a separate process with these variables, whose allocator is freed at its
    end.
    """
    kept = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(fn, *args).result()
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
