"""Find the checkpoint from which a training resumes: the last complete one of this training. Damaged ones are logged
and skipped.

`.partial/training.json` in an output folder holds the id of the training that runs there, as the manifests of its
checkpoints do, and the launches that run it. A restart continues this training if one of its own launches is among
them.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from glob import escape
from pathlib import Path

from ..distributed.consensus import on_rank_zero
from ..distributed.launcher import launches
from ..distributed.mesh import rank, world_size
from ..distributed.process_group import all_gather_objects
from ..errors import CheckpointError
from ..modeling.identity import is_of_weights
from ..planner.files import validated, write_whole
from ..planner.plan import Plan
from ..planner.training_job import EXACT
from ..reading import read_json
from .folders import (
    MANIFEST_NAME,
    PARTIAL,
    FileRecord,
    Manifest,
    absolute,
    damage,
    lock_checkpoints,
    numbered_checkpoints,
    restore_replaced,
    trainings,
)
from .layouts import SPLIT_WEIGHTS, WEIGHTS_INDEX, files_of_index, find_model, find_optimizer
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
        after_restart: if torchrun or SLURM starts this launch again, resume from the last complete checkpoint of its
            training. If the folder does not record that this launch trained there, training begins anew, and a
            warning says so.

    Returns:
        The checkpoint's path, the same on every rank; None if training starts from the beginning.

    Raises:
        CheckpointError: the given checkpoint is damaged, or another run trains in the folder; on every rank.
    """
    folder, choice = Path(folder), resume_from_checkpoint
    launched, restarted = _of_all_ranks(launches()), restarted_launches() if after_restart else set()
    named = choice is not None and not isinstance(choice, bool)
    if named and on_rank_zero(lambda: not folder.exists()):  # a new folder is not made for a wrong path
        check_checkpoint(Path(str(choice)))
    on_rank_zero(lambda: lock_checkpoints(folder))
    goes_on = not isinstance(choice, bool) and on_rank_zero(lambda: _is_continued(folder, restarted))
    found = _last(folder, marker, own=goes_on) if goes_on or choice is True else None
    if goes_on and found is not None and not _has_optimizer(found):
        found = None
    if found is None and named:
        found = Path(str(choice))
        check_checkpoint(found)
    on_rank_zero(lambda: _record(folder, launched, found if choice is True else None, goes_on=goes_on))
    return found


def last_checkpoint(folder: str | Path, *, marker: str | None = None) -> Path | None:
    """Return the newest complete checkpoint among `checkpoint-N` (or `checkpoint_N`) in a folder, or None, on every
    rank. Collective.

    Damaged checkpoints are logged and skipped, and so are those without a manifest, unless no checkpoint in the folder
    has one. A restart skips checkpoints of other trainings if the folder records the training that this launch began.
    `marker` is the name of a file that every usable checkpoint has.
    """
    folder, restarted = Path(folder), restarted_launches()
    own = bool(restarted) and on_rank_zero(lambda: _is_own(recorded_training(folder), restarted))
    return _last(folder, marker, own=own)


def _last(folder: Path, marker: str | None, *, own: bool) -> Path | None:
    def candidates() -> list[tuple[Path, str | None]]:
        restore_replaced(folder)
        found = own_checkpoints(folder, unknown=True) if own else numbered_checkpoints(folder)
        known = own or any((path / MANIFEST_NAME).is_file() for path in found)
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
            raise CheckpointError(f"Can't find a valid checkpoint at {folder}; give the path of a checkpoint.")

    on_rank_zero(look)
    if problem := _damage(folder):
        raise CheckpointError(f"Checkpoint {folder} is damaged: {problem}; use an earlier checkpoint.")


def warn_of_changes(folder: Path, settings: Mapping[str, str], plan: Plan | None) -> None:
    """Log on rank 0, in one line, the settings that differ from those of a checkpoint; refuse other dtypes, and
    adapters with other settings. Collective.
    """
    if (manifest := on_rank_zero(lambda: Manifest.load(folder))) is None:
        return
    saved = {"global batch": manifest.global_batch_size, "communication": EXACT, **manifest.settings}
    own = {"global batch": plan.global_batch_size, "communication": plan.communication} if plan else {}
    now = {**own, **settings}
    if manifest.world_size != world_size():
        now.pop("schedule", None)  # prepared schedules count the steps of all processes
    changed = [
        name for name in now if name in saved and None not in (saved[name], now[name]) and saved[name] != now[name]
    ]
    if refused := next(filter(is_of_weights, changed), None):
        raise CheckpointError(
            f"{folder} was saved with {refused} {saved[refused]}, and this run has {now[refused]}; make the model that"
            " was saved, or begin a new training."
        )
    if changed and rank() == 0:
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
            files = manifest.files if (manifest := Manifest.load(folder)) else {}
            replaced = _split_anew(folder, files)
        except CheckpointError as error:
            return str(error).rstrip(".")
        return sorted(item for item in files.items() if item[0] not in replaced)

    files = on_rank_zero(listed)
    if isinstance(files, str):
        return files
    return next(filter(None, all_gather_objects(damage(folder, files[rank() :: world_size()]))), None)


