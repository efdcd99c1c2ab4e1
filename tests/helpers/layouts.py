"""Plans written by hand, for tests of what runs them."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hf_osdp.modeling.units import find_units
from hf_osdp.planner.description import DType, GatherSpan, ModelDescription, Recomputation, UnitDescription
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.plan import Plan, UnitDecision

SELECTIVE = Activations(
    recomputation=Recomputation(
        saved_calls=(
            "addmm#0",
            "addmm#2",
            "mm#1",
            "mm#4",
            "bmm#1",
            "attention#0",
            "native_layer_norm#1",
            "_softmax#0",
            "div#1",
        )
    )
)
"""Outputs of some operators are saved, as far as a block has them."""
BUDGETS = (
    Activations.SAVE,
    Activations.RECOMPUTE,
    *(Activations(recomputation=Recomputation(budget=part)) for part in (0.28, 0.53)),
)
"""What compiled blocks may do."""
LAYOUTS = ("replicate", "zero2", "zero3", "two_stage", "hsdp", "mixed", "everything", "compiled")


def plan_of(
    units: tuple[UnitDescription, ...],
    world_size: int,
    layout: str,
    *,
    accumulation_steps: int = 1,
    reduce_every_micro_step: bool | None = True,
) -> Plan:
    """One layout for all units, or `mixed`: every layout in turn. Two stages take the world as two nodes of several
    ranks. `everything` adds to that blocks that are recomputed, wholly or in part, and units on the host; `compiled`
    compiles the blocks.

    `reduce_every_micro_step=None` lets every third unit reduce, the others hold.
    """
    reduces = (True, False, False) if reduce_every_micro_step is None else (reduce_every_micro_step,)
    return Plan(
        world_size=world_size,
        strategy="osdp",
        units=tuple(
            replace(_decision(unit, index, world_size, layout), reduce_every_micro_step=reduces[index % len(reduces)])
            for index, unit in enumerate(units)
        ),
        micro_batch_size=1,
        accumulation_steps=accumulation_steps,
        model_fingerprint=fingerprint_of(units),
        compiled_classes=tuple({unit.class_name: None for unit in units if _is_block(unit)})
        if layout == "compiled"
        else (),
    )


def _is_block(unit: UnitDescription) -> bool:
    return unit.span is GatherSpan.USE and unit.class_name.endswith(("Block", "Layer"))


def mixed_plan(
    model: nn.Module,
    world_size: int,
    *,
    sequence_length: int,
    micro_batch_size: int,
    accumulation_steps: int,
    reduce: bool,
) -> Plan:
    """Every layout in turn, for a model's batches of these sizes."""
    plan = plan_of(
        find_units(model), world_size, "mixed", accumulation_steps=accumulation_steps, reduce_every_micro_step=reduce
    )
    return replace(plan, micro_batch_size=micro_batch_size, sequence_length=sequence_length)


def fingerprint_of(units: tuple[UnitDescription, ...]) -> str:
    """The fingerprint of any description with these units."""
    return ModelDescription(
        model_name="",
        model_class="",
        block_classes=(),
        sequence_length=1,
        compute_dtype=DType.FLOAT32,
        units=units,
        segments=(),
    ).fingerprint


def _decision(unit: UnitDescription, index: int, world_size: int, layout: str) -> UnitDecision:
    group = max(1, world_size // 2)
    stage_size = 1
    match layout:
        case "replicate":
            shard_size, reshard = 1, True
        case "zero2":
            shard_size, reshard = world_size, False
        case "zero3":
            shard_size, reshard = world_size, True
        case "two_stage":
            shard_size, reshard, stage_size = world_size, True, group
        case "hsdp":
            shard_size, reshard = group, True
        case "mixed" | "everything" | "compiled":
            meshes = [
                (group, True, 1), (world_size, False, 1), (1, True, 1), (world_size, True, group), (group, False, 1),
                (world_size, True, 1),
                (1, False, 1), (world_size, False, group),
            ]  # fmt: skip
            shard_size, reshard, stage_size = meshes[index % len(meshes)]
        case _:
            raise ValueError(f"plan_of has no layout {layout!r}; use one of {', '.join(LAYOUTS)}.")
    kinds = BUDGETS if layout == "compiled" else (*Activations.BASIC, SELECTIVE)
    changes = layout in ("everything", "compiled")
    return UnitDecision(
        fqn=unit.fqn,
        shard_size=shard_size,
        reshard_after_forward=reshard,
        stage_size=stage_size,
        activations=kinds[index % len(kinds)] if changes and _is_block(unit) else Activations.SAVE,
        on_host=changes and index % 3 == 1,
    )
