"""Plans made by hand, for tests of what runs them."""

from __future__ import annotations

from itertools import cycle

from torch import nn

from hf_osdp.modeling.units import find_units
from hf_osdp.planner.description import DType, ModelDescription
from hf_osdp.planner.plan import Plan, UnitDecision


def mixed_plan(
    model: nn.Module, world_size: int, *, sequence_length: int, micro_batch_size: int, accumulation_steps: int, reduce: bool
) -> Plan:
    """A plan in which neighbouring units differ: replicated, sharded over all, sharded in pairs, kept and freed; with more than
    two ranks also sharded over all in two stages, pairs taken as nodes."""
    units = find_units(model)
    pair = 2 if world_size % 2 == 0 else 1
    staged = [(world_size, True, pair)] if world_size > pair > 1 else []
    layouts = cycle(
        [(world_size, False, 1), (1, True, 1), *staged, (world_size, True, 1), (pair, True, 1), (1, False, 1), (pair, False, 1)]
    )  # fmt: skip
    description = ModelDescription(
        model_name="", model_class=type(model).__name__, block_classes=(), sequence_length=sequence_length,
        compute_dtype=DType.FLOAT32, units=units, segments=(),
    )  # fmt: skip
    return Plan(
        world_size=world_size,
        strategy="osdp",
        units=tuple(
            UnitDecision(fqn=unit.fqn, shard_size=size, reshard_after_forward=free, stage_size=stage, reduce_every_micro_step=reduce)
            for unit, (size, free, stage) in zip(units, layouts, strict=False)
        ),
        micro_batch_size=micro_batch_size,
        accumulation_steps=accumulation_steps,
        model_fingerprint=description.fingerprint,
        sequence_length=sequence_length,
    )
