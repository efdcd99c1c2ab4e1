"""Checkpoints of models with operators in slices: Accelerate's and the Trainer's, under Hugging Face names."""

from __future__ import annotations

from typing import Any

from ..splitting.checkpoint import hugging_face_names


class AcceleratorCheckpoints:
    """Before `Accelerator` among the bases: what it saves and loads of a sharded model keeps Hugging Face names and shapes."""

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As `Accelerator.save_state`; in how many slices operators are does not show in it."""
        with hugging_face_names():
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """As `Accelerator.load_state`, from any number of slices to any other."""
        with hugging_face_names():
            return super().load_state(*args, **kwargs)


class TrainerCheckpoints:
    """The same for `transformers.Trainer`, which does not go through `save_state`."""

    def _save_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        with hugging_face_names():
            return super()._save_optimizer_and_scheduler(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        with hugging_face_names():
            return super()._load_optimizer_and_scheduler(*args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with hugging_face_names():
            return super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self, *args: Any, **kwargs: Any) -> Any:
        with hugging_face_names():
            return super()._load_best_model(*args, **kwargs)
