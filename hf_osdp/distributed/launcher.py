"""Environment variables of launchers, torch and users. No other module of this package reads them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import PurePath


def variables() -> Mapping[str, str]:
    """Return the environment as it is now."""
    return os.environ


def variable(name: str, default: str = "") -> str:
    """Return a variable, or the default if it is not set."""
    return os.environ.get(name, default)


def set_variable(name: str, value: str) -> None:
    """Set a variable for libraries that read it later, and for processes that this one starts."""
    os.environ[name] = value


def is_on(name: str) -> bool:
    """Return whether a variable is set to true, as Accelerate writes it."""
    return variable(name, "false").lower() in ("1", "true", "yes")


def number(name: str, default: int = 0) -> int:
    """Return a variable of the launcher as a number; raise ValueError unless it is a whole number of at least 0."""
    text = variable(name, str(default))
    if re.fullmatch("[0-9]{1,9}", text):
        return int(text)
    raise ValueError(f"{name}={text[:40]!r} is not a whole number of at least 0; let the launcher set it.")


def launched_rank() -> int:
    """Return this process's rank as the launcher set it, before any process group exists; 0 without a launcher."""
    return number("RANK")


def launched_world_size() -> int:
    """Return how many processes the launcher started; 1 without a launcher."""
    return number("WORLD_SIZE", 1)


def is_torchruns_store() -> bool:
    """Return whether the store of `env://` is torchrun's, which outlives ranks."""
    return variable("TORCHELASTIC_USE_AGENT_STORE") == "True"


def launches(*, restarted: bool = False) -> set[str]:
    """Return names of this process's launch, which stay the same when torchrun or SLURM starts it again.

    torchrun's run id is `none` unless a user sets it, so it is taken from the folder of its logs, of which each
    launcher makes one of its own: `none_4f0c9a1e/attempt_0/0/error.json`. With `restarted`, only launches that count
    a restart.
    """
    parts = PurePath(variable("TORCHELASTIC_ERROR_FILE")).parts
    run = parts[-4] if len(parts) >= 4 else variable("TORCHELASTIC_RUN_ID")
    counts = {
        f"torchrun {run}": "TORCHELASTIC_RESTART_COUNT",
        f"slurm {variable('SLURM_JOB_ID')}": "SLURM_RESTART_COUNT",
    }
    return {name for name, count in counts.items() if not restarted or _count(count)}


def restart_count() -> int:
    """Return how many times torchrun or SLURM started this run again."""
    return max(map(_count, ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")))


def restarts_left() -> int | None:
    """Return how many restarts of this run torchrun has left; None if it has not started this process."""
    return (
        None if not variable("TORCHELASTIC_RUN_ID") else max(0, most_restarts() - _count("TORCHELASTIC_RESTART_COUNT"))
    )


def most_restarts() -> int:
    """Return how often torchrun may start this run again; 0 if it has not started this process."""
    return _count("TORCHELASTIC_MAX_RESTARTS")


def _count(name: str) -> int:
    return number(name) if variable(name) else 0
