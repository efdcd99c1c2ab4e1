"""The integer program of a search: counts of options, and a constraint for each moment that can be the peak.

In a group of n equal units, x_k units take option k: Σ_k x_k = n. A *run* consists of the units of a group that take
one option. Backward passes runs in the order of the options. The *level* is the memory held between the moments of two
units; it is linear in the counts:

    level before forward of part i:   held + Σ_{j<i} f_j
    level before backward of part i:  held + Σ_{j≤i} f_j + Σ_{j>i} r_j
    held:  model, communicators, Σ (parameters, optimizer, gradients held)

f are the bytes that a unit's forward leaves, r those that its backward leaves, and d = r - f is the change of the
level in its backward. Under accumulation the backward of an earlier micro-step, with its own gradients held and r, is
beside that of the last. At every moment, level plus temporary memory must stay within the limit.

Where one option of several determines the bytes of a moment, a sum over literals selects them; exactly one literal is
true. Such a constraint is strong because it also holds in the linear relaxation. So the first and the last unit of a
group are constrained. Units between them are so only in the runs that are asked for: their constraints hold if the run
exists, and are many. What the program leaves out, the walk through a plan finds (`solver.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..cost.moments import CallMoments, SegmentBytes, all_kinds, backward_moments, end_moments, forward_moments
from ..decision import REPLICAS, WHOLE_WORLD, groups_in
from .integer_model import GroupCounts, IntegerModel, Run
from .options import Option, RootSegment, Timeline, UnitGroup

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    from .integer_model import Bytes, Count, Value

    Picked: TypeAlias = Callable[[Value], Bytes]
    """A value of the option that one unit of a group takes."""

Key = TypeVar("Key", bound=Hashable)
_MOST_COST = 2**36
"""Largest cost of an option in the objective: sums over all units must not overflow in CP-SAT."""


class Program(IntegerModel):
    """The constraints of moments. Set an objective by `minimize_...`, then call `solve` or, without `runs`, `relax`.

    Args:
        timeline: parts of a micro-step, with the options of each group.
        limit_bytes: the most that a moment may take.
        runs: runs whose moments are constrained.
        earlier: whether those of an earlier micro-step are.
        ordered: whether the first and the last unit of a row whose runs are constrained are those of its order.
        lowest: make the limit a variable up to `limit_bytes`, for `minimize_limit`.
    """

    def __init__(
        self,
        timeline: Timeline,
        limit_bytes: int,
        *,
        runs: Set[Run] = frozenset(),
        earlier: bool = False,
        ordered: bool = False,
        lowest: bool = False,
    ) -> None:
        super().__init__(timeline, limit_bytes, runs, ordered=ordered, lowest=lowest)
        self._timeline = timeline
        self._enter(self._groups)
        options = [option for group in self._groups for option in group.options]
        values = (_gather_buffer, _prefetched, _issued, _reduce_tail)
        self._most = {value: max(map(value, options)) for value in values}
        self._prefetched = self._nearest(_prefetched)
        self._has_stages = any(option.bytes.gather_stage for option in options)
        self._issued = self._nearest(_issued) if self._has_stages else self._prefetched
        self._constrain_host()
        level = self._constrain_forward()
        if earlier:
            before = {group: replace(own, group=group.earlier) for group, own in self._groups.items()}
            held, less = (self._sum(own.values(), _gradients_held) for own in (before, self._groups))
            self._enter(before)
            self._constrain_end(self._constrain_backward(self._as_variable(level + held - less)))
            self._enter(self._groups)
        self._constrain_update(self._constrain_end(self._constrain_backward(level)))

    def _enter(self, groups: Mapping[UnitGroup, GroupCounts]) -> None:
        """Go on with the groups as they are in an earlier or in the last micro-step."""
        timeline = self._timeline
        self._parts = [groups[part] if isinstance(part, UnitGroup) else part for part in timeline.parts]
        self._whole_step = [groups[group] for group in timeline.whole_step]
        self._of_unit = {own.group.units[0]: own for own in self._whole_step}

    def minimize_seconds(self, scale: float, at_most: int | None = None, price_s: float = 0.0) -> None:
        """Set the objective, the larger of Σ scale · seconds and Σ scale · issued, each rounded down, with an upper
        bound if given, and a price for each part of a plan (`Option.parts`).
        """

        def in_steps(seconds: float) -> int:
            return min(int(seconds * scale), _MOST_COST)

        cost = self._sum(self._groups.values(), lambda option: in_steps(option.seconds))
        issued = self._sum(self._groups.values(), lambda option: in_steps(option.issued))
        if not isinstance(issued, int):
            most = sum(len(g.units) * max(in_steps(o.issued) for o in g.options) for g in self._groups)
            waits = self._model.new_int_var(-most, most, "")  # symmetric, so that the linear solver scales it
            self._model.add(waits >= 0)
            self._model.add(waits >= issued - cost)
            cost = cost + waits
        if price_s:
            cost = cost + round(price_s * scale) * sum(self._taken(lambda o: o.parts).values())
        self._model.minimize(cost)
        if at_most is not None:
            self._model.add(cost <= at_most)

    def _constrain_host(self) -> None:
        """Constrain Σ (states + activations on the host) + the largest temporary gradient there ≤ the host's
        memory.
        """
        if any(option.host for group in self._groups for option in group.options):
            needed = self._sum(self._groups.values(), lambda o: o.host) + self._largest(lambda o: o.bytes.host_moment)
            self._model.add(needed <= self._timeline.host_limit_bytes)

    def _largest(self, value: Value) -> Bytes:
        """Return a variable of at least the largest value of all units."""
        most = max(value(option) for group in self._groups for option in group.options)
        if not most:
            return 0
        largest = self._model.new_int_var(-most, most, "")
        self._model.add(largest >= 0)  # its domain is symmetric, so that the linear solver scales it
        for own in self._groups.values():
            for of_unit in (own.of_first, own.of_last) if len(own.group.units) > 1 else (own.of_first,):
                self._model.add(largest >= of_unit(value))
        for nbytes, literal in self._taken(lambda o: {value(o)} - {0}).items():
            self._model.add(largest >= nbytes * literal)
        return largest

    def _communicators(self) -> Bytes:
        """Return the bytes of all communicators but the one of all ranks. A mesh is formed if the option of at least
        one unit needs it.
        """
        nbytes = self._timeline.communicator_bytes
        formed = self._taken(lambda o: sorted(o.meshes)) if nbytes else {}
        more: Bytes = sum(groups_in([mesh]) * nbytes * literal for mesh, literal in formed.items())
        if REPLICAS in formed and WHOLE_WORLD in formed:
            both = self._model.new_bool_var("")
            self._model.add(formed[REPLICAS] + formed[WHOLE_WORLD] - both <= 1)
            more = more + nbytes * both
        return more

    def _taken(self, of: Callable[[Option], Iterable[Key]]) -> dict[Key, Count]:
        """Return a literal for each of the things that options have, true if at least one unit takes such an option:
        literal ≥ (units with it) / n for each group.
        """
        users: dict[Key, dict[GroupCounts, list[int]]] = {}
        for own in self._groups.values():
            for k, option in enumerate(own.group.options):
                for key in of(option):
                    users.setdefault(key, {}).setdefault(own, []).append(k)
        taken: dict[Key, Count] = {}
        for key, groups in users.items():
            taken[key] = literal = self._model.new_bool_var("")
            for own, ks in groups.items():
                self._model.add(sum(own.counts[k] for k in ks) <= len(own.group.units) * literal)
                if len(own.group.units) > 1:  # tightens the relaxation
                    self._model.add(sum(own.first[k] for k in ks) <= literal)
                    self._model.add(sum(own.last[k] for k in ks) <= literal)
        return taken

    def _constrain_forward(self) -> Bytes:
        """Constrain the moments of forward; return the level at its end."""
        level = self._communicators() + self._sum(self._groups.values(), lambda o: o.bytes.held)
        level = level + self._timeline.model_bytes + self._sum(self._whole_step, lambda o: o.bytes.gathered)
        level = self._as_variable(level)
        buffer = self._highest([own.of_last(_gather_buffer) for own in self._whole_step])
        for own in self._whole_step:
            if any(option.bytes.gathering > 0 for option in own.group.options):
                self._fits(level + buffer + own.of_last(lambda o: max(0, o.bytes.gathering)))
        for part in self._parts:
            if isinstance(part, RootSegment):
                self._fits(level + part.bytes.forward_peak + buffer)
                level = level + part.bytes.saved
                continue
            before, first, last = buffer, _call_of(part.of_first), _call_of(part.of_last)
            after = self._as_variable(level + part.total(lambda o: o.call.left_by_forward))
            if len(part.group.units) > 1:
                self._forward(level, first, before, 0)
                level, before = after - last.left_by_forward, self._constrain_forward_runs(part, level, before)
            buffer = self._passed(part, part.of_last, part.of_last(_gather_buffer), before, _gather_buffer)
            self._forward(level, last, before if len(part.group.units) == 1 else 0, buffer)
            level = after
        return level

    def _nearest(self, value: Value) -> list[list[Bytes]]:
        """Return for each part a value of the nearest unit before that FSDP2 manages, whose gather is prefetched: for
        each run in the order of backward, at last for the part's first unit.
        """
        found: list[list[Bytes]] = []
        nearest: Bytes = 0
        for part in self._parts:
            if isinstance(part, RootSegment):
                found.append([nearest])
                if part.hides:
                    own = self._of_unit[part.unit]
                    nearest = self._passed(own, own.of_last, 0, nearest, value)
                continue
            found.append(self._before_runs(part, nearest, value))
            nearest = self._passed(part, part.of_last, part.of_last(value), found[-1][0], value)
        return found

    def _constrain_forward_runs(self, part: GroupCounts, level: Bytes, before: Bytes) -> Bytes:
        """Constrain the runs of a group in forward; return the least gather buffer after it, given that before it.

        Forward never lowers the level, so that each run peaks at its first or last unit.
        """
        for option, x, used in reversed(part.runs()):
            call, own = option.call, option.bytes.gather_buffer
            if (part.group.units, option.layout) in self._runs:
                level = self._as_variable(level)
                beside = own if option.bytes.managed else before
                self._forward(level, call, before, beside, used)
                self._forward(level + call.left_by_forward * (x - 1), call, beside, beside, self._at_least(x, 2))
            level = level + call.left_by_forward * x
            before = self._latest(used, own, before) if option.bytes.managed else before
        return before

    def _forward(
        self, level: Bytes, call: CallMoments[Any], before: Bytes, buffer: Bytes, *literals: cp_model.BoolVarT
    ) -> None:
        for _, nbytes in forward_moments(call, before, buffer):
            self._fits(level + nbytes, *literals)

    def _constrain_backward(self, level: Bytes) -> Bytes:
        """Constrain the moments of backward; return the level at its end."""
        tail: Bytes = 0
        ahead: Bytes = 0
        gathers = zip(self._parts, self._prefetched, self._issued, strict=True)
        for part, nearest, issued in reversed(list(gathers)):
            if isinstance(part, RootSegment):
                own = self._of_unit[part.unit]
                ahead, issue = self._ahead(own, nearest[-1], ahead), self._issue(own, issued[-1])
                if self._has_stages and (part.hides or part is self._parts[-1]):
                    self._fits(level + tail + issue)
                self._fits(level + own.total(partial(_peak, part.bytes)) + tail + ahead)
                level = level - part.bytes.saved + part.bytes.kept
                for unit, nbytes in part.gradients.items():
                    level = level + self._of_unit[unit].total(partial(_come, nbytes))
                continue
            after = self._as_variable(level + part.total(lambda o: o.change))
            before = tail
            if len(part.group.units) > 1:
                self._backward(level, _call_of(part.of_last), tail, 0, 0)
                tail, ahead = self._constrain_backward_runs(part, level, tail, ahead, nearest, issued)
                before = min(map(_reduce_tail, part.group.options))  # when the first unit's backward begins
            ahead, issue = self._ahead(part, nearest[-1], ahead), self._issue(part, issued[-1])
            self._backward(after - part.of_first(lambda o: o.change), _call_of(part.of_first), before, ahead, issue)
            if not part.group.ends_late:
                tail = self._passed(part, part.of_first, part.of_first(_reduce_tail), tail, _reduce_tail, _leaves_tail)
            level = after
        running = {part.unit for part in self._parts if isinstance(part, RootSegment)}
        idle = [own for own in self._whole_step if own.group.units[0] not in running]
        return level + self._sum(idle, lambda o: o.bytes.unsharded_gradients)

    def _constrain_backward_runs(
        self,
        part: GroupCounts,
        level: Bytes,
        tail: Bytes,
        ahead: Bytes,
        nearest: Sequence[Bytes],
        issued: Sequence[Bytes],
    ) -> tuple[Bytes, Bytes]:
        """Constrain the runs of a group: the level changes evenly within a run, so that its peak is at its first unit
        or near its last. Return the least reduce buffer in flight and prefetched bytes after it.

        While the first unit computes, the reduce buffer of the run before is in flight; for the other units it is that
        of their own run. Replicas and units that hold gradients leave it.
        """
        for (option, x, used), following, issue in zip(part.runs(), nearest[1:], issued[1:], strict=False):
            call, change = option.call, option.change
            own: Bytes = tail if option.bytes.leaves_tail else option.bytes.reduce_tail
            end, of_next = level + change * x, (option.bytes.prefetched, option.bytes.issued)
            if (part.group.units, option.layout) in self._runs:
                level = self._as_variable(level)
                end = level + change * x
                twice, thrice = self._at_least(x, 2), self._at_least(x, 3)
                if option.bytes.managed:
                    self._backward(level, call, tail, following, issue, used, ~twice)
                    self._backward(level, call, tail, *of_next, twice)
                    self._backward(level + change, call, own, *of_next, thrice)
                    self._backward(end - 2 * change, call, own, *of_next, thrice)
                    self._backward(end - change, call, own, following, issue, twice)
                else:
                    self._backward(level, call, tail, ahead, 0, used)
                    self._backward(end - change, call, tail, ahead, 0, twice)
            level = end
            tail = tail if option.bytes.leaves_tail else self._latest(used, own, tail)
            ahead = self._latest(used, following, ahead) if option.bytes.managed else ahead
        return tail, ahead

    def _backward(
        self,
        level: Bytes,
        call: CallMoments[Any],
        tail: Bytes,
        ahead: Bytes,
        issued: Bytes,
        *literals: cp_model.BoolVarT,
    ) -> None:
        for _, nbytes in backward_moments(call, tail, ahead, issued if self._has_stages else None):
            self._fits(level + nbytes, *literals)

    def _before_runs(self, part: GroupCounts, nearest: Bytes, value: Value) -> list[Bytes]:
        """Return the least `value` of the nearest unit that FSDP2 manages before each run of a group, in the order of
        backward, and of that before its first unit, given the latter.
        """
        found = [nearest]
        for option, _, used in reversed(part.runs() if len(part.group.units) > 1 else []):
            last = found[-1]
            found.append(self._latest(used, value(option), last) if option.bytes.managed else last)
        return found[::-1]

    def _passed(
        self,
        part: GroupCounts,
        picked: Picked,
        own: Bytes,
        before: Bytes,
        value: Value,
        leaves: Value | None = None,
    ) -> Bytes:
        """Return `own` if the picked unit of a group replaces the buffers of other units, and the larger of `own` and
        `before` if it `leaves` them, as a replica does, whose `own` is 0 or less. Both are a `value` of units, whose
        largest M makes the constraint of the other case hold: own ≤ y and before - M (1 - leaves) ≤ y.
        """
        leaves, options = leaves or _is_replica, part.group.options
        kinds = set(map(leaves, options))
        if kinds == {0}:
            return own
        if kinds == {1} and max(map(value, options)) <= 0:
            return before
        return self._highest([own, before - self._most[value] * (1 - picked(leaves))])

    def _ahead(self, part: GroupCounts, nearest: Bytes, ahead: Bytes) -> Bytes:
        """Return the prefetched bytes beside a group's first unit in backward: those for the nearest unit before, or
        beside a replica `ahead`, which was prefetched earlier.
        """
        own = nearest - self._most[_prefetched] * part.of_first(_is_replica)
        return self._passed(part, part.of_first, own, ahead, _prefetched)

    def _issue(self, part: GroupCounts, issued: Bytes) -> Bytes:
        """Return the bytes that a group's first unit issues ahead, given those of the nearest unit before: a replica
        issues none.
        """
        return issued - self._most[_issued] * part.of_first(_is_replica)

    def _constrain_end(self, level: Bytes) -> Bytes:
        """Constrain the last reductions, of units gathered for the whole step, one by one; return the level after them
        without what FSDP2 keeps until then.
        """
        groups = [part for part in self._parts if isinstance(part, GroupCounts)]
        level, late = self._as_variable(level), [own for own in groups if own.group.ends_late]
        for own in sorted([*late, *self._whole_step], key=lambda own: own.group.units):  # in FSDP2's order
            self._fits(level + own.total(lambda o: end_moments(o.bytes, all_kinds).filled))
            self._fits(level + own.total(lambda o: end_moments(o.bytes, all_kinds).reduced))
            level = level + own.total(lambda o: end_moments(o.bytes, all_kinds).left)
        return level - self._sum([*groups, *self._whole_step], lambda o: o.bytes.reduced_after)

    def _constrain_update(self, level: Bytes) -> None:
        """Constrain level + optimizer scratch ≤ limit."""
        level = level - self._sum(self._groups.values(), lambda o: o.bytes.copies)
        self._fits(level + self._sum(self._groups.values(), lambda o: o.bytes.step_scratch))
        self._fits(level + self._largest(lambda o: o.bytes.step_passing))


_gather_buffer: Value = attrgetter("bytes.gather_buffer")
_prefetched: Value = attrgetter("bytes.prefetched")
_issued: Value = attrgetter("bytes.issued")
_reduce_tail: Value = attrgetter("bytes.reduce_tail")
_gradients_held: Value = attrgetter("bytes.gradients_held")


def _is_replica(option: Option) -> int:
    """Return 1 for the option of a replica, else 0."""
    return int(not option.bytes.managed)


def _peak(terms: SegmentBytes, option: Option) -> int:
    """Return the peak of a segment's backward under an option of its unit."""
    return terms.peak(option.bytes)


def _come(gradients: tuple[int, int], option: Option) -> int:
    """Return the bytes that a backward adds to gradients of a unit with an option."""
    return option.bytes.coming(gradients)


def _leaves_tail(option: Option) -> int:
    """Return 1 for an option that leaves the reduce buffer of the unit before, else 0."""
    return int(option.bytes.leaves_tail)


def _call_of(picked: Picked) -> CallMoments[Any]:
    """Return the moments of the call of a unit."""
    return CallMoments(
        copy_out=picked(lambda o: o.call.copy_out),
        forward=picked(lambda o: o.call.forward),
        left_by_forward=picked(lambda o: o.call.left_by_forward),
        gather=picked(lambda o: o.call.gather),
        gathered=picked(lambda o: o.call.gathered),
        computing=(picked(lambda o: o.call.computing[0]),),
        reducing=(picked(lambda o: o.call.reducing[0]),),
        left_by_backward=picked(lambda o: o.call.left_by_backward),
    )
