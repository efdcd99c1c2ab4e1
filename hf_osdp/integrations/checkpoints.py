"""Accelerate's checkpoints: complete or invisible, under Hugging Face names, from any plan and any number of ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.constants import SCHEDULER_NAME
from torch import nn
from torch.optim.lr_scheduler import (
    LRScheduler,
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


class AcceleratorCheckpoints(Accelerator):
    """`Accelerator` that writes and reads these checkpoints."""

    planned_run: PlannedRun | None = None
    """The plan and its inputs; None before planning."""
    _writer: CheckpointWriter

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
            self._warn_of_schedules(manifest, folder)

    def _warn_of_schedules(self, saved: Manifest, folder: Path) -> None:
        """Warn of prepared schedulers, which count the steps of all processes, if there were others."""
        prepared = [one.scheduler for one in self._schedulers if one.step_with_optimizer and not one.split_batches]
        if prepared and saved.world_size != self.num_processes and self.is_main_process:
            _log.warning(
                "%s was written by %d processes, this run has %d, but the learning rate of %s continues from the old"
                " count; leave it out of"
                " prepare, pass it to register_for_checkpointing, and step it once per optimizer step.",
                folder, saved.world_size, self.num_processes, ", ".join(type(one).__name__ for one in prepared),
            )  # fmt: skip

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
