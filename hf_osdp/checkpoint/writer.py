"""Write checkpoints one after the other, while training waits or continues."""

from __future__ import annotations

import re
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors import SafetensorError
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystem

from ..distributed.consensus import on_rank_zero
from ..distributed.mesh import rank, world_size
from ..distributed.process_group import all_gather_objects, background_group, poll, require_all
from ..distributed.stop import waits_in_background
from ..errors import CheckpointError, one_line
from ..planner.plan import Plan
from .files import full_disk, is_full_disk
from .folders import (
    FileRecord,
    Manifest,
    absolute,
    complete,
    discard_staging,
    flush,
    lock_name,
    prepare_staging,
    unlock_checkpoints,
)
from .resume import own_training

_SHARD = re.compile(r"__\d+_\d+\.distcp")
"""Names of a rank's files in torch.distributed.checkpoint."""
_VISIBLE_S = 10.0
"""How long a new folder may take to become visible on another machine."""
T = TypeVar("T")


class _Memory(BytesIO):
    def close(self) -> None:
        """Do nothing, because torch closes the stream before its content is read."""


class HeldFileSystem(FileSystem):
    """Keep shards in memory, to be written later; write all other files to the disk."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[Path, BytesIO] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:  # noqa: ANN401  # as its base class
        if mode == "wb" and _SHARD.fullmatch(Path(path).name):
            self.held[Path(path)] = _Memory()
            yield self.held[Path(path)]
            return
        with super().create_stream(path, mode) as stream:
            yield stream


class Staging(NamedTuple):
    """Where to write a checkpoint, and the file system for its shards."""

    path: Path
    file_system: FileSystem


class CheckpointWriter:
    """Write a run's checkpoints. The arguments are attributes, which may be changed between two checkpoints.

    Args:
        plan: the plan that runs.
        settings: for the manifest: settings that must not change for the same training to continue.
        in_background: copy shards to the host's memory, and write them to the disk while training continues.
    """

    def __init__(
        self, *, plan: Plan | None = None, settings: Mapping[str, str] | None = None, in_background: bool = False
    ) -> None:
        self.plan = plan
        self.settings = dict(settings or {})
        self.in_background = in_background
        self._pending: Future[None] | None = None

    @contextmanager
    def new(self, folder: str | Path, **settings: str) -> Iterator[Staging]:
        """Wait for the previous checkpoint, yield where to write a new one, and publish it under its name at the end.
        Collective.

        Only shards are written in the background: all other files must exist at the end of the context. Every rank
        raises CheckpointError if this checkpoint or the previous one cannot be written, or another run writes there.
        Ranks may write files of their own in the context, after its last collective.
        """
        given = Path(folder)
        require_all(f"Saving {given}")
        self.wait()
        folder, staged, training = on_rank_zero(lambda: _prepare(given))
        if rank() == 0:  # let other runs write there once this writer is deleted
            weakref.finalize(self, unlock_checkpoints, folder.parent, lock_name(folder))
        on_every_rank(lambda: _wait_for_folder(staged))
        staging = Staging(staged, HeldFileSystem() if self.in_background else FileSystem())
        with _discarded_after_errors(staged):
            problem = None
            try:
                yield staging
            except (OSError, RuntimeError, SafetensorError) as error:
                if not isinstance(error, OSError) and not is_full_disk(error):
                    raise  # other ranks may be in a collective
                problem = _message(error if isinstance(error, OSError) else full_disk(folder))
            _checked(all_gather_objects(problem))  # rank 0 then computes checksums of files that other ranks wrote
        plan, texts = self.plan, {**self.settings, **settings}
        manifest = Manifest(
            files={},
            world_size=world_size(),
            plan=None if plan is None else plan.fingerprint,
            global_batch_size=None if plan is None else plan.global_batch_size,
            training=training,
            settings=texts if plan is None else {**texts, "communication": plan.communication},
        )
        if self.in_background:
            thread = ThreadPoolExecutor(1, "checkpoint")
            self._pending = thread.submit(self._finish, staging, folder, manifest, background_group())
            waits_in_background[self.wait] = None
        else:
            self._finish(staging, folder, manifest, None)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete.

        Collective; all ranks raise CheckpointError if it could not be written.
        """
        waits_in_background.pop(self.wait, None)
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _finish(self, staging: Staging, folder: Path, manifest: Manifest, group: ProcessGroup | None) -> None:
        """Write the shards that are held in memory, then complete the checkpoint on rank 0. Collective."""
        held = getattr(staging.file_system, "held", {})

        def own_part() -> dict[str, FileRecord]:
            while held:
                path, content = held.popitem()
                path.write_bytes(content.getbuffer())
            own = [path for path in staging.path.rglob(f"__{rank()}_*.distcp") if _SHARD.fullmatch(path.name)]
            for path in own:
                flush(path)
            return {str(path.relative_to(staging.path).as_posix()): FileRecord.of(path) for path in own}

        with _discarded_after_errors(staging.path):
            parts = on_every_rank(own_part, group)
            on_first_rank(lambda: complete(folder, staging.path, manifest, parts), group)


@contextmanager
def _discarded_after_errors(staged: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if rank() == 0:
            discard_staging(staged)
        raise


def _prepare(given: Path) -> tuple[Path, Path, str | None]:
    """Return the checkpoint's folder, where to write it until it is complete, and the training's id."""
    folder = absolute(given)
    staged = prepare_staging(folder)
    return folder, staged, own_training(folder.parent, makes=lock_name(folder) is None)


def on_every_rank(act: Callable[[], T], group: ProcessGroup | None = None) -> list[T]:
    """Run `act` on each rank and return the results of all.

    Collective, over a group of all ranks; every rank raises CheckpointError if one fails.
    """
    return _checked(all_gather_objects(_result_or_error(act), group))


def on_first_rank(act: Callable[[], object], group: ProcessGroup | None = None) -> None:
    """Run `act`, which writes a file, on rank 0. Collective; every rank raises CheckpointError if it fails."""
    on_every_rank(lambda: act() and None if rank() == 0 else None, group)


def _wait_for_folder(staged: Path) -> None:
    """Wait until this rank's machine sees the folder that rank 0 made; raise CheckpointError if it does not."""
    poll(staged.is_dir, _VISIBLE_S)
    if not staged.is_dir():
        raise CheckpointError(
            f"Rank {rank()} on {socket.gethostname()} does not see {staged}, which rank 0 made; give a folder that"
            " all machines share."
        )


def _result_or_error(act: Callable[[], T]) -> T | str:
    """Return the result of `act`, or its error's message in one line."""
    try:
        return act()
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        return _message(error)


def _message(error: Exception) -> str:
    text = one_line(f"{type(error).__name__}: {error}")
    return f"The checkpoint could not be written on rank {rank()} ({text}); the previous checkpoint is the last."


def _checked(parts: list[Any]) -> list[Any]:
    """Return the results of all ranks; raise CheckpointError if one of them is an error's message."""
    if error := next((part for part in parts if isinstance(part, str)), None):
        raise CheckpointError(error)
    return parts
