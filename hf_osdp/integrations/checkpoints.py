"""Accelerate's checkpoints: complete or invisible, under Hugging Face names, from any plan and any number of ranks.

Accelerate steps a prepared scheduler once for each process in every optimizer step, so one scheduler step counts G/W
samples (G samples of an optimizer step, W processes). If a checkpoint with G and W is at position p, an uninterrupted
run with G' and W' would be at p · (G/W) / (G'/W'), with its own lengths (`T_max`, milestones).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils.constants import SCHEDULER_NAME
from torch import nn
from torch.optim.lr_scheduler import (
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
)
from torch.utils.data import DataLoader, IterableDataset

from ..checkpoint.folders import Manifest, numbered_checkpoints, remove_checkpoint
from ..checkpoint.layouts import find_model, is_of_one_process
from ..checkpoint.resume import check_checkpoint, last_checkpoint, warn_of_changes
from ..checkpoint.states import (
    Stateful,
    load_model,
    load_optimizer,
    load_plain,
    load_random_states,
    save_model,
    save_optimizer,
    save_plain,
)
from ..checkpoint.writer import CheckpointWriter, Staging, on_first_rank
from ..distributed.consensus import on_rank_zero, require_same
from ..errors import CheckpointError
from ..modeling.identity import dataset_text, model_texts, optimizer_texts, schedule_text
from ..modeling.replaced import replaced
from ..preparation.plan_run import PlannedRun
from ..sharding.optimizers import kind_of
from ..sharding.state import free_gathered
from .plugin import writes_shards

_log = logging.getLogger(__name__)
_RATE_KEYS = ("lr", "initial_lr", "max_lr", "min_lr")
"""Keys that schedulers write into an optimizer's parameter groups."""
_MOST_STEPS = 10**8
"""A schedule is stepped at most so often, at 7 µs a step, to get the bits of an uninterrupted run."""


