"""Models beside the trained one, which only run forward, such as a teacher: sharded over all ranks, block by block."""

from __future__ import annotations

from torch import nn

from ..distributed.mesh import world_size
from ..modeling.units import find_units
from ..planner.cost.evaluation import EvaluatedModel
from ..planner.decision import Batch, UnitLayout
from ..planner.description import DType, ModelDescription, Segment
from ..planner.plan import Plan
from ..planner.training_job import TrainingJob
from .apply import apply_plan


def as_sharded(model: nn.Module) -> EvaluatedModel:
    """Return a model as it runs forward in shards over all ranks, in its parameters' own dtypes."""
    units = find_units(model)
    order = (*range(len(units)), *([0] if len(units) > 1 and not units[0].fqn else []))  # the root's own work ends it
    description = ModelDescription(
        model_name="", model_class=type(model).__name__, block_classes=(), sequence_length=1,
        compute_dtype=DType.FLOAT32, units=units, segments=tuple(Segment(unit=index) for index in order),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
    )  # fmt: skip
    layout = UnitLayout(shard_size=world_size(), reshard_after_forward=True)
    return EvaluatedModel(
        description=description, layouts=(layout,) * len(units), world_size=world_size(),
        job=TrainingJob(global_batch_size=world_size()), trains=False,
    )  # fmt: skip


def shard_beside(model: nn.Module) -> None:
    """Shard a model that only runs forward, in place, with rank 0's weights. Collective."""
    evaluated = as_sharded(model)
    batch = Batch(micro_batch_size=1, accumulation_steps=1)
    plan = Plan.of(evaluated.description, evaluated.layouts, batch, world_size=evaluated.world_size, strategy="fsdp")
    apply_plan(model, plan, evaluated.description.units)
