"""Layouts by name."""

from __future__ import annotations

from hf_osdp.planner.costs import Choice
from hf_osdp.planner.description import GatherSpan, ModelDescription

LAYOUTS = ("ddp", "zero2", "zero3", "hsdp", "mixed")


def choices_of_layout(layout: str, description: ModelDescription, world: int) -> list[Choice]:
    """One choice a unit: one layout for all, or in `mixed` five that take turns."""
    half = max(1, world // 2)
    mixed = [(1, False), (world, False), (half, True), (2, False), (world, True)]
    choices = []
    for index, unit in enumerate(description.units):
        shard_size, keep = {
            "ddp": (1, False), "zero2": (world, True), "zero3": (world, False), "hsdp": (half, False), "mixed": mixed[index % 5],
        }[layout]  # fmt: skip
        choices.append(Choice(shard_size=shard_size, keep=keep or unit.span is GatherSpan.STEP or world == 1))
    return choices