class AcceleratorCheckpoints(Accelerator):
    """`Accelerator` that writes and reads these checkpoints."""

    planned_run: PlannedRun | None = None
    """The plan and its inputs; None before planning."""
    _writer: CheckpointWriter
    _schedules: WeakKeyDictionary[AcceleratedScheduler, Schedule]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_schedules": dict(self._schedules)}  # weak references cannot be pickled

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Save as `Accelerator.save_state`; the folder appears when it is complete. Other files in it stay.

        With `async_save` and a sharded layout it is written while training continues; `end_training` waits for the
        last.

        Raises:
            CheckpointError: it cannot be written; on every rank.
            ValueError: no folder is given, or an argument would have no effect.
        """
        _refuse_unused("save_state", kwargs)
        folder = on_rank_zero(lambda: self._new_folder(output_dir))
        with self._writer.new(folder, **self._settings()) as staging:
            hidden: dict[str, Any] = {"_custom_objects": _Counted(self._custom_objects)}
            if self.is_fsdp2:
                self._save_sharded(staging)
                hidden |= {"_models": [], "_optimizers": [], "_save_model_state_pre_hook": {}}
            for index, obj in enumerate(self._custom_objects):
                on_first_rank(partial(_save_custom_state, obj, _custom_file(staging.path, index)))
            naming = replaced(self.project_configuration, automatic_checkpoint_naming=False)
            with naming, replaced(self, **hidden):
                super().save_state(str(staging.path), safe_serialization, **kwargs)  # files of one rank come last
        limit = self.project_configuration.total_limit
        if self.project_configuration.automatic_checkpoint_naming and limit is not None and self.is_main_process:
            for path in numbered_checkpoints(self._naming_folder())[
                max(limit, 1) :
            ]:  # with async_save, one more than the limit stays
                remove_checkpoint(path)
        return str(folder)

    def _save_sharded(self, staging: Staging) -> None:
        """Save sharded models and their optimizers' states, and call the hooks of `register_save_state_pre_hook`."""
        options: dict[str, Any] = {"sharded": writes_shards(self.state.fsdp_plugin), "files": staging.file_system}
        for index, model in enumerate(self._models):
            save_model(staging.path, model, index=index, **options)
        for index, optimizer in enumerate(self._optimizers):
            save_optimizer(staging.path, model_of(optimizer, self._models), optimizer, index=index, **options)
        for hook in self._save_model_state_pre_hook.values():
            hook(self._models, [], str(staging.path))

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load as `Accelerator.load_state`, from any plan, any number of ranks, a plain Accelerate FSDP2 run, or one
        process.

        Ranks that did not exist when it was saved get random states of their own. Checkpoints are saved between
        optimizer steps, so the count of micro-steps starts at zero.

        Raises:
            CheckpointError: it is damaged, or of another model; on every rank.
            ValueError: there is no checkpoint, or an argument would have no effect.
        """
        folder = Path(os.path.expanduser(input_dir)) if input_dir is not None else self._last_folder()
        check_checkpoint(folder)
        own = self.is_fsdp2 or not is_of_one_process(on_rank_zero(lambda: find_model(folder)))  # else stock loads it
        if own:
            _refuse_unused("load_state", kwargs.keys() - {"map_location"})
        warn_of_changes(folder, self._settings(), None if self.planned_run is None else self.planned_run.plan)
        hidden: dict[str, Any] = {
            name: _Counted(getattr(self, name)) for name in ("_custom_objects", "_schedulers")
        } | ({"_models": [], "_optimizers": []} if own else {})
        for index, model in enumerate(self._models if own else ()):
            load_model(folder, model, index=index)
        try:
            with replaced(self, **hidden):
                super().load_state(str(folder), load_kwargs, **kwargs)
            for index, scheduler in enumerate(self._schedulers):
                load_plain(folder / f"{SCHEDULER_NAME}{f'_{index}' if index else ''}.bin", scheduler)
            for index, obj in enumerate(self._custom_objects):
                load_plain(_custom_file(folder, index), obj)
            for index, optimizer in enumerate(self._optimizers if own else ()):
                load_optimizer(folder, model_of(optimizer, self._models), optimizer, index=index)
        except FileNotFoundError as error:
            name = Path(str(error.filename or error)).name
            raise CheckpointError(f"Checkpoint {folder} lacks {name}, which this run needs; take another.") from None
        load_random_states(folder, self.process_index)  # the stock loader skips states that it cannot set
        self.step = 0
        if (manifest := on_rank_zero(lambda: Manifest.load(folder))) is not None:
            self._rescale_schedules(manifest, folder)

    def _rescale_schedules(self, saved: Manifest, folder: Path) -> None:
        """Set prepared schedulers to the position that they would have with this number of processes."""
        samples = None if self.planned_run is None else self.planned_run.plan.global_batch_size
        factor = position_factor(
            ranks=(saved.world_size, self.num_processes), samples=(saved.global_batch_size, samples)
        )
        left = rescale_schedules(
            [self._schedules[scheduler] for scheduler in self._schedulers if scheduler in self._schedules], factor
        )
        if left and self.is_main_process:
            _log.warning(
                "%s was written by %d processes, this run has %d, but the learning rate of %s continues from the old"
                " count; leave it out of"
                " prepare, pass it to register_for_checkpointing, and step it once per optimizer step.",
                folder, saved.world_size, self.num_processes, ", ".join(left),
            )  # fmt: skip

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:  # noqa: ANN401  # as its base class
        """Prepare as the stock function, and remember the schedule's initial state in this run."""
        prepared = super().prepare_scheduler(scheduler)
        if prepared not in self._schedules and (own := process_schedule(prepared)) is not None:
            self._schedules[prepared] = own
        return prepared

    def _settings(self) -> dict[str, str]:
        data = [dataset_text(loader.dataset) for loader in self._dataloaders if hasattr(loader, "dataset")]
        names = [kind_of(optimizer).name for optimizer in self._optimizers]
        texts = {"precision": self.mixed_precision, "optimizer": " and ".join(names), "dataset": " and ".join(data)}
        return {**self._writer.settings, **{name: str(text) for name, text in texts.items() if text}}

    def _compare_training(self, given: Iterable[object]) -> None:
        """Compare optimizers, schedules and the training data that `prepare` got between ranks, and remember the
        arguments for checkpoints. Collective.
        """
        texts: dict[str, str] = {}
        for one in given:
            if isinstance(one, torch.optim.Optimizer):
                texts |= optimizer_texts(one)
            elif isinstance(one, LRScheduler):
                texts["schedule"] = schedule_text(one)
        loaders = (one for one in given if isinstance(one, DataLoader))
        data = next((self.data_of_all_ranks(loader.dataset) for loader in loaders), "")  # the first is for training
        require_same({**texts, "dataset": data})
        free_gathered(self._models[-1])  # so that parameters have their own dtypes
        self._writer.settings |= {**model_texts(self._models[-1]), **texts}

    def data_of_all_ranks(self, dataset: object) -> str:
        """Return a text that identifies a dataset; empty if ranks may have different ones: streams, or rank 0 alone
        reads it.
        """
        return "" if self.dispatch_batches or isinstance(dataset, IterableDataset) else dataset_text(dataset)

    def _new_folder(self, output_dir: str | None) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            if output_dir is None:
                raise ValueError(
                    "save_state needs a folder, or ProjectConfiguration(automatic_checkpoint_naming=True)."
                )
            return Path(os.path.expanduser(output_dir))
        found = numbered_checkpoints(self._naming_folder())
        following = int(found[0].name.rpartition("_")[2]) + 1 if found else 0
        return self._naming_folder() / f"checkpoint_{max(following, self.save_iteration)}"

    def _last_folder(self) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state needs a folder, or ProjectConfiguration(automatic_checkpoint_naming=True).")
        if (folder := last_checkpoint(self._naming_folder())) is None:
            raise ValueError(
                f"There is no complete checkpoint in {self._naming_folder()}; give load_state the folder of one."
            )
        return folder

    def _naming_folder(self) -> Path:
        return Path(self.project_dir) / "checkpoints"


