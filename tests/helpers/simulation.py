"""The planner's estimate beside the simulated step, for layouts given by name."""

from __future__ import annotations

from hf_osdp.planner.costs import Batch, Choice
from hf_osdp.planner.description import GatherSpan, ModelDescription
from hf_osdp.planner.plan import Plan, UnitDecision

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


def as_plan(description: ModelDescription, choices: list[Choice], batch: Batch, world: int) -> Plan:
    """A plan of these choices."""
    return Plan(
        world_size=world,
        strategy="osdp",
        units=tuple(
            UnitDecision(fqn=unit.fqn, shard_size=c.shard_size, reshard_after_forward=not c.keep)
            for unit, c in zip(description.units, choices, strict=True)
        ),
        micro_batch_size=batch.micro_batch_size,
        accumulation_steps=batch.accumulation_steps,
        reduce_every_micro_step=batch.reduce_every_micro_step,
        model_fingerprint=description.fingerprint,
        sequence_length=description.sequence_length,
    )
