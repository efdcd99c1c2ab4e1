"""Which wire format each direction of a unit's communication takes: the one with which its collective is fastest by the estimate.

Formats are offered in groups that lie inside a node, or have one rank of each node (those between the nodes of two stages, replicas of
whole nodes): among several ranks of several nodes, an exchange of codes would send more over the slow link than a ring's partial sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..cost.collectives import Ring, between_ring, replicate_ring, shard_ring
from ..cost.units import unit_seconds
from ..decision import UnitLayout
from ..description import DType, UnitDescription
from ..hardware import Hardware
from ..job import TrainingJob
from ..problem import PlanningProblem
from ..wire import WireFormat, formats_up_to

Wires = dict[str, Any]
"""Fields of a layout → format, or None."""


class WireChoice:
    """The formats of a problem's units, found once for each shape, shard size and stage size: nothing else bears on them."""

    def __init__(self, problem: PlanningProblem, shapes: Sequence[int]) -> None:
        self._problem, self._units = problem, dict(zip(shapes, problem.description.units, strict=True))
        self._wires: dict[tuple[int, int, int], Wires] = {}
        self._made: dict[tuple[int, int], tuple[UnitLayout, ...]] = {}

    def __call__(self, shape: int, layouts: tuple[UnitLayout, ...]) -> tuple[UnitLayout, ...]:
        """Return layouts with and without formats, as codes take memory: the same object for the same layouts of units of one shape."""
        key = shape, id(layouts)
        if key not in self._made:
            self._made[key] = tuple(dict.fromkeys([*(replace(one, **self._wires_of(shape, one)) for one in layouts), *layouts]))
        return self._made[key]

    def _wires_of(self, shape: int, layout: UnitLayout) -> Wires:
        key = shape, layout.shard_size, layout.stage_size
        if key not in self._wires:
            self._wires[key] = fastest_wires(self._units[shape], layout, self._problem.hardware, self._problem.job)
        return self._wires[key]


def fastest_wires(unit: UnitDescription, layout: UnitLayout, hardware: Hardware, job: TrainingJob) -> Wires:
    """Return the fastest format that the job allows, by field of the layout; None where that is to send all as it is."""
    formats, g = formats_up_to(job.communication), layout.shard_size
    sharded = between_ring(hardware, g, layout.stage_size) if layout.two_stage else shard_ring(hardware, g)
    gathered = {job.precision.gathered_dtype(p) for p in unit.parameters}
    reduced = {job.precision.reduced_dtype(p) for p in unit.trainable}
    parameters = [wire for wire in formats if wire.for_parameters]
    offered = {  # field of a layout: formats, and the term of `UnitSeconds` that they bear on
        "gather_wire": (_offered(parameters, gathered, sharded), "gather_forward"),
        "reduce_wire": (_offered(formats, reduced, sharded), "reduce_scatter"),
        "replica_wire": (_offered(formats, reduced, replicate_ring(hardware, g)), "all_reduce"),
    }

    def fastest(name: str, wires: Iterable[WireFormat], term: str) -> WireFormat | None:
        options: list[Wires] = [{name: wire} for wire in (None, *wires)]
        return min(options, key=lambda one: getattr(unit_seconds(unit, replace(layout, **one), hardware, job), term))[name]

    return {name: fastest(name, wires, term) for name, (wires, term) in offered.items()}


def _offered(formats: Iterable[WireFormat], dtypes: set[DType], ring: Ring) -> list[WireFormat]:
    """Return the formats that save something in a group: tensors of several dtypes are sent as they are."""
    if ring.size == 1 or ring.node_crossings not in (0, ring.size) or len(dtypes) != 1:
        return []
    (dtype,) = dtypes
    return [wire for wire in formats if wire.bits < 8 * dtype.itemsize]
