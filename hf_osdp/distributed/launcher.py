"""The process environment: what launchers, torch and users have set. Nothing else of this package reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..quantities import whole_number


def variables() -> Mapping[str, str]:
    """Return the environment as it is now."""
    return os.environ


def variable(name: str, default: str = "") -> str:
    """Return a variable, or the default where it is not set."""
    return os.environ.get(name, default)


def set_variable(name: str, value: str) -> None:
    """Set a variable for libraries that read it later, and for processes that this one starts."""
    os.environ[name] = value


def is_on(name: str) -> bool:
    """Return whether a variable says yes, as Accelerate writes it."""
    return variable(name, "false").lower() in ("1", "true", "yes")


def launched_rank() -> int:
    """Return this process's rank as the launcher set it, before any process group exists; 0 without a launcher."""
    return whole_number(os.environ, "RANK", 0)


def launched_world_size() -> int:
    """Return how many processes the launcher started; 1 without a launcher."""
    return whole_number(os.environ, "WORLD_SIZE", 1)


def local_rank() -> int:
    """Return this process's number on its machine; 0 without a launcher."""
    return whole_number(os.environ, "LOCAL_RANK", 0)


def forms_group() -> bool:
    """Return whether a launcher has set all that `env://` takes."""
    return all(map(variable, ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")))


def master_port() -> int:
    """Return the port of rank 0's store; 0 without a launcher."""
    return whole_number(os.environ, "MASTER_PORT", 0)


def master_address() -> str:
    """Return where rank 0's store listens, for messages."""
    return f"{variable('MASTER_ADDR', 'unknown')}:{variable('MASTER_PORT', 'unknown')}"


def node_number() -> str | None:
    """Return torchrun's number of its agent on this machine; None where torchrun has not started this process."""
    return variable("GROUP_RANK") if "LOCAL_WORLD_SIZE" in os.environ and "GROUP_RANK" in os.environ else None


def is_torchruns_store() -> bool:
    """Return whether the store of `env://` is torchrun's, which outlives ranks."""
    return variable("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restarts_itself() -> bool:
    """Return whether torchrun started this process, and watches it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restart_count() -> int:
    """Return how many times torchrun or SLURM started this run again."""
    return max(map(_count, ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")))


def restarts_left() -> int:
    """Return how many times torchrun would start this run again."""
    return max(0, most_restarts() - _count("TORCHELASTIC_RESTART_COUNT"))


def most_restarts() -> int:
    """Return torchrun's `--max-restarts`."""
    return _count("TORCHELASTIC_MAX_RESTARTS")


def _count(name: str) -> int:
    text = variable(name)
    return int(text) if text.isdecimal() else 0
