"""Start again after an interruption, and after running out of device memory under a lower limit.

Several ranks are started again by their launcher (`torchrun --max-restarts`); the limit travels in a file of the user's on the machine
whose rank ran out of memory, and `check_ranks` tells it to all ranks. A single process starts its own command line again.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import torch

LIMIT_VARIABLE = "OSDP_MEMORY_LIMIT_AFTER_OOM"
"""Bytes under which to plan; it only lowers what was asked for."""
COUNT_VARIABLE = "OSDP_RESTART_COUNT"
"""How many times a single process started itself again."""
MOST_RESTARTS = 3
_LAUNCHER_VARIABLE = "TORCHELASTIC_RUN_ID"
_STARTED_IN, _STARTED_WITH = os.getcwd(), dict(os.environ)
"""Libraries change the environment later."""


def restart_count() -> int:
    """Return how many times torchrun, SLURM, or hf_osdp after running out of memory, started this run again."""
    return max(_count(name) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", COUNT_VARIABLE))


def limit_after_oom(limit_bytes: int) -> int:
    """Return a memory limit, lowered where the run started again because it was too high; see `lowered_limit`."""
    return min(limit_bytes, lowered_limit() or limit_bytes)


def lowered_limit() -> int | None:
    """Return the bytes that were noted when a rank of this machine ran out of memory; None where none did."""
    text, path = os.environ.get(LIMIT_VARIABLE, ""), _note()
    if not text and restart_count() and path is not None and path.is_file() and path.stat().st_uid == os.getuid():
        text = path.read_text(encoding="ascii", errors="replace")
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text) < 2**60:
        raise ValueError(f"{LIMIT_VARIABLE}={text[:40]!r} is not a number of bytes; it is set when a run starts itself again: unset it.")
    return int(text)


def reason_not_to_restart() -> str | None:
    """Return why this run cannot start again under a lower limit; None where it can."""
    if _LAUNCHER_VARIABLE in os.environ:
        if _count("TORCHELASTIC_RESTART_COUNT") < _count("TORCHELASTIC_MAX_RESTARTS"):
            return None
        return "the launcher has no restarts left; start it with --max-restarts 3 (accelerate launch: --max_restarts 3)"
    if _count("WORLD_SIZE") > 1:
        return "several ranks need a launcher that starts them again: torchrun --max-restarts 3"
    if _count(COUNT_VARIABLE) >= MOST_RESTARTS:
        return f"it did so {MOST_RESTARTS} times"
    if multiprocessing.parent_process() is not None or "ipykernel" in sys.modules or hasattr(sys, "ps1"):
        return "a notebook, or another program, holds this process; set the limit there and start it again"
    if os.name != "posix" or not sys.executable or len(sys.orig_argv) < 2 or sys.orig_argv[-1] == "-" or sys.argv[:1] == [""]:
        return "the command line that started it is not known"
    return None


def restart(limit_bytes: int, message: str) -> None:
    """Have the next start plan under a lower limit. Return where a launcher starts it, once this process fails; else do not return."""
    if (note := _note()) is not None:
        note.unlink(missing_ok=True)
        with open(os.open(note, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="ascii") as file:
            file.write(str(limit_bytes))
        return
    print(message, file=sys.stderr, flush=True)
    for child in multiprocessing.active_children():  # workers of data loaders: their parent would seem alive
        child.kill()
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):
            torch.cuda.synchronize()  # no kernel of this program runs when the next one begins
    for number in range(3, 1024):  # the next program could not have ports and devices that stay open
        with suppress(OSError):
            os.set_inheritable(number, False)
    os.chdir(_STARTED_IN)
    changed = {LIMIT_VARIABLE: str(limit_bytes), COUNT_VARIABLE: str(_count(COUNT_VARIABLE) + 1)}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**_STARTED_WITH, **changed})


def _note() -> Path | None:
    """Return where ranks of one launcher note a limit: named by its process, and since when that runs; None without a launcher."""
    if _LAUNCHER_VARIABLE not in os.environ:
        return None
    launcher = psutil.Process(os.getppid())
    return Path(tempfile.gettempdir()) / f"hf_osdp-limit-{os.getuid()}-{launcher.pid}-{launcher.create_time()}"


def _count(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0
