"""Offer each layout also with the formats of fewer bits that save most time."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from .cost.collectives import Ring, between_ring, replicate_ring, shard_ring
from .cost.units import unit_seconds
from .decision import Space, UnitLayout
from .description import DType, UnitDescription
from .hardware import Hardware
from .problem import PlanningProblem
from .training_job import TrainingJob, formats_up_to
from .wire import WireFormat


def with_wires(problem: PlanningProblem, shapes: Sequence[int], spaces: Iterable[Space]) -> list[Space]:
    """Return the spaces with each layout once more in its fastest wire formats; codes take memory, so that both may
    be needed.
    """
    units = dict(zip(shapes, problem.description.units, strict=True))

    @functools.cache
    def wires(shape: int, shard_size: int, stage_size: int) -> dict[str, Any]:
        layout = UnitLayout(
            shard_size=shard_size, stage_size=stage_size, reshard_after_forward=True
        )  # no other decision matters
        return fastest_wires(units[shape], layout, problem.hardware, problem.job)

    @functools.cache
    def offered(shape: int, layouts: tuple[UnitLayout, ...]) -> tuple[UnitLayout, ...]:
        sent = (replace(one, **wires(shape, one.shard_size, one.stage_size)) for one in layouts)
        return tuple(dict.fromkeys([*sent, *layouts]))

    return [tuple(map(offered, shapes, space)) for space in spaces]


def fastest_wires(
    unit: UnitDescription, layout: UnitLayout, hardware: Hardware, job: TrainingJob
) -> dict[str, WireFormat | None]:
    """Return the fastest allowed wire format by the estimate, for each field of the layout; None where exact values
    are fastest.
    """
    formats, g = [WireFormat(name) for name in formats_up_to(job.communication)[1:]], layout.shard_size
    sharded = between_ring(hardware, g, layout.stage_size) if layout.two_stage else shard_ring(hardware, g)
    gathered = {job.precision.gathered_dtype(p) for p in unit.parameters}
    reduced = {job.precision.reduced_dtype(p) for p in unit.trainable}
    parameters = [wire for wire in formats if wire.for_parameters]
    offered = {  # field of the layout: its formats, and the term of `UnitSeconds` that they change
        "gather_wire": (_offered(parameters, gathered, sharded), "gather_forward"),
        "reduce_wire": (_offered(formats, reduced, sharded), "reduce_scatter"),
        "replica_wire": (_offered(formats, reduced, replicate_ring(hardware, g)), "all_reduce"),
    }

    def seconds(name: str, term: str, wire: WireFormat | None) -> float:
        changed: dict[str, Any] = {name: wire}
        return float(getattr(unit_seconds(unit, replace(layout, **changed), hardware, job), term))

    return {
        name: min((None, *wires), key=functools.partial(seconds, name, term))
        for name, (wires, term) in offered.items()
    }


def _offered(formats: Iterable[WireFormat], dtypes: set[DType], ring: Ring) -> list[WireFormat]:
    """Return the formats that send fewer bytes in a group; none for tensors of several dtypes or of bytes, such as
    4-bit weights with their scales, which are sent exactly.

    The group must lie inside a node, or have one rank of each node. Among several ranks of several nodes, an exchange
    of codes would send more over the slow link than a ring's partial sums.
    """
    if ring.size == 1 or ring.node_crossings not in (0, ring.size) or len(dtypes) != 1:
        return []
    (dtype,) = dtypes
    return [wire for wire in formats if dtype.is_floating and wire.bits < 8 * dtype.itemsize]
