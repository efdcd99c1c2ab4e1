"""Accelerate's checkpoints: complete or invisible, under Hugging Face names, of any plan and any number of ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import LRScheduler

from ..checkpoint.finding import check_checkpoint, last_checkpoint
from ..checkpoint.folders import numbered_checkpoints, remove_checkpoint
from ..checkpoint.layouts import Layout, find_model
from ..checkpoint.manifest import Manifest
from ..checkpoint.random_states import load_random_states
from ..checkpoint.states import load_model, load_optimizer, save_optimizer
from ..checkpoint.writer import CheckpointWriter
from ..distributed.consensus import on_rank_zero
from ..errors import CheckpointError
from .plugin import writes_shards
from .schedules import Schedule, StepSize, carry_over, own_schedule, positions_factor
from .stock_states import by_position, model_of, own_states, replaced

_log = logging.getLogger(__name__)


class AcceleratorCheckpoints:
    """Before `Accelerator` among the bases."""

    def __init__(self, **kwargs: Any):
        self._schedules: WeakKeyDictionary[AcceleratedScheduler, Schedule] = WeakKeyDictionary()
        super().__init__(**kwargs)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """As `Accelerator.save_state`; the folder appears when it is complete. Files in it that are no checkpoint's stay.

        With `async_save`, and a sharded layout, it appears while training goes on; `end_training` waits for the last.

        Raises:
            CheckpointError: it cannot be written; on every rank.
            ValueError: no folder is given, or an argument that saving has no use for.
        """
        _refuse_unused("save_state", kwargs)
        folder = on_rank_zero(lambda: self._new_folder(output_dir))
        by_position(self._models, self._optimizers)
        with self._checkpoint_writer().new(folder, plan=None if self._run is None else self._run.plan) as staging:
            hidden = {"_optimizers": []} if self.is_fsdp2 else {}  # the stock functions take as many models as optimizers
            naming = replaced(self.project_configuration, automatic_checkpoint_naming=False)
            with naming, own_states(staging.file_system), replaced(self, **hidden):
                super().save_state(str(staging.path), safe_serialization, **kwargs)
            for index, optimizer in enumerate(self._optimizers if self.is_fsdp2 else ()):
                save_optimizer(
                    staging.path, model_of(optimizer, self._models), optimizer,
                    sharded=writes_shards(self.state.fsdp_plugin), index=index, files=staging.file_system,
                )  # fmt: skip
        self._keep_limit()
        return str(folder)

    def load_state(self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """As `Accelerator.load_state`, from any plan, any number of ranks, a plain Accelerate FSDP2 run, or one process.

        A rank that was not there when it was saved gets random states of its own. Checkpoints lie between optimizer steps: counting
        micro-steps begins anew.

        Raises:
            CheckpointError: it is damaged, or of another model; on every rank.
            ValueError: there is no checkpoint, or an argument is given that its loading has no use for.
        """
        folder = Path(os.path.expanduser(input_dir)) if input_dir is not None else self._last_folder()
        check_checkpoint(folder)
        alone = not self.is_fsdp2 and on_rank_zero(lambda: find_model(folder)).layout is not Layout.SINGLE
        if self.is_fsdp2 or alone:
            _refuse_unused("load_state", kwargs.keys() - {"map_location"})
        by_position(self._models, self._optimizers)
        was = on_rank_zero(lambda: _step_size(folder))
        hidden = {"_optimizers": []} if self.is_fsdp2 else {}
        if alone:  # the stock functions read what one process wrote, and nothing else
            for index, model in enumerate(self._models):
                load_model(folder, model, index=index)
            hidden = {"_models": [], "_optimizers": []}
        try:
            with own_states(), replaced(self, **hidden):
                super().load_state(str(folder), load_kwargs, **kwargs)
            for index, optimizer in enumerate(self._optimizers if hidden else ()):
                load_optimizer(folder, model_of(optimizer, self._models), optimizer, index=index)
        except FileNotFoundError as error:
            raise CheckpointError(f"Checkpoint {folder} lacks {Path(error.filename).name}, which this run needs; take another.") from None
        load_random_states(folder, self.process_index)  # the stock loader passes over what it cannot set
        self.step = 0
        if was is not None:
            self._carry_over(was, folder)

    def _carry_over(self, was: StepSize, folder: Path) -> None:
        """Prepared schedulers, to where this number of processes would have them."""
        now = StepSize(ranks=self.num_processes, samples=None if self._run is None else self._run.plan.global_batch_size)
        uncounted = self.gradient_accumulation_steps - 1 if self.gradient_state.adjust_scheduler else 0
        schedules = [self._schedules[scheduler] for scheduler in self._schedulers if scheduler in self._schedules]
        left = carry_over(schedules, positions_factor(was, now), ranks=now.ranks, uncounted=uncounted)
        if left and self.is_main_process:
            _log.warning(
                "%s was written by %d processes, this run has %d, and the learning rate of %s goes on from the old count; leave it out of"
                " prepare, give it to register_for_checkpointing, and step it once an optimizer step.",
                folder, was.ranks, now.ranks, ", ".join(left),
            )  # fmt: skip

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        """As stock."""
        prepared = super().prepare_scheduler(scheduler)
        if prepared not in self._schedules and (own := own_schedule(prepared)) is not None:
            self._schedules[prepared] = own
        return prepared

    def _checkpoint_writer(self) -> CheckpointWriter:
        if self._writer is None:
            self._writer = CheckpointWriter(in_background=self.plugin.osdp.async_save)
        return self._writer

    def _new_folder(self, output_dir: str | None) -> Path:
        """The next checkpoint's name."""
        if not self.project_configuration.automatic_checkpoint_naming:
            if output_dir is None:
                raise ValueError("save_state needs a folder, or ProjectConfiguration(automatic_checkpoint_naming=True).")
            return Path(os.path.expanduser(output_dir))
        found = numbered_checkpoints(self._naming_folder())
        following = int(found[0].name.rpartition("_")[2]) + 1 if found else 0
        return self._naming_folder() / f"checkpoint_{max(following, self.save_iteration)}"

    def _keep_limit(self) -> None:
        """With Accelerate's own naming, the oldest go; in the background the new one is yet to be complete, and one more stays."""
        limit = self.project_configuration.total_limit
        if self.project_configuration.automatic_checkpoint_naming and limit is not None and self.is_main_process:
            for path in numbered_checkpoints(self._naming_folder())[max(limit, 1) :]:
                remove_checkpoint(path)

    def _last_folder(self) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state needs a folder, or ProjectConfiguration(automatic_checkpoint_naming=True).")
        if (folder := last_checkpoint(self._naming_folder())) is None:
            raise ValueError(f"There is no complete checkpoint in {self._naming_folder()}; give load_state the folder of one.")
        return folder

    def _naming_folder(self) -> Path:
        return Path(self.project_dir) / "checkpoints"


def _step_size(folder: Path) -> StepSize | None:
    """Of the run that wrote a checkpoint; None where it does not say."""
    manifest = Manifest.load(folder)
    return None if manifest is None else StepSize(ranks=manifest.world_size, samples=manifest.global_batch_size)


def _refuse_unused(function: str, names: Iterable[str]) -> None:
    """Arguments that Accelerate would drop without a word: it passes them on for other backends, or for one process."""
    if given := ", ".join(sorted(names)):
        raise ValueError(f"{function} has no use for {given} with this run or this checkpoint; leave it out.")
