"""A micro-step as a timeline: groups of equal units with the options of each, and segments of the root between them.

A layout adds the same time to each of several equal units in a row; only the peak can tell them apart. A short row is
searched unit by unit. In a long one the units at both ends, where peaks fall, still are, and of those between only how
many take each layout is searched for. Which of them take it is settled by a rule: in backward, the order of
independent jobs, each with a local peak p and a change of level d, that minimises the highest level is first those that
lower it, by ascending p, then those that raise it, by descending p - d (Abdel-Wahab and Kameda 1978; Liu 1987). Units
are not quite independent, as each one's gather runs beside the unit before it; a plan is optimal among those laid out
by the rule.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..cost.memory import SegmentBytes
from ..cost.units import UnitBytes
from ..decision import Mesh, UnitLayout


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """A unit's layout with its bytes and the seconds of an optimizer step. Peaks are the highest level of a phase above that before it."""

    layout: UnitLayout
    bytes: UnitBytes
    seconds: float
    left_by_forward: int = 0
    """f: saved activations and kept parameters."""
    left_by_backward: int = 0
    """r: gradients."""
    copy_out_peak: int = 0
    """While parameters are copied out in forward; the buffer of the unit before is left out."""
    forward_peak: int = 0
    """In the rest of forward."""
    gather_peak: int = 0
    """While parameters are copied out in backward; the reduce buffer of the unit that backward met before is left out."""
    compute_peak: int = 0
    """In backward until gradients are reduced; that buffer and the gather that runs ahead are left out."""
    reduce_peak: int = 0
    """While gradients are reduced; the gather that runs ahead is left out."""
    activations_on_host: int = 0
    meshes: frozenset[Mesh] = frozenset()
    """Those of the layout; empty where communicators take no memory."""
    later: tuple[Option, ...] = ()
    """The same layout in the unit's further calls (`GatherSpan.CALLS`), in forward order."""

    @property
    def change(self) -> int:
        """d: what one unit's backward changes the level by."""
        return self.left_by_backward - self.left_by_forward

    @property
    def backward_peak(self) -> int:
        """Highest level in backward once parameters are there, where the unit before has the same option."""
        return max(self.compute_peak + self.bytes.reduce_tail, self.reduce_peak)

    @property
    def transient(self) -> int:
        """Highest level in backward among units of the same option."""
        return max(self.gather_peak + self.bytes.reduce_tail, self.backward_peak + self.bytes.prefetched)

    @property
    def stays(self) -> int:
        """What it holds, whether forward or backward left it."""
        return self.bytes.held + self.left_by_forward + self.left_by_backward

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of the rule above, for backward."""
        return (0, self.transient) if self.change < 0 else (1, self.change - self.transient)

    @property
    def lowest_level(self) -> int:
        """What it adds to the level of forward and backward at least, at every moment."""
        return self.bytes.held + min(0, self.left_by_forward, self.left_by_backward)

    @property
    def lowest_peak(self) -> int:
        """Its highest moment where it adds that, whatever its neighbours have."""
        backward = self.left_by_forward + max(self.gather_peak, self.compute_peak, self.reduce_peak)
        return self.lowest_level + max(0, self.copy_out_peak, self.forward_peak, backward)

    @property
    def host(self) -> int:
        """Bytes on the host: states and activations."""
        return self.bytes.host + self.activations_on_host

    def fits_where(self, other: Option) -> bool:
        """Return whether it is no worse at every moment, and needs no more communicators."""
        return self.meshes <= other.meshes and all(map(operator.le, self.levels, other.levels))

    @functools.cached_property
    def levels(self) -> tuple[int, ...]:
        """Bytes at each moment that the layout bears on."""
        terms, held = self.bytes, self.bytes.held
        after = held + self.left_by_backward
        return (
            held, held + self.left_by_forward, after, held + self.forward_peak, held + self.copy_out_peak,
            held + self.gather_peak, held + self.compute_peak, held + self.compute_peak + terms.prefetched,
            held + self.reduce_peak, held + self.reduce_peak + terms.prefetched,
            terms.prefetched, terms.gather_buffer, after + terms.step_scratch,
            held + terms.gathered, terms.reduce_input, terms.reduced_after + terms.reduce_output,
            terms.reduce_stage, terms.last_gradient, self.host, terms.host_moment, after + terms.states_passing,
            after + terms.gradients_settled + terms.states_passing,
            after + terms.gradients_settled, held + terms.gradients_after + terms.gradients_settled,
            after + terms.gradients_settled + terms.step_scratch, after + terms.reduce_tail,
            *(level for call in self.later for level in call.levels),
        )  # fmt: skip


def undominated(options: Iterable[Option], *, by_memory: bool = False) -> list[Option]:
    """Return the options to which no other is as good in time and at every moment, or at every moment alone; of equal ones the first."""
    best: list[Option] = []
    for option in sorted(options, key=lambda option: (sum(option.levels), option.seconds)):  # none is dominated by a later one
        if not any((by_memory or other.seconds <= option.seconds) and other.fits_where(option) for other in best):
            best.append(option)
    return best


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitGroup:
    """Equal units that run one after the other. Groups are told apart by identity: comparing all their options takes long."""

    units: tuple[int, ...]
    """Indices in forward order."""
    options: tuple[Option, ...]
    """Not dominated, in the order in which backward meets them."""
    prefetches: bool = False
    """The unit before the first is gathered while that one's backward computes; so for other parts."""

    def assign(self, counts: Sequence[int]) -> dict[int, UnitLayout]:
        """Give `counts[k]` units the k-th option, by the rule."""
        chosen = [option.layout for option, count in zip(self.options, counts, strict=True) for _ in range(count)]
        return dict(zip(reversed(self.units), chosen, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterCall:
    """A further call of a unit whose group is earlier in the timeline."""

    unit: int
    number: int
    """Index into `Option.later`."""
    prefetches: bool

    def of(self, group: UnitGroup) -> UnitGroup:
        """Return the call as a group, from the unit's own group."""
        return replace(group, options=tuple(option.later[self.number] for option in group.options), prefetches=self.prefetches)


@dataclass(frozen=True, slots=True, kw_only=True)
class RootSegment:
    """A segment of the root or of shared weights, which are gathered for the whole step."""

    unit: int
    bytes: SegmentBytes
    gradients: int
    """What its backward adds to the whole step's gradients."""
    prefetches: bool


Part: TypeAlias = "UnitGroup | LaterCall | RootSegment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All parts of a micro-step, in forward order."""

    parts: tuple[Part, ...]
    whole_step: tuple[UnitGroup, ...]
    """Units that are gathered for the whole step, one group each."""
    idle: tuple[UnitGroup, ...]
    """Units that never run: they hold parameters and nothing else."""
    model_bytes: int
    """Buffers of the module and the batch."""
    host_limit_bytes: int
    """Host memory for one rank; 0 where there is no host."""
    communicator_bytes: int = 0
    """What each communicator of a mesh takes."""

    @property
    def groups(self) -> tuple[UnitGroup, ...]:
        """Every group of which options are to be chosen."""
        return (*(p for p in self.parts if isinstance(p, UnitGroup)), *self.whole_step, *self.idle)

    @property
    def least_host_bytes(self) -> int:
        """Bytes on the host that no plan avoids."""
        return sum(len(group.units) * min(option.host for option in group.options) for group in self.groups)

    def keeping(self, options: Mapping[UnitGroup, Set[Option]]) -> Timeline:
        """Return the timeline with only these options of each group, in their order."""
        less = {group: replace(group, options=tuple(o for o in group.options if o in options[group])) for group in self.groups}
        parts = tuple(less[p] if isinstance(p, UnitGroup) else p for p in self.parts)
        return replace(self, parts=parts, whole_step=tuple(less[g] for g in self.whole_step), idle=tuple(less[g] for g in self.idle))

    def within(self, limit_bytes: int) -> Timeline | None:
        """Return the timeline without options that pass the limit though all other units take the least; None if a group has no other."""
        least = {group: min(option.lowest_level for option in group.options) for group in self.groups}
        level = self.model_bytes + sum(min(0, p.bytes.saved) for p in self.parts if isinstance(p, RootSegment))
        level += sum(len(group.units) * nbytes for group, nbytes in least.items())
        level += sum(min(option.bytes.gathered for option in group.options) for group in self.whole_step)
        kept = {group: {o for o in group.options if level - least[group] + o.lowest_peak <= limit_bytes} for group in self.groups}
        return self.keeping(kept) if all(kept.values()) else None

    def fits_host(self, layouts: Mapping[int, UnitLayout]) -> bool:
        """Return whether the host has memory for what these layouts move there."""
        chosen = [o for group in self.groups for unit in group.units for o in group.options if o.layout == layouts[unit]]
        return sum(o.host for o in chosen) + max((o.bytes.host_moment for o in chosen), default=0) <= self.host_limit_bytes
