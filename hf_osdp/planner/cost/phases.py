"""Memory of what a job does beside its steps: whole weights and states that are saved, and a resume.

docs/planner.md has the equations; evaluation is in evaluation.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..decision import UnitLayout
from ..description import ModelDescription, shard_dim
from ..training_job import TrainingJob
from .memory import MemoryEstimate
from .moments import all_kinds, resident_bytes, update_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a job, with the bytes of tensors on the fullest rank at its highest moment."""

    name: str
    peak_bytes: int
    moment: str


def phases(
    description: ModelDescription,
    layouts: Sequence[UnitLayout],
    memory: MemoryEstimate,
    job: TrainingJob,
    world_size: int,
    others: Sequence[Phase] = (),
) -> Iterator[Phase]:
    """Yield the phases of a job under a plan whose step has this memory; `others` come after training.

    The first step, which makes the optimizer's states, needs no more than a later one. A save in shards copies them
    to the host one by one; a save of whole tensors makes one at a time whole on the device, and a resume receives one
    at a time whole, after the states were made by a step with gradients of 0.
    """
    peak, units = memory.peak, memory.units
    yield Phase(name="training step", peak_bytes=peak.total_bytes, moment=f"{peak.phase} of {peak.unit}")
    yield from others
    rest = sum(unit.parameters + unit.optimizer for unit in units) + resident_bytes(description, job, 0, all_kinds)
    gradients = sum(unit.gradients_held + unit.gradients_after for unit in units)
    saved, received = [(0, "shards")], [(gradients + update_bytes(units), "the states' first step")]
    for unit, layout in zip(description.units, layouts, strict=True):
        for p in unit.parameters if world_size > 1 else ():
            shard, whole = p.sharded_bytes(g := layout.shard_size), p.numel * p.dtype.itemsize
            received.append((whole + (shard if g > 1 else 0), p.name))
            if not layout.is_replica:
                copies = 2 if g > 1 and shard_dim(p.shape, g) else 1  # ranks' parts, and these joined
                saved.append((copies * g * shard + (shard if layout.away else 0), p.name))
    for name, moments in (("save of whole tensors", saved), ("resume", received)):
        nbytes, of = max(moments)
        yield Phase(name=name, peak_bytes=rest + nbytes, moment=of)
