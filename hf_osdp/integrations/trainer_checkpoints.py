"""The Trainer's checkpoints: complete or invisible, under Hugging Face names, from any plan and any number of
ranks; also on SIGTERM.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import transformers.trainer
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpoint.folders import numbered_checkpoints, remove_checkpoint, unlock_checkpoints
from ..checkpoint.layouts import find_model, is_of_one_process
from ..checkpoint.resume import check_checkpoint, checkpoint_to_resume, own_checkpoints, warn_of_changes
from ..checkpoint.safe import save_file
from ..checkpoint.states import load_model, load_optimizer, load_plain, load_random_states, save_model, save_optimizer
from ..distributed.consensus import on_rank_zero, require_same
from ..distributed.stop import StopSignal
from ..errors import CheckpointError
from ..modeling.identity import dataset_text, model_texts, optimizer_texts, schedule_text
from ..modeling.replaced import replaced
from ..preparation.config import OSDPConfig
from ..preparation.plan_run import PlannedRun
from ..sharding.between_steps import AcrossLayouts, mixing_explained
from ..sharding.optimizers import kind_of
from ..sharding.state import free_gathered
from .checkpoints import is_adapted
from .plugin import writes_shards

_log = logging.getLogger(__name__)
TRAINER_STATE = transformers.trainer.TRAINER_STATE_NAME
"""The file that the Trainer writes last into a checkpoint."""
_COMPARED = (
    "learning_rate", "weight_decay", "optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "max_grad_norm",
    "label_smoothing_factor", "neftune_noise_alpha",
)  # fmt: skip
"""Arguments that change each update."""
_OF_RANKS = {
    "local_rank", "output_dir", "logging_dir", "run_name", "project", "trackio_space_id", "disable_tqdm", "report_to",
    "log_level", "log_level_replica", "hub_token", "dataloader_num_workers", "dataloader_prefetch_factor",
    "dataloader_persistent_workers", "dataloader_pin_memory", *_COMPARED,
}  # fmt: skip
"""Arguments that may differ between ranks, and those compared under other names; others may decide what ranks do
together.
"""


Method = TypeVar("Method", bound=Callable[..., Any])


def under_plan(method: Method) -> Method:
    """Let a method of our Trainer run under a plan; while OSDP is off, the one that it overrides runs."""

    @functools.wraps(method)
    def chosen(self: TrainerCheckpoints, *args: Any, **kwargs: Any) -> object:
        if self._osdp is not None:
            return method(self, *args, **kwargs)
        owner = next(cls for cls in type(self).__mro__ if vars(cls).get(method.__name__) is chosen)
        return getattr(super(owner, self), method.__name__)(*args, **kwargs)

    return chosen  # type: ignore[return-value]


class TrainerCheckpoints(transformers.Trainer):
    model: Any
    optimizer: Any
    lr_scheduler: Any
    _osdp: OSDPConfig | None = None
    """The merged options; None for the stock Trainer."""
    _run: PlannedRun | None = None
    _stop: StopSignal
    _requested_batch_size: int
    _files: FileSystem | None = None
    """The file system for shards of the checkpoint that is being saved; None outside of our saving."""

    @under_plan
    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Save as the stock Trainer, into a hidden folder that is renamed when it is complete."""
        run_dir = Path(self._get_output_dir(trial))
        folder = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        keeps_best = self.state.best_global_step and (best == folder or on_rank_zero(best.exists))
        with self.accelerator._writer.new(folder, **self._settings()) as staging:
            changed: dict[str, object] = {
                "_get_output_dir": lambda trial: str(staging.path.parent),
                "_push_from_checkpoint": lambda folder: None,  # push only after the folder has been renamed
                "_files": staging.file_system,
            }
            with replaced(self, **changed):
                super()._save_checkpoint(model, trial)
            if keeps_best:
                self.state.best_model_checkpoint = str(best)  # its final name
                if self.args.should_save:
                    self.state.save_to_json(str(staging.path / TRAINER_STATE))
            if self.args.save_only_model and self._writes_shards():  # stock then writes no weights
                save_model(
                    staging.path,
                    self.model,
                    sharded=True,
                    trainable_only=is_adapted(self.model),
                    files=staging.file_system,
                )
        self._remove_old_checkpoints(run_dir, folder)
        if self.args.push_to_hub:
            self.accelerator._writer.wait()
            self._push_from_checkpoint(str(folder))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save as the stock Trainer, with weights and states of a sharded model in any layout."""
        if self._osdp is None or not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        folder, adapted = Path(output_dir), is_adapted(self.model)
        options: dict[str, Any] = {"sharded": self._writes_shards(), "files": self._files}
        save_model(folder, self.model, trainable_only=adapted, **options)
        save_optimizer(folder, self.model, self.optimizer, **options)
        if self.args.should_save:
            save_file(self.lr_scheduler.state_dict(), folder / transformers.trainer.SCHEDULER_NAME)

    def _remove_old_checkpoints(self, run_dir: Path, new: Path | None = None) -> None:
        """Remove checkpoints over the limit: those of earlier trainings first, then the oldest, never the last
        complete one or the best.
        """
        limit, best = self.args.save_total_limit or 0, self.state.best_model_checkpoint
        found = numbered_checkpoints(run_dir) if self.is_world_process_zero() and limit > 0 else []
        if found:
            own = own_checkpoints(run_dir)
            found.sort(key=lambda path: path not in own)
            kept = {new if new in found else found[0], *([Path(best)] if best else [])}
            for path in [path for path in found if path not in kept][max(limit - len(kept), 0) :]:
                remove_checkpoint(path)

    def _writes_shards(self) -> bool:
        return self.is_fsdp_enabled and writes_shards(self.accelerator.plugin)

    @under_plan
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load as the stock Trainer, with optimizer states from any layout."""
        if checkpoint is not None:
            load_optimizer(Path(checkpoint), self.model, self.optimizer)
            load_plain(Path(checkpoint) / transformers.trainer.SCHEDULER_NAME, self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:  # noqa: ANN401
        """Load as the stock Trainer, with weights from any layout."""
        model = self.model if model is None else model
        folder, adapted = Path(resume_from_checkpoint), is_adapted(model)
        if self._osdp is None or (not self.is_fsdp_enabled and adapted and is_of_one_process(find_model(folder))):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_model(folder, model, trainable_only=adapted)

    @under_plan
    def _load_best_model(self) -> None:
        check_checkpoint(best := str(self.state.best_model_checkpoint))
        self._load_from_checkpoint(best)

    @under_plan
    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as its base class
        """Finalize as the stock Trainer; after SIGTERM only seconds are left, so keep the last checkpoint and do
        not load the best.
        """
        self.accelerator._writer.wait()  # stock loads the best one, which may be the last
        changed = {"load_best_model_at_end": False, "save_total_limit": None} if self._stop.stopped else {}
        with replaced(self.args, **changed):
            return super()._finalize_training(*args, **kwargs)

    @under_plan
    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as its base class
        """Start as the stock Trainer, which compares arguments with the checkpoint's: show it the user's batch
        size, not the plan's.
        """
        with replaced(self.args, per_device_train_batch_size=self._requested_batch_size):
            result = super()._init_training_state(*args, **kwargs)
        self.state.train_batch_size = self._requested_batch_size
        self._keep_best_inside()
        if self.state.global_step > self.state.max_steps and self.is_world_process_zero():
            _log.warning(
                "The checkpoint is of step %d, and this run ends after step %d: nothing is left to train.",
                self.state.global_step, self.state.max_steps,
            )  # fmt: skip
        return result

    def _keep_best_inside(self) -> None:
        """Take the best checkpoint from this run's folder, or forget its path: in another folder it may change or
        disappear, and at the end of training all but the best may be removed here.
        """
        folder, best = Path(self._get_output_dir(None)), self.state.best_model_checkpoint

        def inside() -> str | None:
            if best is None or Path(best).resolve().parent == folder.resolve():
                return best
            return str(here) if (here := folder / Path(best).name).is_dir() else None

        self.state.best_model_checkpoint = on_rank_zero(inside)  # other ranks may see other folders
        if best is not None and self.state.best_model_checkpoint is None and self.is_world_process_zero():
            _log.warning(
                "The best checkpoint so far, %s, is not in %s, so it will not be loaded; to keep it, copy it there.",
                best, folder,
            )  # fmt: skip

    @under_plan
    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load as the stock Trainer; ranks that did not exist when it was saved get random states of their own."""
        if checkpoint is not None:
            load_random_states(Path(checkpoint), self.args.process_index)

    def _checkpoint_to_resume(self, requested: str | bool | None) -> str | None:
        """Return the complete, undamaged checkpoint to resume from; the same on every rank."""
        settings = self._compare_ranks()
        folder, after_restart = str(self.args.output_dir), self.accelerator.config.resume_after_restart
        found = checkpoint_to_resume(
            folder, None if requested == "" else requested, marker=TRAINER_STATE, after_restart=after_restart
        )
        if found is None:
            if requested is True:
                raise ValueError(
                    f"No valid checkpoint found in output directory ({folder}); leave resume_from_checkpoint out to"
                    " begin."
                )
            return None
        on_rank_zero(lambda: _check_step(found))
        warn_of_changes(found, settings, None if self._run is None else self._run.plan)
        return str(found)

    def _settings(self) -> dict[str, str]:
        seed = str(self.args.seed) if self.args.data_seed is None else f"{self.args.seed} (data {self.args.data_seed})"
        texts = {
            "seed": seed,
            "precision": self.args.mixed_precision,
            "dataset": dataset_text(self.train_dataset),
            "optimizer": "" if self.optimizer is None else kind_of(self.optimizer).name,
        }
        arguments = {name: getattr(self.args, name, None) for name in _COMPARED}
        texts |= {name: str(getattr(value, "value", value)) for name, value in arguments.items() if value is not None}
        return {name: text for name, text in texts.items() if text}

    def _compare_ranks(self) -> dict[str, str]:
        """Refuse ranks that are about to train differently; return the run's settings. Collective."""
        free_gathered(self.model)  # so that parameters have their own dtypes
        kept = self.accelerator._writer.settings = {
            **self.accelerator._writer.settings,
            **model_texts(self.model),  # before training changes it, as by tokens to pad with
            **({} if self.optimizer is None else optimizer_texts(self.optimizer)),  # given by the user
            **({} if self.lr_scheduler is None else {"schedule": schedule_text(self.lr_scheduler)}),
        }
        settings = {**kept, **self._settings()}
        data = {"dataset": self.train_dataset, "eval_dataset": self.eval_dataset}
        require_same({
            **{name: str(value) for name, value in self.args.to_dict().items() if name not in _OF_RANKS},
            **settings,
            **{name: self.accelerator.data_of_all_ranks(one) for name, one in data.items()},
        })  # fmt: skip
        return settings

    def _finish_checkpoints(self) -> None:
        """Complete the last checkpoint, and unlock the folder for other runs."""
        self.accelerator._writer.wait()
        self._remove_old_checkpoints(Path(str(self.args.output_dir)))
        unlock_checkpoints(Path(str(self.args.output_dir)))


def _check_step(folder: Path) -> None:
    """Refuse a checkpoint that says another step than its name, as of the stock Trainer without checksums."""
    number = folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    path, step = folder / TRAINER_STATE, None
    with suppress(ValueError, TypeError, OSError, RecursionError):  # no JSON, or other fields
        if not path.exists():
            return
        step = TrainerState.load_from_json(str(path)).global_step
    if type(step) is not int or step < 0 or (number.isdecimal() and step != int(number)):
        raise CheckpointError(
            f"Checkpoint {folder} is damaged: {TRAINER_STATE} says step {step}; use an earlier checkpoint."
        )


class Events:
    """Call an event's callbacks so that their element-wise work on weights, such as averages, runs on shards of any
    layout; then, after one rank has received SIGTERM, save a checkpoint and end training at the same step on all.
    """

    def __init__(self, call: Callable[..., TrainerControl], stop: StopSignal | None) -> None:
        self._call, self._stop = call, stop

    def __call__(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        with AcrossLayouts(f"Work on weights in {event}"), mixing_explained(in_loss=False):
            control = self._call(event, args, state, control, **kwargs)
        if self._stop is None:
            return control
        if event == "on_train_begin":
            self._stop.start()
        if event == "on_step_end" and self._stop.agreed():
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # the launcher kills after a few seconds
            if state.is_world_process_zero:
                _log.warning("SIGTERM: training saves checkpoint-%d and ends.", state.global_step)
        if event == "on_epoch_end" and self._stop.stopped:  # the checkpoint after the step is enough
            control.should_save = control.should_evaluate = False
        if event == "on_train_end":
            self._stop.finish()
        return control
