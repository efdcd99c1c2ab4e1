"""Find the checkpoint from which a training resumes: the last complete one of this training. Damaged ones are logged
and skipped.

`.partial/training.json` in an output folder holds the id of the training that runs there, as the manifests of its
checkpoints do. Without this file, every checkpoint in the folder belongs to this training.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping
from contextlib import suppress
from glob import escape
from pathlib import Path

from ..distributed.consensus import on_rank_zero
from ..distributed.launcher import restart_count
from ..distributed.mesh import rank, world_size
from ..distributed.process_group import all_gather_objects
from ..errors import CheckpointError
from ..planner.files import write_whole
from ..planner.plan import Plan
from ..planner.wire import EXACT
from ..reading import read_json
from .folders import (
    MANIFEST_NAME,
    PARTIAL,
    FileRecord,
    Manifest,
    damage,
    is_locked_elsewhere,
    lock_checkpoints,
    numbered_checkpoints,
    restore_replaced,
)
from .layouts import find_model, find_optimizer
from .safe import special_file

_log = logging.getLogger(__name__)
_TRAINING_FILE = "training.json"


def checkpoint_to_resume(
    folder: str | Path,
    resume_from_checkpoint: str | Path | bool | None = None,
    *,
    marker: str | None = None,
    after_restart: bool = True,
) -> Path | None:
    """Return the checkpoint from which to resume training, and record in the folder whether this is a new training.
    Collective.

    Args:
        folder: the training's output folder.
        resume_from_checkpoint: True resumes from the last complete checkpoint in the folder, of any training; a path
            from that checkpoint. None begins a new training; False does too, and also ignores checkpoints after a
            restart.
        marker: the name of a file that every usable checkpoint has.
        after_restart: if torchrun or SLURM restarts an interrupted training, resume from the last complete checkpoint
            that it wrote.

    Returns:
        The checkpoint's path, the same on every rank; None if training starts from the beginning.

    Raises:
        CheckpointError: the given checkpoint is damaged, or another run trains in the folder; on every rank.
    """
    folder, choice = Path(folder), resume_from_checkpoint
    on_rank_zero(lambda: lock_checkpoints(folder) if folder.is_dir() else None)
    if choice is True:
        _record_training(folder, is_new=False)
    else:
        start_fresh(folder)
    if choice is True or (choice is not False and after_restart and is_restart()):
        found = last_checkpoint(folder, marker=marker)
        if found is not None and (choice is True or _has_optimizer(found)):
            return found
    if choice is None or isinstance(choice, bool):
        return None
    check_checkpoint(choice)
    return Path(choice)


def last_checkpoint(folder: str | Path, *, marker: str | None = None) -> Path | None:
    """Return the newest complete checkpoint among `checkpoint-N` (or `checkpoint_N`) in a folder, or None, on every
    rank. Collective.

    Damaged checkpoints are logged and skipped, and so are those without a manifest, unless no checkpoint in the folder
    has one. After a restart, checkpoints of an earlier training are skipped if `checkpoint_to_resume` recorded that a
    new one began. `marker` is the name of a file that every usable checkpoint has.
    """
    folder, restarted = Path(folder), is_restart()

    def candidates() -> list[tuple[Path, str | None]]:
        restore_replaced(folder)
        found = own_checkpoints(folder) if restarted else numbered_checkpoints(folder)
        known = any((path / MANIFEST_NAME).is_file() for path in found)
        return [(path, _missing_part(path, marker, known=known)) for path in found]

    for path, missing in on_rank_zero(candidates):
        problem = missing or _damage(path)
        if problem is None:
            return path
        if rank() == 0:
            _log.warning("Skipping checkpoint %s: %s.", path, problem)
    return None


def check_checkpoint(folder: str | Path) -> None:
    """Refuse a checkpoint that does not exist, differs from its manifest, or has special files; on every rank.

    Collective.
    """
    folder = Path(folder)

    def look() -> None:
        if not folder.exists():  # an earlier run may have been interrupted while it replaced the checkpoint
            restore_replaced(folder.parent, escape(folder.name))
        if not folder.is_dir():
            raise CheckpointError(f"There is no checkpoint {folder}; give the path of a checkpoint.")

    on_rank_zero(look)
    if problem := _damage(folder):
        raise CheckpointError(f"Checkpoint {folder} is damaged: {problem}; use an earlier checkpoint.")


def warn_of_changes(folder: Path, settings: Mapping[str, str], plan: Plan | None) -> None:
    """Log on rank 0, in one line, the settings that differ from those of a checkpoint."""
    if rank() or (manifest := Manifest.load(folder)) is None:
        return
    saved = {"global batch": manifest.global_batch_size, "communication": EXACT, **manifest.settings}
    own = {"global batch": plan.global_batch_size, "communication": plan.communication} if plan else {}
    now = {**own, **settings}
    changed = [
        name for name in now if name in saved and None not in (saved[name], now[name]) and saved[name] != now[name]
    ]
    if changed:
        texts = [", ".join(f"{name} {values[name]}" for name in changed) for values in (saved, now)]
        _log.warning(
            (
                "%s was saved with %s; this run has %s: it does not continue the same training. To continue it, use"
                " the saved settings%s."
            ),
            folder, *texts,
            f" (OSDPConfig(global_batch_size={manifest.global_batch_size}))" if "global batch" in changed else "",
        )  # fmt: skip


def _missing_part(path: Path, marker: str | None, *, known: bool) -> str | None:
    """Return what a checkpoint lacks, or None.

    A missing manifest counts only if others in the folder have one (`known`).
    """
    if marker is not None and not (path / marker).is_file():
        return f"{marker} is missing"
    if (path / MANIFEST_NAME).is_file():
        return None
    try:
        find_model(path)
    except CheckpointError as error:
        return str(error).rstrip(".")
    return (
        f"{MANIFEST_NAME} is missing, so it is incomplete or another program's; to resume from it, give its path"
        if known
        else None
    )


def _has_optimizer(folder: Path) -> bool:
    """Return whether a checkpoint has the optimizer states that a restart needs; with `save_only_model` it has none.

    Collective.
    """
    try:
        on_rank_zero(lambda: find_optimizer(folder))
    except CheckpointError as error:
        if rank() == 0:
            _log.warning("%s; training starts from the beginning.", str(error).rstrip("."))
        return False
    return True


def _damage(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None; each rank checks a share of the files. Collective."""

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
    return next(filter(None, all_gather_objects(damage(folder, files[rank() :: world_size()]))), None)


