"""A unit while a step's events are made: sizes of its tensors, and which of them are there."""

from __future__ import annotations

from ..cost.units import reduce_input, unit_bytes
from ..decision import Batch, UnitLayout
from ..description import ParameterSpec, UnitDescription
from ..job import TrainingJob


class UnitOnDevice:
    """One unit's parameters as FSDP2 handles them, and what of them is there now."""

    def __init__(self, unit: UnitDescription, choice: UnitLayout, world_size: int, job: TrainingJob, batch: Batch) -> None:
        self.span, self.choice = unit.span, choice
        self.terms = unit_bytes(unit, choice, world_size, job, batch)
        g, precision = choice.shard_size, job.precision
        trainable = [p for p in unit.parameters if p.requires_grad]

        def sharded(p: ParameterSpec) -> int:
            return p.sharded_numel(g)

        self.shards = [sharded(p) * p.dtype.itemsize for p in unit.parameters]
        self.trained = [sharded(p) * p.dtype.itemsize for p in trainable]
        self.handled = self.terms.gathered > 0  # else one process trains the plain module
        self.gathered_sizes = [g * sharded(p) * precision.gathered_dtype(p).itemsize for p in unit.parameters]
        self.casts = [precision.gathered_dtype(p) is not p.dtype for p in unit.parameters]
        self.cast_bytes = sum(
            sharded(p) * precision.gathered_dtype(p).itemsize for p, cast in zip(unit.parameters, self.casts, strict=True) if cast
        )
        self.gradient_sizes = [p.numel * precision.gathered_dtype(p).itemsize for p in trainable]
        whole = sum(p.numel * precision.reduced_dtype(p).itemsize for p in trainable)
        self.whole_factor = whole / sum(self.gradient_sizes) if trainable else 1
        """Bytes of a gradient that is held whole over those of one as autograd makes it."""
        self.reduced = sum(sharded(p) * precision.reduced_dtype(p).itemsize for p in trainable)
        self.reduce_input = reduce_input(unit, g, job)
        self.recast = any(precision.reduced_dtype(p) is not p.dtype for p in trainable)
        self.replicas = g < world_size
        self.holds = batch.holds_gradients(choice) and self.handled
        self.buffer: int | None = None
        self.gathered: list[int] = []
        self.gradients: list[int] = []
        self.whole: list[int] = []
        """Whole gradients of earlier micro-steps."""
        self.gradient: int | None = None
        """The sharded one; of plain modules all that is in `gradients`."""
        self.partial: int | None = None
