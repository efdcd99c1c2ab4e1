"""Start again under a lower limit after running out of device memory.

The launcher starts all ranks again (`torchrun --max-restarts`). Until then a file of the user on the
machine whose rank ran out of memory holds the limit; planning uses the lowest of all ranks.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import psutil

from .launcher import restart_count, restarts_left
from .process_group import all_gather_objects


def limit_after_oom(limit_bytes: int) -> int:
    """Return a memory limit, lowered if this run was restarted because the limit was too high. Collective."""
    return min(limit_bytes, *(limit or limit_bytes for limit in all_gather_objects(_noted_limit())))


def reason_not_to_restart() -> str | None:
    """Return why this run cannot start again under a lower limit; None if it can."""
    if (left := restarts_left()) is None:
        return "no launcher starts it again; use that memory_limit, or torchrun --max-restarts 3 (accelerate launch: --max_restarts 3)"  # noqa: E501
    if not left:
        return (
            "the launcher has no restarts left; start it with --max-restarts 3 (accelerate launch: --max_restarts 3)"
        )
    return None


def note_limit(limit_bytes: int) -> None:
    """Write the lower limit under which the next start plans; a lower one of another rank stays."""
    path = _limit_file()
    lowest = min(limit_bytes, _read(path) or limit_bytes)
    with tempfile.NamedTemporaryFile("w", encoding="ascii", dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(str(lowest))
    os.replace(file.name, path)


def _noted_limit() -> int | None:
    """Return the limit in bytes that was noted when a rank of this machine ran out of memory; None if none did."""
    return None if restarts_left() is None or not restart_count() else _read(_limit_file())


def _read(path: Path) -> int | None:
    """Return the limit in this user's file; None if there is none."""
    if not path.is_file() or path.stat().st_uid != os.getuid():
        return None
    text = path.read_text(encoding="ascii", errors="replace")
    return int(text) if text.isdecimal() else None


def _limit_file() -> Path:
    """Return the file in which ranks of one launcher note a limit, named after the launcher's process id and start
    time.
    """
    launcher = psutil.Process(os.getppid())
    return Path(tempfile.gettempdir()) / f"hf_osdp-limit-{os.getuid()}-{launcher.pid}-{launcher.create_time()}"
