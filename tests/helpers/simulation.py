"""Layouts by name."""

from __future__ import annotations

from hf_osdp.planner.decision import UnitLayout
from hf_osdp.planner.description import GatherSpan, ModelDescription

LAYOUTS = ("ddp", "zero2", "zero3", "two_stage", "hsdp", "mixed")


def choices_of_layout(layout: str, description: ModelDescription, world: int) -> list[UnitLayout]:
    """One choice a unit: one layout for all, or in `mixed` six that take turns. Two stages take the world as pairs of ranks."""
    half = max(1, world // 2)
    mixed = [(1, False, 1), (world, False, 1), (half, True, 1), (2, False, 1), (world, True, 1), (half, False, 2)]
    choices = []
    for index, unit in enumerate(description.units):
        shard_size, keep, stage_size = {
            "ddp": (1, False, 1), "zero2": (world, True, 1), "zero3": (world, False, 1), "two_stage": (world, False, 2),
            "hsdp": (half, False, 1), "mixed": mixed[index % 6],
        }[layout]  # fmt: skip
        kept = unit.span is GatherSpan.STEP or (unit.span is GatherSpan.USE and (keep or world == 1))
        choices.append(UnitLayout(shard_size=shard_size, reshard_after_forward=not kept, stage_size=stage_size))
    return choices