def _split_anew(folder: Path, files: Mapping[str, FileRecord]) -> set[str]:
    """Return which recorded files of weights a user has replaced by others, which an index of his own lists."""
    index = folder / WEIGHTS_INDEX
    if not files or not index.is_file() or FileRecord.of(index) == files.get(WEIGHTS_INDEX):
        return set()
    if missing := [name for name in files_of_index(index) if not (folder / name).is_file()]:
        raise CheckpointError(f"{missing[0]}, which {WEIGHTS_INDEX} lists, is missing")
    return {name for name in files if SPLIT_WEIGHTS.fullmatch(name)}


def restarted_launches() -> set[str]:
    """Return the launches that torchrun or SLURM has started again; none if this is a first start. Collective."""
    return _of_all_ranks(launches(restarted=True))  # torchrun counts restarts on each machine separately


def _of_all_ranks(mine: set[str]) -> set[str]:
    return set().union(*all_gather_objects(mine))


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The training that runs in an output folder."""

    training: str
    launches: tuple[str, ...] = ()
    """Names of the launches that began or continued it, see `launcher.launches`."""


def recorded_training(folder: Path) -> Training | None:
    """Return the training that an output folder records, or None. Raise CheckpointError for a damaged file."""
    path = folder / PARTIAL / _TRAINING_FILE
    if not path.is_file():
        return None

    def error(line: str) -> CheckpointError:
        return CheckpointError(
            f"{line.rstrip('.')}. Remove it, and set resume_from_checkpoint=True to continue from the last checkpoint."
        )

    content = read_json(path, "training id", error)
    return validated(Training, content, lambda problem: error(f"{path} holds no training id ({problem})"))


def own_training(folder: Path, *, makes: bool) -> str | None:
    """Return the id of the training that this process runs in a folder; for a loop that saves without
    `checkpoint_to_resume`, record one if it `makes` it.

    Raise CheckpointError if another run has recorded its own since, as file systems without locks let it.
    """
    record, own = None, trainings.get(absolute(folder))
    with suppress(CheckpointError):  # a damaged file must not prevent the checkpoint
        record = recorded_training(folder)
    if own and record and record.training != own:
        raise CheckpointError(
            f"Another run has begun to train in {folder} after this one, without a lock; give each run its own folder."
        )
    if makes and record is None:
        _write_record(folder, Training(training=own or uuid.uuid4().hex, launches=tuple(sorted(launches()))))
    elif own is None and record is not None:
        trainings[absolute(folder)] = record.training
    return trainings.get(absolute(folder))


def _write_record(folder: Path, record: Training) -> None:
    path = folder / PARTIAL / _TRAINING_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(record)))
    except OSError as error:
        if path.exists():  # else the first checkpoint reports a folder that cannot be written
            raise CheckpointError(
                f"{path} cannot be written ({error.strerror}), so this run's checkpoints would count as an earlier"
                " training's; make it writable, or give another folder."
            ) from None
    trainings[absolute(folder)] = record.training


def _is_own(record: Training | None, restarted: set[str]) -> bool:
    return record is not None and not restarted.isdisjoint(record.launches)


def _is_continued(folder: Path, restarted: set[str]) -> bool:
    """Return whether a restart continues the recorded training; log that it begins anew if the folder has others'
    checkpoints.
    """
    own = bool(restarted) and _is_own(recorded_training(folder), restarted)
    if restarted and not own and numbered_checkpoints(folder):
        _log.warning(
            "Nothing in %s was written by the launch that is started again here, so training begins anew; to continue"
            " from the last checkpoint there, set resume_from_checkpoint=True.",
            folder,
        )
    return own


def _record(folder: Path, launched: set[str], resumed: Path | None, *, goes_on: bool) -> None:
    """Record the training that runs in a folder: the one that goes on, that of a checkpoint that is resumed, or a new
    one.
    """
    before, training = None, None
    with suppress(CheckpointError):  # damaged: it is replaced
        before = recorded_training(folder)
        training = before.training if before and goes_on else None
    if resumed is not None and (manifest := Manifest.load(resumed)) is not None:
        training = manifest.training
    training = training or uuid.uuid4().hex
    if before is not None and before.training == training:
        launched = launched.union(before.launches)
    _write_record(folder, Training(training=training, launches=tuple(sorted(launched))))


def own_checkpoints(folder: Path, *, unknown: bool = False) -> list[Path]:
    """Return the checkpoints of the training that an output folder records, the newest first, including damaged ones
    and, if `unknown`, those without a manifest; all if it records none.
    """
    record = recorded_training(folder)

    def is_own(path: Path) -> bool:
        try:
            manifest = Manifest.load(path)
        except CheckpointError:
            return True
        return unknown if manifest is None else record is not None and manifest.training == record.training

    return [path for path in numbered_checkpoints(folder) if record is None or is_own(path)]


def recorded_manifest(folder: str | Path) -> Manifest | None:
    """Return the newest manifest of the training that this restart continues; None if there is none, or no restart.

    Collective.
    """
    restarted = restarted_launches()

    def newest() -> Manifest | None:
        own = restarted and _is_own(recorded_training(Path(folder)), restarted)
        for path in own_checkpoints(Path(folder)) if own else ():
            with suppress(CheckpointError):
                if (manifest := Manifest.load(path)) is not None:
                    return manifest
        return None

    return on_rank_zero(newest)
