"""A micro-step as a timeline: groups of equal units with the options of each, and segments of the root between them.

A layout adds the same time to each of several equal units in a row; only the peak depends on the unit's position. A
short row is searched unit by unit. In a long row the search decides the first and the last unit one by one, and for
the units between only how many take each layout. A rule then assigns the layouts to these units. For independent jobs
with a local peak p and a change of level d, the highest level is least in this order: first the jobs that lower the
level, by ascending p, then those that raise it, by descending p - d (Abdel-Wahab and Kameda 1978; Liu 1987). Backward
passes the units in this order. Units are not quite independent, because each unit's gather overlaps the unit before
it; a plan is optimal among those that follow the rule.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TypeAlias

from ..cost.moments import NO_CALL, CallMoments, SegmentBytes, backward_moments, contributions, highest_moments
from ..cost.units import UnitBytes
from ..decision import Mesh, UnitLayout, groups_in


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """A unit's layout, its bytes, and its seconds in an optimizer step."""

    layout: UnitLayout
    bytes: UnitBytes
    seconds: float
    issued: float = 0.0
    """The CPU's seconds; a step takes the larger sum of both (`step_seconds`)."""
    segment: SegmentBytes | None = None
    """What the unit's call saves and takes; None for a unit that is gathered for the whole step."""
    meshes: frozenset[Mesh] = frozenset()
    """Meshes that the layout needs."""
    structure: int = 0
    """Number of the unit's structure; units of one structure have the same choices."""

    @functools.cached_property
    def earlier(self) -> Option | None:
        """The same with the bytes of an earlier micro-step; None without accumulation."""
        if (earlier := self.bytes.earlier) is None:
            return None
        return self if earlier == self.bytes else replace(self, bytes=earlier)

    @property
    def micro_steps(self) -> tuple[Option, ...]:
        """The option in the last micro-step, and in an earlier one."""
        return (self,) if self.earlier is None else (self, self.earlier)

    @functools.cached_property
    def call(self) -> CallMoments[int]:
        """The highest moments of the unit's call."""
        return NO_CALL if self.segment is None else highest_moments(self.bytes, self.segment)

    @functools.cached_property
    def host(self) -> int:
        """Bytes of states and activations on the host."""
        return self.bytes.host + (0 if self.segment is None else self.segment.host)

    @property
    def change(self) -> int:
        """d: change of the level in one unit's backward."""
        return self.call.left_by_backward - self.call.left_by_forward

    @functools.cached_property
    def transient(self) -> int:
        """Highest level in backward, gather included, if all neighbours take the same option."""
        return max(
            nbytes
            for one in self.micro_steps
            for _, nbytes in backward_moments(one.call, one.bytes.reduce_tail, one.bytes.prefetched, one.bytes.issued)
        )

    @property
    def stays(self) -> int:
        """Bytes held after forward and backward together."""
        return max(one.bytes.held + one.call.left_by_forward + one.call.left_by_backward for one in self.micro_steps)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of the rule, in the order of backward: an earlier micro-step's, in which most is held."""
        one = self.earlier or self
        return (0, one.transient) if one.change < 0 else (1, one.change - one.transient)

    @functools.cached_property
    def parts(self) -> tuple[Hashable, ...]:
        """What a plan has with this option, in an order that gives equal problems equal programs: a layout of this
        structure, meshes, and use of the host's memory.
        """
        own = sorted(mesh for mesh in self.meshes if groups_in([mesh]))
        return ((self.structure, self.layout), *own, *(["host"] if self.layout.uses_host else []))

    @functools.cached_property
    def levels(self) -> tuple[int, ...]:
        """Bytes that the unit adds to each moment of a step, and to the host. Moments are sums over units, or such a
        sum and the largest value of a unit (`host_moment`; in a loop the step's scratch): a unit that adds no more to
        each of these raises neither.
        """
        moments = itertools.chain.from_iterable(one.contributions for one in self.micro_steps)
        return (*moments, self.host, self.bytes.host_moment)

    @functools.cached_property
    def contributions(self) -> tuple[int, ...]:
        """Bytes that the unit adds to each moment of this micro-step."""
        return contributions(self.bytes, None if self.segment is None else self.call)


