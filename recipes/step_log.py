"""What a loop tells of its optimizer steps: lines of JSON in a file, and a progress bar on rank 0."""

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


class StepLog:
    """Collects the losses of micro-batches; every so many optimizer steps it writes a line to `log.jsonl`. Every rank has one."""

    def __init__(self, accelerator: Accelerator, folder: str, *, total: int, done: int, every: int, tokens_per_step: int, silent: bool):
        """
        Args:
            accelerator: that of the loop.
            folder: where `log.jsonl` goes; made when there is something to write.
            total: optimizer steps of the training.
            done: those that an earlier run has taken.
            every: steps of a line.
            tokens_per_step: over all processes.
            silent: whether there is no progress bar.
        """
        self._accelerator, self._path = accelerator, Path(folder) / "log.jsonl"
        self._every, self._tokens_per_step = every, tokens_per_step
        self._bar = tqdm(total=total, initial=done, desc="Training", unit="step", disable=silent)
        self._losses: list[torch.Tensor] = []
        self._steps, self._since = 0, time.perf_counter()

    def micro_step(self, loss: torch.Tensor) -> None:
        """Keep the loss of a micro-batch, on its device."""
        self._losses.append(loss.detach())

    def step(self, step: int, *, learning_rate: float, gradient_norm: torch.Tensor) -> None:
        """An optimizer step is done; a line where its turn has come. Collective."""
        self._steps += 1
        self._bar.update(1)
        if step % self._every:
            return
        loss = self._accelerator.reduce(torch.stack(self._losses).mean(), reduction="mean").item()
        scaler = self._accelerator.scaler
        self.write(
            step=step,
            loss=loss,
            perplexity=perplexity(loss),
            learning_rate=learning_rate,
            gradient_norm=float(gradient_norm),
            loss_scale=scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0,
            tokens_per_s=self._tokens_per_step * self._steps / (time.perf_counter() - self._since),
            free_device_memory_bytes=free_memory(self._accelerator.device),
        )
        self._bar.set_postfix(loss=f"{loss:.3f}")
        self._losses, self._steps, self._since = [], 0, time.perf_counter()

    def write(self, **figures: float) -> None:
        """One line, on rank 0; what is not finite is null, as JSON has no word for it."""
        if not self._accelerator.is_main_process:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({name: value if math.isfinite(value) else None for name, value in figures.items()})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

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


def free_memory(device: torch.device) -> int:
    """Bytes that nobody uses on this process's device, or on the host where that is the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
