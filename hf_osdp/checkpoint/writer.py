"""Writes checkpoints one after the other, while training waits or while it goes on."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from ..distributed.consensus import on_rank_zero
from ..distributed.mesh import rank, world_size
from ..distributed.process_group import wait_for_ranks, waiting_group
from ..distributed.stop import register_background, unregister_background
from ..errors import CheckpointError
from ..planner.plan import Plan
from .folders import complete, flush, prepare_staging
from .manifest import FileRecord

_SHARD = re.compile(r"__(\d+)_\d+\.distcp")
"""What torch.distributed.checkpoint calls a rank's files."""
_PART = ".part-{rank}.json"
_PARTS_S = 1800.0
"""How long rank 0 waits for the files that other ranks write in the background: 100 GB at 100 MB/s take 1000 s."""
_SEEN_S = 10.0
"""How long a new folder may take to be seen on another machine."""
_PAUSE_S = 0.05
T = TypeVar("T")
Part = dict[str, FileRecord]
"""Files that a rank wrote, by path inside the folder."""


class HeldFileSystem(FileSystem):
    """Keeps shards in memory, to be written later; everything else goes to the disk."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[Path, BytesIO] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """As its base's; a shard's stream is its memory."""
        if mode != "wb" or not _SHARD.fullmatch(Path(path).name):
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        self.held[Path(path)] = _Memory()
        yield self.held[Path(path)]


class _Memory(BytesIO):
    """Stays when torch closes it."""

    def close(self) -> None:
        """Not yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """A checkpoint that is being written."""

    folder: Path
    """Its final name."""
    path: Path
    """Where to write."""
    file_system: FileSystem = field(default_factory=FileSystem)
    """For shards."""


class CheckpointWriter:
    """Writes a run's checkpoints.

    Args:
        in_background: shards are copied to the host's memory, and go to the disk while training goes on. It may be changed between two.
    """

    def __init__(self, *, in_background: bool = False):
        self.in_background = in_background
        self._thread: threading.Thread | None = None
        self._error: str | None = None

    @contextmanager
    def new(self, folder: str | Path, *, plan: Plan | None = None) -> Iterator[Staging]:
        """A new checkpoint: write what it gives, and at the end it appears under its name. Collective.

        The one before must be complete first. In the background only shards are written: other files are to be there at the end. Where one
        rank raises inside, it ends, and the launcher ends the others; the checkpoint stays invisible.

        Args:
            folder: the checkpoint's name.
            plan: the one that runs.

        Raises:
            CheckpointError: this one, or the one before, cannot be written; on every rank.
        """
        self.wait()
        folder = Path(folder).resolve()
        staged = on_rank_zero(lambda: prepare_staging(folder))
        on_every_rank(lambda: _see(staged))
        system = HeldFileSystem() if self.in_background else FileSystem()
        staging = Staging(folder=folder, path=staged, file_system=system)
        try:
            yield staging
        except BaseException:
            if rank() == 0:
                shutil.rmtree(staged, ignore_errors=True)
            raise
        if isinstance(system, HeldFileSystem):
            wait_for_ranks()  # rank 0 sums what others wrote to the disk
            self._thread = threading.Thread(target=self._finish, args=(staging, plan, rank(), world_size()), name="checkpoint")
            self._thread.start()
            register_background(self.wait)
        else:
            parts = on_every_rank(lambda: _own_part(staging, rank()))
            on_rank_zero(lambda: complete(folder, parts, ranks=world_size(), plan=plan))

    def wait(self) -> None:
        """Until the last checkpoint is complete. Collective.

        Raises:
            CheckpointError: it could not be written; on every rank.
        """
        if self._thread is None:  # the same on every rank
            return
        self._thread.join()
        unregister_background(self.wait)
        error, self._thread, self._error = self._error, None, None
        _gathered(error)

    def _finish(self, staging: Staging, plan: Plan | None, number: int, ranks: int) -> None:
        """In the thread: write what is held; on rank 0 also wait for the others' parts, and complete. No collectives here."""

        def write() -> Part:
            held = staging.file_system.held
            for path in list(held):
                path.write_bytes(held.pop(path).getbuffer())
            return _own_part(staging, number)

        def end() -> None:
            if number == 0:
                parts = [part, *(_awaited(staging, other) for other in range(1, ranks))]
                complete(staging.folder, _sound(parts), ranks=ranks, plan=plan)
            else:
                _hand_in(staging, number, part)

        part = _or_line(write, number)
        if isinstance(part, str):  # the disk may be full: make room to say so
            staging.file_system.held.clear()
            _remove_own(staging, number)
        self._error = _or_line(end, number)
        if number == 0 and self._error is not None:
            shutil.rmtree(staging.path, ignore_errors=True)


