"""Local steps of the Trainer: when machines synchronise, and what of it a checkpoint holds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..checkpoint.safe import load_file
from ..checkpoint.writer import on_every_rank
from ..distributed.mesh import rank
from ..planner.local_steps import LocalSteps
from ..planner.plan import Plan
from ..sharding.local_steps import OuterOptimizer
from .plugin import OSDPPlugin, offloads, writes_shards

_log = logging.getLogger(__name__)


def check_arguments(args: TrainingArguments, plugin: OSDPPlugin, steps: int) -> None:
    """Refuse arguments of a Trainer beside `steps` local steps; ValueError."""
    problem = None
    for name, strategy, value in (
        ("save_steps", args.save_strategy == SaveStrategy.STEPS, args.save_steps),
        ("eval_steps", args.eval_strategy == IntervalStrategy.STEPS, args.eval_steps or steps),
    ):
        if strategy and value >= 1 and value % steps:
            nearest = max(1, round(value / steps)) * steps
            problem = f"{name}={value:g} is no multiple of it, where the machines have the same model; use {nearest}"
    if writes_shards(plugin):
        problem = "state_dict_type='SHARDED_STATE_DICT' would mix the machines' optimizer states; use FULL_STATE_DICT"
    if offloads(plugin):
        problem = "cpu_offload moves states to the host; leave one of the two out"
    if problem is not None:
        raise ValueError(f"local_steps={steps}: {problem}.")


class LocalStepsCallback(TrainerCallback):
    """Has machines synchronise after every step whose number the local steps divide, and after the last."""

    def __init__(self, plan: Plan, steps: LocalSteps) -> None:
        self._steps, self._layout = steps, f"{plan.fingerprint}, rank {rank()}"
        self._outer: OuterOptimizer | None = None
        self._loaded: dict[str, Any] | None = None
        self._synchronised = 0
        """The number of the step after which machines were equal."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._outer, self._synchronised = OuterOptimizer(kwargs["model"], self._steps), state.global_step
        if self._loaded is not None:
            self._outer.load(self._loaded, kwargs["optimizer"])
            self._loaded = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self._steps.steps == 0 or state.global_step >= state.max_steps:
            self.synchronise(state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._outer = None

    def synchronise(self, state: TrainerState, before: str = "") -> None:
        """Make the machines equal where they are not, and say so where it is done `before` something. Collective."""
        if self._outer is None or self._synchronised == state.global_step:
            return
        if before and rank() == 0:
            _log.warning("%s at step %d: the machines synchronise first, between their local steps.", before, state.global_step)
        self._outer.step()
        self._synchronised = state.global_step

    def save(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        """Write this rank's outer momentum and its part of its machine's optimizer states. Collective."""
        if self._outer is not None:
            state = {"layout": self._layout, **self._outer.state(optimizer)}
            on_every_rank(lambda: torch.save(state, _path(folder)))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, to go on with it; where it is of another plan, the first machine's states stay. Collective."""
        state: dict[str, Any] = {}

        def fits_here() -> bool:
            state.update(load_file(_path(folder)) if _path(folder).is_file() else {})
            return state.get("layout") == self._layout

        fits = all(on_every_rank(fits_here))
        self._loaded = state if fits else None
        if rank() == 0 and not (fits and state["states"]):
            momentum = "" if fits else "; the outer momentum begins at zero, as the checkpoint is not of this plan's local steps"
            _log.warning("%s: all machines go on with the first machine's optimizer states%s.", folder, momentum)


def _path(folder: Path) -> Path:
    return folder / f"local_steps_{rank()}.pt"
