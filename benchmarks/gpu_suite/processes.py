"""Parts of a step that need a process of their own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def apart(fn: Callable[..., Any], *args: Any, **env: str) -> Any:
    """The function's result from a process of its own, with these variables: what a failed step leaves in the allocator dies with it."""
    kept = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(fn, *args).result()
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
