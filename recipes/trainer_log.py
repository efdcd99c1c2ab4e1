"""What a Trainer tells of its optimizer steps, in the file and the words of the loop that is written out (`step_log.py`)."""

from __future__ import annotations

import time
from typing import Any

from step_log import LogFile, free_memory, loss_scale, perplexity
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_osdp import Trainer

_SPEEDS = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_model_preparation_time")


class TrainerLog(TrainerCallback):
    """Writes a line to `log.jsonl` for every `logging_steps`, and one for each evaluation."""

    def __init__(self, trainer: Trainer, *, tokens_per_sample: int | None, goes_on: bool):
        """
        Args:
            trainer: what is trained.
            tokens_per_sample: where the loss is that of tokens; None where it is that of samples, which have no perplexity.
            goes_on: keep the lines that an earlier run has written.
        """
        args = trainer.args
        self._accelerator, self._tokens_per_sample = trainer.accelerator, tokens_per_sample
        self._file = LogFile(args.output_dir, is_rank_zero=trainer.is_world_process_zero(), goes_on=goes_on)
        self._samples_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._steps, self._since, self._idle_since = 0, 0.0, 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Training time starts here."""
        self._steps, self._since = 0, time.perf_counter()
        self._idle_since = self._since

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """One more step; what follows may be an evaluation or a checkpoint."""
        self._steps += 1
        self._idle_since = time.perf_counter()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """The Trainer's own figures, of training steps or of an evaluation, with ours beside them."""
        place = {"step": state.global_step, "epoch": state.epoch or 0.0}
        if logs and "loss" in logs:
            self._write_steps(place, logs)
        elif logs and "eval_loss" in logs:
            figures = {name: value for name, value in logs.items() if name.startswith("eval_") and name not in _SPEEDS}
            if self._tokens_per_sample is not None:
                figures["eval_perplexity"] = perplexity(logs["eval_loss"])
            self._file.write(**place, **figures)

    def _write_steps(self, place: dict[str, float], logs: dict[str, float]) -> None:
        """Figures of the steps since the last line."""
        samples_per_s = self._samples_per_step * self._steps / (time.perf_counter() - self._since)
        tokens = self._tokens_per_sample
        self._file.write(
            **place,
            loss=logs["loss"],
            **({} if tokens is None else {"perplexity": perplexity(logs["loss"])}),
            learning_rate=logs.get("learning_rate"),
            gradient_norm=logs.get("grad_norm"),
            loss_scale=loss_scale(self._accelerator),
            **({"samples_per_s": samples_per_s} if tokens is None else {"tokens_per_s": samples_per_s * tokens}),
            free_device_memory_bytes=free_memory(self._accelerator.device),
        )
        self._steps, self._since = 0, time.perf_counter()
        self._idle_since = self._since

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """An evaluation is no training time."""
        self._leave_out()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Nor is a checkpoint."""
        self._leave_out()

    def _leave_out(self) -> None:
        """The time since the last step is over, or since the last line."""
        now = time.perf_counter()
        self._since, self._idle_since = self._since + now - self._idle_since, now
