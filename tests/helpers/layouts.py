"""Plans written by hand, for tests of what runs them."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

from torch import nn

from hf_osdp.modeling.units import find_units
from hf_osdp.planner.description import DType, GatherSpan, ModelDescription, Recomputation, UnitDescription
from hf_osdp.planner.grouping import as_one
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.plan import Plan, UnitDecision

SAVED_CALLS = "addmm#0 addmm#2 mm#1 mm#4 bmm#1 attention#0 native_layer_norm#1 _softmax#0 div#1"
SELECTIVE = Activations(recomputation=Recomputation(saved_calls=tuple(SAVED_CALLS.split())))
"""Outputs of some operators are saved, as far as a block has them."""
LAYOUTS = ("replicate", "zero2", "zero3", "two_stage", "hsdp", "mixed", "everything", "compiled")


def plan_of(
    units: tuple[UnitDescription, ...], world_size: int, layout: str, *, accumulation_steps: int = 1,
    reduce_every_micro_step: bool | None = True,
) -> Plan:  # fmt: skip
    """One layout for all units, or `mixed`: every layout in turn. Two stages take the world as two nodes of several
    ranks. `everything` adds to that blocks that are recomputed, wholly or in part, and units on the host; `compiled`
    compiles the blocks.

    `reduce_every_micro_step=None` lets every third unit reduce, the others hold.
    """
    compiled = {unit.class_name: None for unit in units if layout == "compiled" and _is_block(unit)}
    decisions = []
    for index, unit in enumerate(units):
        reduces = index % 3 == 0 if reduce_every_micro_step is None else reduce_every_micro_step
        decision = _decision(unit, index, world_size, layout)
        decisions.append(replace(decision, reduce_every_micro_step=reduces))
    any_description = ModelDescription(
        model_name="", model_class="", block_classes=(), sequence_length=1, compute_dtype=DType.FLOAT32, units=units,
        segments=(),
    )  # fmt: skip
    return Plan(
        world_size=world_size, strategy="osdp", units=tuple(decisions), micro_batch_size=1,
        accumulation_steps=accumulation_steps, model_fingerprint=any_description.fingerprint,
        compiled_classes=tuple(compiled),
    )  # fmt: skip


def joined(blocks: int, model: nn.Module, **options: Any) -> tuple[UnitDescription, ...]:
    """Return a model's units, so many neighbouring blocks in one."""
    rows = groupby(find_units(model, **options), key=lambda unit: (unit.class_name, unit.fqn.rpartition(".")[0]))
    units: list[UnitDescription] = []
    for _, row in rows:
        parts = list(row)
        step = blocks if len(parts) > 1 else 1
        units += [as_one(parts[start : start + step]) for start in range(0, len(parts), step)]
    return tuple(units)


def _is_block(unit: UnitDescription) -> bool:
    return unit.span is GatherSpan.USE and unit.class_name.endswith(("Block", "Layer"))


def mixed_plan(
    model: nn.Module, world_size: int, *, sequence_length: int, micro_batch_size: int, accumulation_steps: int,
    reduce: bool,
) -> Plan:  # fmt: skip
    """Every layout in turn, for a model's batches of these sizes."""
    steps = {"accumulation_steps": accumulation_steps, "reduce_every_micro_step": reduce}
    plan = plan_of(find_units(model), world_size, "mixed", **steps)
    return replace(plan, micro_batch_size=micro_batch_size, sequence_length=sequence_length)


def _decision(unit: UnitDescription, index: int, world_size: int, layout: str) -> UnitDecision:
    group = max(1, world_size // 2)
    mixed = (
        (group, True, 1), (world_size, False, 1), (1, True, 1), (world_size, True, group), (group, False, 1),
        (world_size, True, 1), (1, False, 1), (world_size, False, group),
    )[index % 8]  # fmt: skip
    shard_size, reshard, stage_size = {
        "replicate": (1, True, 1), "zero2": (world_size, False, 1), "zero3": (world_size, True, 1),
        "two_stage": (world_size, True, group), "hsdp": (group, True, 1), **dict.fromkeys(LAYOUTS[5:], mixed),
    }[layout]  # fmt: skip
    kinds = Activations.BASIC[:2] if layout == "compiled" else (*Activations.BASIC, SELECTIVE)
    changes = layout in ("everything", "compiled")
    activations = kinds[index % len(kinds)] if changes and _is_block(unit) else Activations.SAVE
    return UnitDecision(
        fqn=unit.fqn, shard_size=shard_size, reshard_after_forward=reshard, stage_size=stage_size,
        activations=activations, on_host=changes and index % 3 == 1,
    )  # fmt: skip