def undominated(options: Iterable[Option], *, by_memory: bool = False, meshes: bool = True) -> list[Option]:
    """Return the options that no other option dominates; of equal ones the first.

    An option dominates another if it takes no more bytes at every moment, no more time and no further meshes; with
    `by_memory` time does not matter, without `meshes` these do not.
    """

    def dominates(other: Option, option: Option) -> bool:
        return (
            (by_memory or (other.seconds <= option.seconds and other.issued <= option.issued))
            and (not meshes or other.meshes <= option.meshes)
            and all(map(operator.le, other.levels, option.levels))
        )

    best: list[Option] = []
    for option in sorted(options, key=lambda o: (sum(o.levels), o.seconds)):  # no option dominates an earlier one
        if not any(dominates(other, option) for other in best):
            best.append(option)
    return best


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitGroup:
    """Equal units that run one after the other.

    Groups compare by identity, because comparing all options takes long.
    """

    units: tuple[int, ...]
    """Indices in forward order."""
    options: tuple[Option, ...]
    """Options that are not dominated, in the order of backward."""
    ends_late: bool = False
    """Whether FSDP2 frees and reduces them at the end of backward; such a group has one unit."""

    @functools.cached_property
    def earlier(self) -> UnitGroup:
        """The group in an earlier micro-step."""
        return replace(self, options=tuple(option.earlier or option for option in self.options))

    @functools.cached_property
    def of_layout(self) -> Mapping[UnitLayout, Option]:
        """Each layout's option."""
        return {option.layout: option for option in self.options}

    def assign(self, counts: Sequence[int]) -> dict[int, UnitLayout]:
        """Return each unit's layout if `counts[k]` units take the k-th option, assigned by the rule."""
        chosen = [option.layout for option, count in zip(self.options, counts, strict=True) for _ in range(count)]
        return dict(zip(reversed(self.units), chosen, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class RootSegment:
    """A segment of the root or of shared weights, which are gathered for the whole step."""

    unit: int
    bytes: SegmentBytes
    gradients: Mapping[int, tuple[int, int]]
    """Bytes that its backward adds to gradients, by unit gathered for the whole step: of all parameters, and of shared
    ones."""
    hides: bool
    """Whether no gather of a unit before is prefetched behind it, if FSDP2 manages it (`gathered_ahead`)."""


Part: TypeAlias = "UnitGroup | RootSegment"


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All parts of a micro-step, in forward order."""

    parts: tuple[Part, ...]
    whole_step: tuple[UnitGroup, ...]
    """Units that are gathered for the whole step, one group each."""
    idle: tuple[UnitGroup, ...]
    """Units that never run; they only hold parameters."""
    model_bytes: int
    """Buffers of the module and the batch."""
    host_limit_bytes: int
    """Host memory for one rank; 0 without a host."""
    communicator_bytes: int = 0
    """Bytes of each communicator of a mesh."""

    @property
    def groups(self) -> tuple[UnitGroup, ...]:
        """All groups; the search chooses options for each."""
        return (*(p for p in self.parts if isinstance(p, UnitGroup)), *self.whole_step, *self.idle)

    @functools.cached_property
    def least(self) -> tuple[float, float]:
        """The device's and the CPU's seconds if each unit takes the option that has least."""
        done, issued = (
            sum(len(group.units) * min(map(seconds, group.options)) for group in self.groups)
            for seconds in (attrgetter("seconds"), attrgetter("issued"))
        )
        return done, issued

    def seconds(self, layouts: Mapping[int, UnitLayout]) -> float:
        """Return the seconds of a step."""
        chosen = self.chosen(layouts)
        return max(sum(option.seconds for option in chosen), sum(option.issued for option in chosen))

    @property
    def least_host_bytes(self) -> int:
        """Least bytes on the host of any plan."""
        return sum(len(group.units) * min(option.host for option in group.options) for group in self.groups)

    def keeping(self, options: Mapping[UnitGroup, Set[Option]]) -> Timeline:
        """Return the timeline with only these options of each group, in the same order."""
        return self._changed(lambda group: (one for one in group.options if one in options[group]))

    def _changed(self, options: Callable[[UnitGroup], Iterable[Option]]) -> Timeline:
        """Return the timeline with other options of each group."""

        def group(one: UnitGroup) -> UnitGroup:
            return replace(one, options=tuple(options(one)))

        return replace(
            self,
            parts=tuple(group(p) if isinstance(p, UnitGroup) else p for p in self.parts),
            whole_step=tuple(map(group, self.whole_step)),
            idle=tuple(map(group, self.idle)),
        )

    def in_units(self, size: int) -> Timeline:
        """Return the timeline in units of `size` bytes, rounded so that no moment of a plan has more than before."""

        @functools.cache
        def option(one: Option) -> Option:
            return replace(one, bytes=one.bytes.in_units(size), segment=one.segment and one.segment.in_units(size))

        def root(one: RootSegment) -> RootSegment:
            gradients = {unit: (every // size, some // size) for unit, (every, some) in one.gradients.items()}
            return replace(one, bytes=one.bytes.in_units(size), gradients=gradients)

        less = self._changed(lambda group: map(option, group.options))
        return replace(
            less,
            parts=tuple(p if isinstance(p, UnitGroup) else root(p) for p in less.parts),
            model_bytes=self.model_bytes // size,
            host_limit_bytes=self.host_limit_bytes // size,
            communicator_bytes=self.communicator_bytes // size,
        )

    def chosen(self, layouts: Mapping[int, UnitLayout]) -> list[Option]:
        """Return each unit's option with its layout."""
        return [group.of_layout[layouts[unit]] for group in self.groups for unit in group.units]

    def count_parts(self, layouts: Mapping[int, UnitLayout]) -> int:
        """Return the number of a plan's parts; a plan of fewer parts is simpler."""
        return len({part for option in self.chosen(layouts) for part in option.parts})