def is_restart() -> bool:
    """Return whether this start continues an interrupted training. Collective."""
    return max(all_gather_objects(restart_count())) > 0  # torchrun counts restarts on each machine separately


def start_fresh(folder: str | Path) -> None:
    """Record, except after a restart, that a new training begins in a folder and ignores earlier checkpoints.

    Collective.
    """
    if not is_restart():
        _record_training(Path(folder), is_new=True)


def _record_training(folder: Path, *, is_new: bool) -> None:
    """Write the training's id, or remove the file if all checkpoints belong to the training. Collective."""

    def write() -> None:
        if is_locked_elsewhere(folder):
            return
        path = folder / PARTIAL / _TRAINING_FILE
        with suppress(OSError):  # the first checkpoint reports a folder that cannot be written
            if is_new and numbered_checkpoints(folder):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, json.dumps({"training": uuid.uuid4().hex}))
            else:
                path.unlink(missing_ok=True)

    on_rank_zero(write)


def training_of_folder(folder: Path) -> str | None:
    """Return the id of an output folder's training; None if all checkpoints belong to it.

    Raise CheckpointError for a damaged file.
    """
    path = folder / PARTIAL / _TRAINING_FILE
    if not path.is_file():
        return None

    def error(line: str) -> CheckpointError:
        return CheckpointError(
            f"{line.rstrip('.')}. Remove it to resume from the last checkpoint, whichever training wrote it."
        )

    content = read_json(path, "training id", error)
    training = content.get("training", "") if isinstance(content, dict) else ""
    if training is None or (isinstance(training, str) and training):
        return training
    raise error(f"{path} holds no training id")


def own_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of an output folder's training, the newest first, including damaged ones."""
    training = training_of_folder(folder)

    def is_own(path: Path) -> bool:
        try:
            manifest = Manifest.load(path)
        except CheckpointError:
            return True
        return manifest is not None and manifest.training == training

    return [path for path in numbered_checkpoints(folder) if training is None or is_own(path)]


def recorded_manifest(folder: str | Path) -> Manifest | None:
    """Return the newest manifest of the training that this restart continues; None if there is none, or no restart.

    Collective.
    """

    def newest() -> Manifest | None:
        for path in own_checkpoints(Path(folder)):
            with suppress(CheckpointError):
                if (manifest := Manifest.load(path)) is not None:
                    return manifest
        return None

    return on_rank_zero(newest) if is_restart() else None