def _refuse_unused(function: str, names: Iterable[str]) -> None:
    """Refuse arguments that Accelerate would silently drop, since it uses them only for other backends or for one
    process.
    """
    if unused := ", ".join(sorted(names)):
        raise ValueError(f"{function} would ignore {unused} with this run or this checkpoint; leave it out.")


class _Counted(list[Any]):
    """Objects that Accelerate counts, but does not save or load: it would load their files by running code."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _custom_file(folder: Path, index: int) -> Path:
    return folder / f"custom_checkpoint_{index}.pkl"


def _save_custom_state(obj: Stateful, file: Path) -> None:
    save_plain(file, obj.state_dict(), f"{type(obj).__name__}, registered for checkpointing,")


def model_of(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> nn.Module:
    """Return the model whose parameters an optimizer holds, possibly only a part of them."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return next(
        (model for model in models if any(id(parameter) in own for parameter in model.parameters())), models[-1]
    )


def is_adapted(model: nn.Module | None) -> bool:
    """Return whether a model has peft adapters; its checkpoints then hold only these."""
    return hasattr(model, "peft_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    scheduler: LRScheduler
    state: dict[str, Any]
    rates: tuple[dict[str, Any], ...]
    """Learning rates of each parameter group of its optimizer."""
    position: int
    """Steps taken; -1 if the scheduler does not count them."""


def position_factor(*, ranks: tuple[int, int], samples: tuple[int | None, int | None]) -> Fraction | None:
    """Return the factor for positions of a checkpoint; None if it is not known.

    Each pair is (when it was saved, now).
    """
    if samples[0] is not None and samples[1] is not None:
        return Fraction(samples[0] * ranks[1], ranks[0] * samples[1])
    return Fraction(1) if ranks[0] == ranks[1] else None


def process_schedule(prepared: object) -> Schedule | None:
    """Return a scheduler that steps once per process, with the state that loading would overwrite; None for others."""
    if not isinstance(prepared, AcceleratedScheduler) or not prepared.step_with_optimizer or prepared.split_batches:
        return None
    scheduler = prepared.scheduler
    rates = tuple(
        {key: deepcopy(group[key]) for key in _RATE_KEYS if key in group} for group in scheduler.optimizer.param_groups
    )
    return Schedule(
        scheduler=scheduler, state=deepcopy(scheduler.state_dict()), rates=rates, position=_position(scheduler)
    )


def rescale_schedules(schedules: Sequence[Schedule], factor: Fraction | None) -> list[str]:
    """Move loaded schedulers, and their optimizers' rates, to the position of this run; return the names of those
    left as saved.
    """
    if factor == 1:
        return []
    found = [(schedule, _target(schedule, factor)) for schedule in schedules]
    targets = [(schedule, target) for schedule, target in found if target is not None]
    for schedule, _ in targets:  # reset all before stepping: several may share one optimizer
        for group, rates in zip(schedule.scheduler.optimizer.param_groups, schedule.rates, strict=True):
            group.update(deepcopy(rates))
        schedule.scheduler.load_state_dict(deepcopy(schedule.state))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a scheduler step before any optimizer step
        for schedule, target in targets:
            for _ in range(target - schedule.position):
                schedule.scheduler.step()
    return [type(schedule.scheduler).__name__ for schedule, target in found if target is None]


def _target(schedule: Schedule, factor: Fraction | None) -> int | None:
    """Return a scheduler's position in this run; None if it depends on metrics, the factor is unknown, it would
    have to step back, or no training is that long.
    """
    saved = _position(schedule.scheduler)
    if factor is None or saved < 0 or isinstance(schedule.scheduler, ReduceLROnPlateau):
        return None
    target = round(saved * factor)
    if isinstance(schedule.scheduler, OneCycleLR):
        target = min(target, schedule.state["total_steps"])  # Accelerate does not step it further
    return target if 0 <= target - schedule.position <= _MOST_STEPS else None


def _position(scheduler: LRScheduler) -> int:
    """Return how often a scheduler was stepped; for chained ones, the count of the first."""
    if hasattr(scheduler, "last_epoch"):
        return scheduler.last_epoch
    chained = getattr(scheduler, "_schedulers", ())
    return _position(chained[0]) if chained else -1
