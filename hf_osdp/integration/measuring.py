"""Measures the steps of a Trainer run, so that estimates can be held against them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from ..runtime.measure import StepMeter


class StepCallback(TrainerCallback):
    """Tells the step meter where each optimizer step begins and ends; evaluation and checkpoints lie between."""

    def __init__(self, device: torch.device):
        self._meter = StepMeter(device)
        self._open = False
        self.measured = 0
        """Steps measured so far."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first micro-batch of an optimizer step starts."""
        self._meter.step_begins()
        self._open = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer has stepped."""
        if self._open:
            self._meter.step_ends()
            self._open = False
            self.measured += 1

    def summary(self) -> Any:
        """What the meter found, over all ranks. Every process calls this together."""
        return self._meter.summary()
