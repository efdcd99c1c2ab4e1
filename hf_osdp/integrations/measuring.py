"""Measures the steps of a Trainer run or of a loop, so that estimates can be held against them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from ..measurement.loop_meter import LoopMeter
from ..measurement.step_meter import Observation, StepMeter
from ..planner.plan import Plan


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

    def summary(self) -> Observation:
        """What the meter found, over all ranks. Every process calls this together."""
        return self._meter.summary()


def watch_loop(model: nn.Module, plan: Plan, told: Callable[[Observation], None], *, device: torch.device, skips: bool) -> LoopMeter:
    """Measure the first steps of a loop that is the user's own.

    Args:
        model: prepared.
        plan: what runs.
        told: called once, on every process, with what was seen.
        device: where the model runs.
        skips: a loss scaler may skip the optimizer's step.
    """
    return LoopMeter(model, device, told, micro_steps=plan.accumulation_steps if skips else None)
