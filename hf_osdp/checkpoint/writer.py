"""Write checkpoints one after the other, while training waits or continues."""

from __future__ import annotations

import pickle
import re
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors import SafetensorError
from torch.distributed import Store
from torch.distributed.checkpoint.filesystem import FileSystem

from ..distributed.consensus import on_rank_zero
from ..distributed.mesh import rank, world_size
from ..distributed.process_group import all_gather_objects, own_timeout, poll, ranks_text, require_all, store_of
from ..distributed.stop import waits_in_background
from ..errors import CheckpointError, one_line
from ..planner.plan import Plan
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
from .safe import full_disk, is_full_disk

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
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self._is_alone = False
        """A rank has not told that it has written: it would not hear of the error either."""

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
        folder, staged = on_rank_zero(lambda: _prepare(given))
        if rank() == 0:  # let other runs write there once this writer is deleted
            weakref.finalize(self, unlock_checkpoints, folder.parent, lock_name(folder))
        on_every_rank(lambda: _wait_for_folder(staged))
        staging = Staging(staged, HeldFileSystem() if self.in_background else FileSystem())
        try:
            problem = None
            try:
                yield staging
            except (OSError, RuntimeError, SafetensorError) as error:
                if not isinstance(error, OSError) and not is_full_disk(error):
                    raise  # other ranks may be in a collective
                problem = _message(error if isinstance(error, OSError) else full_disk(folder))
            _checked(all_gather_objects(problem))  # rank 0 then computes checksums of files that other ranks wrote
        except BaseException:
            if rank() == 0:
                discard_staging(staged)
            raise
        plan, texts = self.plan, {**self.settings, **settings}
        manifest = Manifest(
            files={},
            world_size=world_size(),
            plan=None if plan is None else plan.fingerprint,
            global_batch_size=None if plan is None else plan.global_batch_size,
            settings=texts if plan is None else {**texts, "communication": plan.communication},
        )
        self._thread = threading.Thread(
            target=self._write, args=(staging, folder, manifest, store_of(f"parts/{staged}")), name="checkpoint"
        )
        self._thread.start()
        waits_in_background[self.wait] = None
        if not self.in_background:
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is complete.

        Collective; all ranks raise CheckpointError if it could not be written.
        """
        if self._thread is None:  # the same on every rank
            return
        self._thread.join()
        waits_in_background.pop(self.wait, None)
        self._thread = None
        _checked([self._error] if self._is_alone else all_gather_objects(self._error))

    def _write(self, staging: Staging, folder: Path, manifest: Manifest, store: Store | None) -> None:
        """Write the shards that are held in memory, then complete the checkpoint on rank 0 when every rank has
        told over the store that it has written. Run in a thread.
        """
        held, number = getattr(staging.file_system, "held", {}), rank()

        def own_part() -> dict[str, FileRecord]:
            while held:
                path, content = held.popitem()
                path.write_bytes(content.getbuffer())
            own = [path for path in staging.path.rglob(f"__{number}_*.distcp") if _SHARD.fullmatch(path.name)]
            for path in own:
                flush(path)
            return {str(path.relative_to(staging.path).as_posix()): FileRecord.of(path) for path in own}

        def finish() -> None:
            parts = _checked([part] if store is None else self._parts_of_all(store, part))
            training = own_training(folder.parent, makes=False)
            complete(folder, staging.path, replace(manifest, training=training), parts)

        part = _result_or_error(own_part)
        held.clear()
        if number:
            assert store is not None
            store.set(str(number), pickle.dumps(part))  # type: ignore[arg-type]  # rank 0 tells errors
            return
        self._error = _result_or_error(finish)  # None if it is complete
        if self._error is not None:
            discard_staging(staging.path)

    def _parts_of_all(self, store: Store, own: object) -> list[Any]:
        """Return what each rank wrote, or its error, once they have told it; they have the process group's timeout
        for it from the time when rank 0 has written.
        """
        others, seconds = list(map(str, range(1, world_size()))), own_timeout().total_seconds()
        poll(lambda: store.check(others), seconds)
        missing = [int(other) for other in others if not store.check([other])]
        self._is_alone = bool(missing)
        if missing:
            raise TimeoutError(
                f"waited {seconds:g} s for {ranks_text(missing)} to write; look at its machine and disk"
            )
        return [own, *(pickle.loads(store.get(other)) for other in others)]  # from this run's ranks, not a file


def _prepare(given: Path) -> tuple[Path, Path]:
    """Return the checkpoint's folder, and where to write it until it is complete."""
    folder = absolute(given)
    staged = prepare_staging(folder)
    own_training(folder.parent, makes=lock_name(folder) is None)
    return folder, staged


def on_every_rank(act: Callable[[], T]) -> list[T]:
    """Run `act` on each rank and return the results of all.

    Collective; every rank raises CheckpointError if one fails.
    """
    return _checked(all_gather_objects(_result_or_error(act)))


def on_first_rank(act: Callable[[], object]) -> None:
    """Run `act`, which writes a file, on rank 0. Collective; every rank raises CheckpointError if it fails."""
    on_every_rank(lambda: act() and None if rank() == 0 else None)


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
