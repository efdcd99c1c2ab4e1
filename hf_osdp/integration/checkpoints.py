"""Checkpoints of models with operators in slices: Accelerate's and the Trainer's, under Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..splitting.checkpoint import hugging_face_names
from ..splitting.names import is_split
from ..splitting.positions import keep_positions
from .host_states import loads_to_two_devices


class AcceleratorCheckpoints:
    """Before `Accelerator` among the bases: what it saves and loads keeps Hugging Face names and shapes."""

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As `Accelerator.save_state`; in how many slices operators are does not show in it."""
        with _unseen_slices(self._models, self._optimizers):
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """As `Accelerator.load_state`, from any number of slices to any other."""
        with _unseen_slices(self._models, self._optimizers):
            return super().load_state(*args, **kwargs)


class TrainerCheckpoints:
    """The same for `transformers.Trainer`, which does not go through `save_state`."""

    def _save_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        with _unseen_slices([self.model], [self.optimizer]):
            return super()._save_optimizer_and_scheduler(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        with _unseen_slices([self.model], [self.optimizer]):
            return super()._load_optimizer_and_scheduler(*args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with hugging_face_names(), loads_to_two_devices():
            return super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self, *args: Any, **kwargs: Any) -> Any:
        with hugging_face_names(), loads_to_two_devices():
            return super()._load_best_model(*args, **kwargs)


@contextmanager
def _unseen_slices(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> Iterator[None]:
    """By name where the model is sharded; by position where it is not."""
    for model in models:
        for optimizer in optimizers if is_split(model) else ():
            keep_positions(optimizer, model)
    with hugging_face_names(), loads_to_two_devices():
        yield
