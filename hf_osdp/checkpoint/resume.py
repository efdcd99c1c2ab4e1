"""Finds the checkpoint from which a training resumes: the last complete one of this training; what is damaged is named.

`.partial/training.json` in an output folder names the training that runs there, as the manifests of its checkpoints do.
Where it names none, every checkpoint in the folder is this training's.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from glob import escape
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from ..distributed.consensus import on_rank_zero
from ..distributed.mesh import rank, world_size
from ..distributed.process_group import waiting_group
from ..distributed.restart import restart_count
from ..errors import CheckpointError
from ..planner.files import validated, write_whole
from ..planner.plan import Plan
from ..reading import read_json
from .folders import PARTIAL, is_locked_elsewhere, lock_checkpoints, numbered_checkpoints, restore_replaced
from .layouts import find_model, find_optimizer
from .manifest import MANIFEST_NAME, FileRecord, Manifest, damage, special_file

_log = logging.getLogger(__name__)
_MARK = "training.json"
T = TypeVar("T")


def gather(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return what every rank gives. Collective."""
    found = [mine] * world_size()
    if len(found) > 1:
        dist.all_gather_object(found, mine, group=group)
    return found


# ------------------------------------------------------------------------------------------------------------ which to resume


def checkpoint_to_resume(
    folder: str | Path, resume_from_checkpoint: str | Path | bool | None = None, *, marker: str | None = None, after_restart: bool = True
) -> Path | None:
    """Return the checkpoint from which a training is to resume, and note whether it is a new training. Collective.

    Args:
        folder: the training's output.
        resume_from_checkpoint: True is the last complete checkpoint in the folder, whichever training wrote it. None is a new training.
            False, too, and a restart does not resume it. A path is this checkpoint.
        marker: a file that every usable checkpoint has.
        after_restart: where torchrun or SLURM starts an interrupted training again, resume from the last complete checkpoint that it wrote.

    Returns:
        Its path, the same on every rank; None where training starts from the beginning.

    Raises:
        CheckpointError: the checkpoint that was given is damaged, or another run trains in the folder; on every rank.
    """
    folder, asked = Path(folder), resume_from_checkpoint
    on_rank_zero(lambda: lock_checkpoints(folder) if folder.is_dir() else None)
    restarted = after_restart and asked is not False and is_restart(folder)
    if asked is True:
        _mark_training(folder, is_new=False)
    else:
        start_fresh(folder)
    if asked is True or restarted:
        found = last_checkpoint(folder, marker=marker)
        if found is not None and (asked is True or _has_optimizer(found)):
            return found
    if asked is None or isinstance(asked, bool):
        return None
    check_checkpoint(asked)
    return Path(asked)


def last_checkpoint(folder: str | Path, *, marker: str | None = None) -> Path | None:
    """Return the newest complete checkpoint among `checkpoint-N` (or `checkpoint_N`) in a folder. Collective.

    One that is damaged is named in the log and passed over, and so is one without a manifest, unless no checkpoint there has one. After a
    restart, those of an earlier training are not taken, where `checkpoint_to_resume` has noted that a new one began.

    Args:
        folder: the training's output.
        marker: a file that every usable checkpoint has.

    Returns:
        Its path, the same on every rank; None where there is none.
    """
    restarted = is_restart(folder)
    for path, problem in on_rank_zero(lambda: _candidates(Path(folder), marker, own=restarted)):
        problem = problem or found_damage(path)
        if problem is None:
            return path
        if rank() == 0:
            _log.warning("%s is damaged and passed over: %s.", path, problem)
    return None


def recorded_batch(folder: str | Path) -> int | None:
    """Return the samples of an optimizer step in the training that this start resumes after a restart; None without one. Collective."""

    def newest() -> int | None:
        for path in own_checkpoints(Path(folder)):
            with suppress(CheckpointError):
                if (manifest := Manifest.load(path)) is not None:
                    return manifest.global_batch_size
        return None

    return on_rank_zero(newest) if is_restart(folder) else None


def warn_of_changes(folder: Path, settings: Mapping[str, str], plan: Plan | None) -> None:
    """Log on rank 0, in one line, what is set otherwise than when a checkpoint was saved."""
    if rank() or (manifest := Manifest.load(folder)) is None:
        return
    saved = {"global batch": manifest.global_batch_size, **manifest.settings}
    now = {"global batch": plan.global_batch_size if plan else None, **settings}
    changed = [name for name in now if name in saved and None not in (saved[name], now[name]) and saved[name] != now[name]]
    if changed:
        texts = [", ".join(f"{name} {values[name]}" for name in changed) for values in (saved, now)]
        _log.warning(
            "%s was saved with %s; this run has %s: it does not continue the same training. To continue it, set what was saved%s.",
            folder, *texts, f" (OSDPConfig(global_batch_size={manifest.global_batch_size}))" if "global batch" in changed else "",
        )  # fmt: skip


def _candidates(folder: Path, marker: str | None, *, own: bool) -> list[tuple[Path, str | None]]:
    """Return checkpoints, the newest first, each with what is missing in it."""
    restore_replaced(folder)
    found = own_checkpoints(folder) if own else numbered_checkpoints(folder)
    known = any((path / MANIFEST_NAME).is_file() for path in found)
    return [(path, _lacking(path, marker, known=known)) for path in found]


def _lacking(path: Path, marker: str | None, *, known: bool) -> str | None:
    """Return what a checkpoint needs and does not have; where none has a manifest (`known`), another program may have written them."""
    if marker is not None and not (path / marker).is_file():
        return f"{marker} is missing"
    if (path / MANIFEST_NAME).is_file():
        return None
    try:
        find_model(path)
    except CheckpointError as error:
        return str(error).rstrip(".")
    return f"{MANIFEST_NAME} is missing, so it is incomplete or another program's; to resume from it, give its path" if known else None


