"""Save a checkpoint and end the training of a Trainer that received SIGTERM."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..distributed.stop import StopSignal

_log = logging.getLogger(__name__)


class StopCallback(TrainerCallback):
    """Have a checkpoint saved and training ended at the same step on all ranks, once one of them had SIGTERM.

    Args:
        stop: not yet started; `stopped` tells afterwards that it ended training.
    """

    def __init__(self, stop: StopSignal) -> None:
        self._stop = stop

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Listen."""
        self._stop.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Ask all ranks."""
        if self._stop.agreed():
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # the launcher waits for seconds only
            if state.is_world_process_zero:
                _log.warning("SIGTERM: training saves checkpoint-%d and ends.", state.global_step)
        return control

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Save no more: the checkpoint after the step is enough."""
        if self._stop.stopped:
            control.should_save = control.should_evaluate = False
        return control

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Listen no more."""
        self._stop.finish()