def on_every_rank(act: Callable[[], T]) -> list[T]:
    """What `act` gives on each rank. Collective.

    Raises:
        CheckpointError: it failed on one; on every rank.
    """
    return _gathered(_or_line(act, rank()))


def _see(staged: Path) -> None:
    """Refuse a folder that rank 0 made and this rank's machine does not have; other machines may see it late."""
    deadline = time.monotonic() + _SEEN_S
    while not staged.is_dir():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"Rank {rank()} on {socket.gethostname()} does not see {staged}, which rank 0 made; give a folder that all machines share."
            )
        time.sleep(_PAUSE_S)


def _own_shards(staging: Staging, number: int) -> list[Path]:
    return [path for path in staging.path.rglob("*.distcp") if (match := _SHARD.fullmatch(path.name)) and int(match[1]) == number]


def _remove_own(staging: Staging, number: int) -> None:
    for path in _own_shards(staging, number):
        with suppress(OSError):
            path.unlink()


def _own_part(staging: Staging, number: int) -> Part:
    """The shards that this rank wrote, on the disk and summed."""
    mine = _own_shards(staging, number)
    for path in mine:
        flush(path)
    return {str(path.relative_to(staging.path).as_posix()): FileRecord.of(path) for path in mine}


def _or_line(act: Callable[[], T], number: int) -> T | str:
    """What `act` gives, or the line that tells of its error."""
    try:
        return act()
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return f"The checkpoint could not be written on rank {number} ({text}); the one before it is the last."


def _hand_in(staging: Staging, number: int, part: Part | str) -> None:
    """Tell rank 0's thread, by a file that is there as a whole or not."""
    said = {"error": part} if isinstance(part, str) else {"files": {name: asdict(record) for name, record in part.items()}}
    path = staging.path / _PART.format(rank=number)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(said))
    unfinished.replace(path)


def _awaited(staging: Staging, number: int) -> Part | str:
    """Another rank's part or error, once its file is there; the file is taken away."""
    path = staging.path / _PART.format(rank=number)
    deadline = time.monotonic() + _PARTS_S
    while not path.is_file():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"Checkpoint {staging.folder} is not complete: after {_PARTS_S:g} s rank 0 sees nothing that rank {number} wrote;"
                " give a folder that all machines share, or leave async_save out."
            )
        time.sleep(_PAUSE_S)
    said = json.loads(path.read_text())
    path.unlink()
    return said.get("error") or {name: FileRecord(**record) for name, record in said["files"].items()}


def _gathered(mine: Part | str | None) -> list[Part]:
    """What every rank says. Collective.

    Raises:
        CheckpointError: a rank has an error; on every rank.
    """
    said: list[Any] = [mine] * world_size()
    if world_size() > 1:
        dist.all_gather_object(said, mine, group=waiting_group())
    return _sound(said)


def _sound(said: list[Any]) -> list[Part]:
    """Parts of all ranks, of which none has an error."""
    if error := next((part for part in said if isinstance(part, str)), None):
        raise CheckpointError(error)
    return said
