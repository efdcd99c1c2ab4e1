"""Whether a start goes on from where this training was interrupted, and which checkpoints are an earlier training's.

`.partial/older.json` in the output folder has both: the launchers that started this training, and the checkpoints that lay there then.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from ..distributed.consensus import on_rank_zero
from ..distributed.mesh import world_size
from ..distributed.restart import restart_count
from ..errors import CheckpointError
from ..planner.files import validated
from ..reading import read_json
from .folders import PARTIAL, numbered_checkpoints
from .manifest import MANIFEST_NAME

T = TypeVar("T")
_NAME = "older.json"
_LAUNCHERS = {"torchrun", "torch.distributed.run", "accelerate", "accelerate-launch"}
"""Programs that launch once in their life; a notebook, which forks its ranks itself, does so again and again."""
_noted: set[Path] = set()
"""Output folders for which this process wrote a note: what begins there is another training of the same program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """What `older.json` has."""

    launchers: tuple[str, ...] = ()
    checkpoints: dict[str, str]
    """By name, what tells each from one that is written under its name later."""


def is_restart(folder: str | Path) -> bool:
    """Whether this start goes on with a training that was interrupted. Collective.

    torchrun counts restarts on each machine for itself, SLURM counts how often it requeued a job, and hf_osdp how often it began again
    after running out of memory: one count above 0 is enough. Where machines come and go torchrun counts nothing; then the training was
    started by a launcher that is still the same.

    Args:
        folder: the training's output.
    """
    counts, launchers = zip(*_of_every_rank((restart_count(), _launcher())), strict=True)
    return max(counts) > 0 or on_rank_zero(lambda: _same_launch(Path(folder), {name for name in launchers if name}))


def begin_anew(folder: str | Path) -> None:
    """Note what checkpoints an earlier training left in a folder: a restart of this one will not go on from them. Call it at a start
    that is not told to go on from the last; in a restart it does nothing. Collective."""
    if not is_restart(folder):
        _write(folder, lambda path: {found.name: _mark(found) for found in numbered_checkpoints(path)})


def go_on(folder: str | Path) -> None:
    """The reverse, where a training is told to go on from the last checkpoint: what is there is its own. Collective."""
    _write(folder, lambda path: {})


def of_earlier_training(folder: Path) -> set[Path]:
    """The checkpoints in a folder that were there when this training began.

    Raises:
        CheckpointError: the note is damaged.
    """
    noted = _read(folder)
    older = noted.checkpoints if noted else {}
    return {path for path in numbered_checkpoints(folder) if older.get(path.name) == _mark(path)}


def _same_launch(folder: Path, launchers: set[str]) -> bool:
    """Whether one of these launchers started the training that was noted; not where this process has noted it itself."""
    if not launchers or folder.resolve() in _noted:
        return False
    noted = _read(folder)
    return noted is not None and not launchers.isdisjoint(noted.launchers)


def _launcher() -> str | None:
    """This machine's torchrun, told from others that had its process id; None without one, or where the system does not say."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent = Path(f"/proc/{os.getppid()}")
    try:
        words = (parent / "cmdline").read_text().split("\0")
        after_name = (parent / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if _LAUNCHERS.isdisjoint(Path(word).name for word in words[:4]):  # the interpreter, its options, the program
        return None
    return f"{socket.gethostname()} {os.getppid()} {after_name[19]}"  # since when it runs: field 22 of proc(5)


def _of_every_rank(mine: T) -> list[T]:
    found = [mine] * world_size()
    if world_size() > 1:
        dist.all_gather_object(found, mine)
    return found


def _write(folder: str | Path, older: Callable[[Path], dict[str, str]]) -> None:
    launchers = {name for name in _of_every_rank(_launcher()) if name}
    on_rank_zero(lambda: _write_note(Path(folder), _Note(launchers=tuple(sorted(launchers)), checkpoints=older(Path(folder)))))


def _write_note(folder: Path, note: _Note) -> None:
    """Only where it says something. A folder that cannot be written is the preflight's, or the first checkpoint's, to tell of."""
    _noted.add(folder.resolve())
    path = folder / PARTIAL / _NAME
    unfinished = path.with_suffix(".unfinished")
    with suppress(OSError):
        if not note.launchers and not note.checkpoints:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(asdict(note)), encoding="utf-8")
        unfinished.replace(path)


def _read(folder: Path) -> _Note | None:
    def error(line: str) -> CheckpointError:
        return CheckpointError(f"{line.rstrip('.')}. Remove it to go on from the last checkpoint, whichever training wrote it.")

    path = folder / PARTIAL / _NAME
    if not path.is_file():
        return None
    said = read_json(path, "note of older checkpoints", error)
    return validated(_Note, said, lambda problem: error(f"{path} is no note of older checkpoints ({problem})"))


def _mark(path: Path) -> str:
    """Tells a checkpoint from one that is written under its name later."""
    manifest = path / MANIFEST_NAME
    status = (manifest if manifest.is_file() else path).stat()
    return f"{status.st_ino}-{status.st_mtime_ns}"
