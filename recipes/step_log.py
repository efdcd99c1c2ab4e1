"""What is told of optimizer steps: lines of JSON in a file, and a loop's progress bar on rank 0. Of the Trainer: `trainer_log.py`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import tqdm


class LogFile:
    """`log.jsonl`: a line for each set of figures, written by rank 0."""

    def __init__(self, folder: str, *, is_rank_zero: bool, goes_on: bool):
        """
        Args:
            folder: where the file goes; made when there is something to write.
            is_rank_zero: whether this process writes.
            goes_on: keep the lines that an earlier run has written; else the first line replaces them.
        """
        self._path, self._is_rank_zero = Path(folder) / "log.jsonl", is_rank_zero
        self._mode = "a" if goes_on else "w"

    def write(self, **figures: float | None) -> None:
        """One line; what is not finite is null, as JSON has no word for it."""
        if not self._is_rank_zero:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({name: value if value is not None and math.isfinite(value) else None for name, value in figures.items()})
        with self._path.open(self._mode, encoding="utf-8") as file:
            file.write(line + "\n")
        self._mode = "a"


class StepLog:
    """Collects the losses of micro-batches; every so many optimizer steps it writes a line to `log.jsonl`. Every rank has one."""

    def __init__(self, accelerator: Accelerator, file: LogFile, *, total: int, done: int, every: int, tokens_per_step: int, silent: bool):
        """
        Args:
            accelerator: that of the loop.
            file: where lines go.
            total: optimizer steps of the training.
            done: those that an earlier run has taken.
            every: steps of a line.
            tokens_per_step: over all processes.
            silent: whether there is no progress bar.
        """
        self._accelerator, self._file = accelerator, file
        self._every, self._tokens_per_step = every, tokens_per_step
        self._bar = tqdm(total=total, initial=done, desc="Training", unit="step", disable=silent)
        self._losses: list[torch.Tensor] = []
        self._steps, self._since = 0, time.perf_counter()

    def micro_step(self, loss: torch.Tensor) -> None:
        """Keep the loss of a micro-batch, on its device."""
        self._losses.append(loss.detach())

    def step(self, step: int, *, epoch: float, learning_rate: float, gradient_norm: torch.Tensor) -> None:
        """An optimizer step is done; a line where its turn has come. Collective."""
        self._steps += 1
        self._bar.update(1)
        if step % self._every:
            return
        loss = self._accelerator.reduce(torch.stack(self._losses).mean(), reduction="mean").item()
        self._file.write(
            step=step,
            epoch=epoch,
            loss=loss,
            perplexity=perplexity(loss),
            learning_rate=learning_rate,
            gradient_norm=float(gradient_norm),
            loss_scale=loss_scale(self._accelerator),
            tokens_per_s=self._tokens_per_step * self._steps / (time.perf_counter() - self._since),
            free_device_memory_bytes=free_memory(self._accelerator.device),
        )
        self._bar.set_postfix(loss=f"{loss:.3f}")
        self._losses, self._steps, self._since = [], 0, time.perf_counter()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What goes on in here, such as evaluation, is no training time."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def close(self) -> None:
        """Leave the progress bar as it is."""
        self._bar.close()


def perplexity(loss: float) -> float:
    """exp of a mean loss; not more than a float can hold."""
    return math.exp(min(loss, 700.0))


def loss_scale(accelerator: Accelerator) -> float:
    """What fp16 losses are multiplied by; 1 in other precisions."""
    scaler = accelerator.scaler
    return scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0


def free_memory(device: torch.device) -> int:
    """Bytes that nobody uses on this process's device, or on the host where that is the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
