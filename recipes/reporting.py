"""What the recipes print and write, and is not their lesson: perplexities, saved models, the log."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch
from transformers import TrainerCallback

from hf_osdp import Trainer, checkpoint_to_resume


def train_and_save(trainer: Trainer, resume: str | bool | None, evaluate: Callable[[Trainer, str], None]) -> None:
    """Evaluate, train, save the model and its metrics, and evaluate again, as `do_train` and `do_eval` say."""
    args, is_main = trainer.args, trainer.is_world_process_zero()
    checkpoint = checkpoint_to_resume(args.output_dir, resume)
    if args.do_train and not checkpoint and is_main:
        (Path(args.output_dir) / "log.jsonl").unlink(missing_ok=True)  # left by an earlier run
    if args.do_eval:
        evaluate(trainer, " before training" if args.do_train else "")
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
        if args.do_eval:
            evaluate(trainer, " after training")
        if is_main:
            print(f"model saved in {args.output_dir}", flush=True)
    trainer.accelerator.end_training()


def print_perplexity(trainer: Trainer, when: str) -> None:
    """Print exp(mean loss per predicted token) on the validation text, and save it with the other metrics."""
    metrics = trainer.evaluate()
    metrics["perplexity"] = np.exp(metrics["eval_loss"])
    trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        print(f"perplexity{when}: {metrics['perplexity']:.2f}", flush=True)


def loss_scale(scaler) -> float:
    """Return the factor of the fp16 loss scaling, otherwise 1."""
    return scaler.get_scale() if scaler and scaler.is_enabled() else 1.0


def free_memory(device: torch.device) -> int:
    """Return the free bytes of the device, or of the host."""
    return torch.cuda.mem_get_info()[0] if device.type == "cuda" else psutil.virtual_memory().available


def append_to_log(folder: str, line: dict[str, float]) -> None:
    """Append a line to `log.jsonl`; values that are not finite become null."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({name: value if math.isfinite(value) else None for name, value in line.items()}) + "\n")


class JSONLog(TrainerCallback):
    """Write `log.jsonl`: one line every `logging_steps` and one for each evaluation.

    Rates exclude evaluations and checkpoints. With the tokens of a sample it logs tokens and perplexities, without it
    samples.
    """

    def __init__(self, trainer: Trainer, tokens_per_sample: int | None = None):
        self.trainer, self.tokens_per_sample = trainer, tokens_per_sample
        self.samples, self.seconds, self.last = 0, 0.0, 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.last = time.perf_counter()

    on_evaluate = on_save = on_train_begin

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now = time.perf_counter()
        self.seconds, self.last = self.seconds + now - self.last, now
        self.samples += args.train_batch_size * args.gradient_accumulation_steps * args.world_size

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if not state.is_world_process_zero or not {"loss", "eval_loss"} & logs.keys():
            return
        line, tokens = {"step": state.global_step, **logs}, self.tokens_per_sample
        if "loss" in logs:
            if tokens:
                line |= {"perplexity": np.exp(logs["loss"]), "tokens_per_s": self.samples * tokens / self.seconds}
            else:
                line["samples_per_s"] = self.samples / self.seconds
            line["loss_scale"] = loss_scale(self.trainer.accelerator.scaler)
            line["free_device_memory_bytes"] = free_memory(args.device)
            self.samples, self.seconds = 0, 0.0
        elif tokens:
            line["eval_perplexity"] = np.exp(logs["eval_loss"])
        append_to_log(args.output_dir, line)