def _has_optimizer(folder: Path) -> bool:
    """Return whether a restart may resume from a checkpoint; with `save_only_model` there is nothing to go on with. Collective."""

    def has_optimizer() -> bool:
        try:
            find_optimizer(folder)
        except CheckpointError as error:
            _log.warning("%s; training starts from the beginning.", str(error).rstrip("."))
            return False
        return True

    return on_rank_zero(has_optimizer)


# ------------------------------------------------------------------------------------------------------------------ damage


def check_checkpoint(folder: str | Path) -> None:
    """Refuse a damaged checkpoint, before anything is loaded. Collective. Without a manifest, only special files are looked for.

    Raises:
        CheckpointError: it is not there, or not as it was written; on every rank.
    """
    folder = Path(folder)

    def is_there() -> bool:
        if not folder.exists():  # it was being replaced when that start was interrupted
            restore_replaced(folder.parent, escape(folder.name))
        return folder.is_dir()

    if not on_rank_zero(is_there):
        raise CheckpointError(f"There is no checkpoint {folder}; give the path of one.")
    if problem := found_damage(folder):
        raise CheckpointError(f"Checkpoint {folder} is damaged: {problem}; take one before it.")


def found_damage(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, of which each rank reads a share. Collective."""

    def listed() -> list[tuple[str, FileRecord]] | str:
        for path in folder.rglob("*"):
            if problem := special_file(path):
                return f"{path.relative_to(folder)} {problem}"
        try:
            manifest = Manifest.load(folder)
        except CheckpointError as error:
            return str(error).rstrip(".")
        return sorted(manifest.files.items()) if manifest else []

    files = on_rank_zero(listed)
    if isinstance(files, str):
        return files
    return next(filter(None, gather(damage(folder, files[rank() :: world_size()]), waiting_group())), None)


# ------------------------------------------------------------------------------------------------------------ which training


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """What `training.json` has."""

    training: str | None
    """As in the manifests of its checkpoints; None where all in the folder are its own."""
    launches: tuple[str, ...]
    """The launchers that started it."""
    process: str
    """Rank 0 that wrote this; what begins there later is another training of the same program."""


def is_restart(folder: str | Path) -> bool:
    """Return whether this start continues a training that was interrupted. Collective.

    torchrun counts restarts on each machine for itself, SLURM counts how often it requeued a job, and hf_osdp how often it began again
    after running out of memory: one count above 0 is enough. Where machines come and go torchrun counts nothing; then the training was
    started by a torchrun that is still the same.
    """
    counts, launches = zip(*gather((restart_count(), _launch()), waiting_group()), strict=True)

    def launched_before() -> bool:
        mark = _read_mark(Path(folder)) if any(launches) else None
        return mark is not None and mark.process != _process() and not set(mark.launches).isdisjoint(launches)

    return max(counts) > 0 or on_rank_zero(launched_before)


def start_fresh(folder: str | Path) -> None:
    """Note that a new training begins in a folder: its restarts will not resume from checkpoints that lie there. Collective.

    In a restart, and where another run trains in the folder, nothing is noted.
    """
    if not is_restart(folder):
        _mark_training(Path(folder), is_new=True)


def training_of_folder(folder: Path) -> str | None:
    """Return the training that runs in an output folder; None where all checkpoints in it are its own.

    Raises:
        CheckpointError: the note is damaged.
    """
    mark = _read_mark(folder)
    return None if mark is None else mark.training


def own_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints that the training in an output folder wrote, the newest first; damaged ones may be among them.

    Raises:
        CheckpointError: the note is damaged.
    """
    training = training_of_folder(folder)
    return [path for path in numbered_checkpoints(folder) if training is None or _is_of(path, training)]


def _is_of(path: Path, training: str) -> bool:
    try:
        manifest = Manifest.load(path)
    except CheckpointError:
        return True
    return manifest is not None and manifest.training == training


def _launch() -> str | None:
    """Return what tells this torchrun from every other: the folder that it made for its logs; None without one."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # LOGS/RUN/attempt_0/0/error.json
    return f"{socket.gethostname()} {Path(file).parents[2]}" if file and "TORCHELASTIC_RUN_ID" in os.environ else None


def _process() -> str:
    return f"{os.getpid()} on {socket.gethostname()}"


def _mark_training(folder: Path, *, is_new: bool) -> None:
    """Write the mark, where it says something. A folder that cannot be written is for the first checkpoint to tell of. Collective."""
    launches = tuple(sorted({name for name in gather(_launch(), waiting_group()) if name}))

    def write() -> None:
        if is_locked_elsewhere(folder):
            return
        training = uuid.uuid4().hex if is_new and numbered_checkpoints(folder) else None
        path = folder / PARTIAL / _MARK
        with suppress(OSError):
            if training or launches:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, json.dumps(asdict(_Mark(training=training, launches=launches, process=_process()))))
            else:
                path.unlink(missing_ok=True)

    on_rank_zero(write)


def _read_mark(folder: Path) -> _Mark | None:
    def error(line: str) -> CheckpointError:
        return CheckpointError(f"{line.rstrip('.')}. Remove it to resume from the last checkpoint, whichever training wrote it.")

    path = folder / PARTIAL / _MARK
    if not path.is_file():
        return None
    content = read_json(path, "note of the training", error)
    return validated(_Mark, content, lambda problem: error(f"{path} is no note of a training ({problem})"))
