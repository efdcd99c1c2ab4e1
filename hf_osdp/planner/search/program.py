"""The integer program of a search: counts of options, and a constraint for each moment that can be the peak.

In a group of n equal units, x_k units take option k: Σ_k x_k = n. A *run* consists of the units of a group that take
one option. Backward passes runs in the order of the options. The *level* is the memory held between the moments of two
units; it is linear in the counts:

    level before forward of part i:   held + Σ_{j<i} f_j        held: model, communicators, Σ (parameters, optimizer,
    gradients held) level before backward of part i:  held + Σ_{j≤i} f_j + Σ_{j>i} r_j

f are the bytes that a unit's forward leaves, r those that its backward leaves, and d = r - f is the change of the
level in its backward. At every moment, level plus temporary memory must stay within the limit.

Where one option of several determines the bytes of a moment, a sum over literals selects them; exactly one literal is
true. Such a constraint is strong because it also holds in the linear relaxation. Constraints on runs hold only if the
run exists; it leaves them out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from ..cost.moments import all_kinds, end_moments
from ..decision import REPLICAS, WHOLE_WORLD, groups_in
from ..training_job import OptimizerStep, TrainingJob
from .integer_model import GroupCounts, IntegerModel
from .options import Option, RootSegment, Timeline, UnitGroup
from .pattern import ClassMoments, Pattern

if TYPE_CHECKING:
    from .integer_model import Bytes, Count, Value

Runs: TypeAlias = "list[tuple[Option, Count, Count, Bytes]]"
"""Runs of a group in the order of backward, each with the bytes prefetched for the next unit that FSDP2 manages."""

Key = TypeVar("Key", bound=Hashable)
_MOST_COST = 2**36
"""Largest cost of an option in the objective: sums over all units must not overflow in CP-SAT."""


class Program(IntegerModel):
    """The constraints of every moment. Set an objective by `minimize_...`, then call `solve` or `relax`.

    Args:
        timeline: parts of a micro-step, with the options of each group.
        job: the training job; only its optimizer step matters here.
        limit_bytes: the most that a moment may take.
        linear: leave out constraints on runs; the model is then a relaxation.
        lowest: make the limit a variable up to `limit_bytes`, for `minimize_limit`.
        patterns: restrictions on the counts of a group, by the indices of its units.
    """

    def __init__(
        self,
        timeline: Timeline,
        job: TrainingJob,
        limit_bytes: int,
        *,
        linear: bool = False,
        lowest: bool = False,
        patterns: Mapping[tuple[int, ...], Pattern] = MappingProxyType({}),
    ) -> None:
        super().__init__(timeline, limit_bytes, linear=linear, lowest=lowest)
        self._timeline, self._job, self._patterns = timeline, job, patterns
        self.rows: dict[tuple[int, ...], list[ClassMoments]] = {}
        """Moments by class of each group that has a pattern, by the indices of its units."""
        self._parts = [self._groups[part] if isinstance(part, UnitGroup) else part for part in timeline.parts]
        self._whole_step = [self._groups[group] for group in timeline.whole_step]
        self._of_unit = {own.group.units[0]: own for own in self._whole_step}
        self._nearest: list[Bytes] = []
        """Bytes prefetched for the nearest unit before each part that FSDP2 manages."""
        self._runs: dict[GroupCounts, Runs] = {}
        self._constrain_host()
        self._constrain_finish(self._constrain_backward(self._constrain_forward()))

    def _constrain_host(self) -> None:
        """Constrain Σ (states + activations on the host) + the largest temporary gradient there ≤ the host's
        memory.
        """
        if not any(option.host for group in self._groups for option in group.options):
            return
        most = self._timeline.host_limit_bytes
        highest = self._model.new_int_var(-most, most, "")
        self._model.add(self._sum(self._groups.values(), lambda o: o.host) + highest <= most)
        self._model.add(highest >= 0)  # its domain is symmetric, so that the linear solvers scale it
        for own in self._groups.values():
            for of_unit in (own.of_first, own.of_last) if len(own.group.units) > 1 else (own.of_first,):
                self._model.add(highest >= of_unit(lambda o: o.bytes.host_moment))
        for nbytes, literal in self._taken(lambda o: {o.bytes.host_moment} - {0}).items():
            self._model.add(highest >= nbytes * literal)

    def minimize_seconds(self, scale: float, at_most: int | None = None, price_s: float = 0.0) -> None:
        """Set the objective Σ scale · seconds, each rounded down, with an upper bound if given, and a price for each
        part of a plan (`Option.parts`).
        """
        cost = self._sum(self._groups.values(), lambda option: min(int(option.seconds * scale), _MOST_COST))
        if price_s:
            cost = cost + round(price_s * scale) * sum(self._taken(lambda o: o.parts).values())
        self._model.minimize(cost)
        if at_most is not None:
            self._model.add(cost <= at_most)

    def _communicators(self) -> Bytes:
        """Return the bytes of all communicators but the one of all ranks. A mesh is formed if the option of at least
        one unit needs it.
        """
        nbytes = self._timeline.communicator_bytes
        formed = self._taken(lambda o: o.meshes) if nbytes else {}
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
        """Constrain level + copy-out peak + gather buffer of the unit before, and level + forward peak + gather
        buffer; return the level at the end of forward.
        """
        level = (
            self._timeline.model_bytes
            + self._communicators()
            + self._sum(self._groups.values(), lambda o: o.bytes.held)
        )
        level = self._shortened(level + self._sum(self._whole_step, lambda o: o.bytes.gathered))
        buffer = self._highest([own.of_last(lambda o: o.bytes.gather_buffer) for own in self._whole_step])
        copying = [own for own in self._whole_step if any(option.bytes.copy_out for option in own.group.options)]
        for own in copying:
            self._fits(level + buffer + own.of_last(lambda o: o.bytes.copy_out))
        nearest: Bytes = 0
        for part in self._parts:
            self._nearest.append(nearest)
            if isinstance(part, RootSegment):
                self._fits(level + part.bytes.forward_peak + buffer)
                level = level + part.bytes.saved
                if part.hides:
                    own = self._of_unit[part.unit]
                    nearest = self._passed(own, own.of_last, 0, nearest, lambda o: o.bytes.prefetched)
                continue
            self._fits(level + buffer + part.of_first(lambda o: o.call.copy_out))
            after = self._shortened(level + part.total(lambda o: o.call.left_by_forward))
            if len(part.group.units) > 1 and not self._linear:
                buffer = self._constrain_forward_runs(part, level, buffer)
                self._runs[part], nearest = self._backward_runs(part, nearest)
            else:
                buffer, nearest = (
                    self._passed(part, part.of_last, part.of_last(value), before, value)
                    for value, before in (
                        (lambda o: o.bytes.gather_buffer, buffer), (lambda o: o.bytes.prefetched, nearest)
                    )
                )  # fmt: skip
            level = after
            self._fits(level + part.of_last(lambda o: o.call.forward - o.call.left_by_forward) + buffer)
        return level

    def _passed(
        self, part: GroupCounts, picked: Callable[[Value], Bytes], own: Bytes, before: Bytes, value: Value
    ) -> Bytes:
        """Return `own` if FSDP2 manages the picked unit of a group, and `before` if it is a replica, which leaves the
        buffers of other units; `own` is 0 or less for a replica. In a group of several units at least that.

        Both are a `value` of units, whose largest M makes the constraint of the other case hold: own ≤ y and
        before - M (1 - replica) ≤ y.
        """
        kinds = {option.bytes.managed for option in part.group.options}
        if len(kinds) == 1:
            return own if kinds == {True} else before
        bounds = [own]
        if len(part.group.units) == 1:
            most = max(value(option) for group in self._groups for option in group.options)
            bounds.append(before - most * (1 - picked(_is_replica)))
        return self._highest(bounds)

    def _constrain_forward_runs(self, part: GroupCounts, level: Bytes, before: Bytes) -> Bytes:
        """Constrain the runs of a group in forward; return the gather buffer after it, given that before it.

        Forward never lowers the level, so that each run peaks at its last unit.
        """
        for option, x, used in reversed(part.runs()):
            level, nbytes = self._as_variable(level), option.bytes.gather_buffer
            self._fits(level + before + option.call.copy_out, used)
            if option.bytes.managed:
                before = self._latest(used, nbytes, before)
            level = level + option.call.left_by_forward * x
            buffer = nbytes if option.bytes.managed else before
            self._fits(level - option.call.left_by_forward + option.call.forward + buffer, used)
            if nbytes:
                self._fits(level - option.call.left_by_forward + nbytes + option.call.copy_out, self._at_least(x, 2))
        return before

    def _constrain_backward(self, level: Bytes) -> Bytes:
        """Constrain level + backward peak + reduce buffer in flight + prefetched gather; return the level at the
        end of backward.
        """
        tail: Bytes = 0
        ahead: Bytes = 0
        least_tail = 0
        for part, nearest in zip(reversed(self._parts), reversed(self._nearest), strict=True):
            if isinstance(part, RootSegment):
                ahead = self._prefetched(self._of_unit[part.unit], nearest, ahead)
                self._fits(level + part.bytes.backward_peak + tail + ahead)
                level = level - part.bytes.saved + part.bytes.kept
                level = level + sum(
                    nbytes * self._of_unit[unit].total(lambda o: int(o.bytes.unsharded_gradients > 0))
                    for unit, nbytes in part.gradients.items()
                )
                continue
            if (pattern := self._patterns.get(part.group.units)) is not None:
                self._constrain_classes(part, pattern, level, min(least_tail, *_tails(part)))
            level, tail, ahead = self._constrain_group(part, level, tail, ahead, nearest)
            if not part.group.ends_late:
                least_tail, _ = _tails(part)
        running = {part.unit for part in self._parts if isinstance(part, RootSegment)}
        idle = [own for own in self._whole_step if own.group.units[0] not in running]
        return level + self._sum(idle, lambda o: o.bytes.unsharded_gradients)

    def _prefetched(self, part: GroupCounts, nearest: Bytes, ahead: Bytes) -> Bytes:
        """Return the prefetched bytes beside a group's first unit in backward: those for the nearest unit before, or
        beside a replica `ahead`, which was prefetched earlier.
        """
        most = max(option.bytes.prefetched for group in self._groups for option in group.options)
        own = nearest - most * part.of_first(_is_replica)
        return self._passed(part, part.of_first, own, ahead, lambda o: o.bytes.prefetched)

    def _constrain_group(
        self, part: GroupCounts, level: Bytes, tail: Bytes, ahead: Bytes, nearest: Bytes
    ) -> tuple[Bytes, Bytes, Bytes]:
        """Constrain a group's backward, last unit first. Return the level, the reduce buffer in flight and the
        prefetched bytes after it; `tail` and `ahead` are those before it.
        """
        before, left = tail, part.of_first(lambda o: o.bytes.reduce_tail)
        after = self._shortened(level + part.total(lambda o: o.change))
        if len(part.group.units) > 1:
            self._constrain_unit(part.of_last, level, tail)
            before, _ = _tails(part)  # at least this is in flight when the first unit's backward begins
        if part in self._runs:
            left, ahead = self._constrain_runs(part, level, tail, ahead)
        else:
            left = self._passed(part, part.of_first, left, tail, lambda o: o.bytes.reduce_tail)
            ahead = self._prefetched(part, nearest, ahead)
        self._constrain_unit(part.of_first, after - part.of_first(lambda o: o.change), before, ahead)
        return after, tail if part.group.ends_late else left, ahead

    def _constrain_classes(self, part: GroupCounts, pattern: Pattern, level: Bytes, tail: int) -> None:
        """Constrain the moments of classes that the pattern requires, and record all in `rows`; `tail` is the least
        buffer in flight.
        """
        row: list[ClassMoments] = []
        self.rows[part.group.units] = row
        pairs = zip(part.group.options, part.counts, strict=True)
        for number, of_class in itertools.groupby(pairs, key=lambda pair: pattern.classes[pair[0]]):
            options, counts = zip(*of_class, strict=True)
            least, most = pattern.counts.get(number, (0, len(part.group.units)))
            before = self._as_variable(level)
            level = self._as_variable(
                before + sum(option.change * x for option, x in zip(options, counts, strict=True))
            )
            row.append(ClassMoments(
                number=number, options=options, counts=counts, before=before, after=level, tail=tail, least=least,
                most=most,
            ))  # fmt: skip
            self._model.add(sum(counts) >= least)
            self._model.add(sum(counts) <= most)
        following: int | None = None  # least bytes prefetched for the next unit; None if no unit of the row follows
        for one in reversed(row):
            if one.least > 1:
                self._fits(one.before + one.peak_of_several)
            if one.least:
                first, last = (
                    sum(x * nbytes for x, nbytes in zip(one.counts, peaks, strict=True))
                    if one.most == 1
                    else min(peaks)
                    for peaks in (one.first_peaks, one.last_peaks)
                )
                self._fits(one.before + first)
                if following is not None:
                    self._fits(one.after + last + one.beside(following))
            if one.least or following is not None:
                following = one.ahead if one.least or following is None else min(following, one.ahead)
        if any(
            least > 0 and number not in {one.number for one in row} for number, (least, _) in pattern.counts.items()
        ):
            self._model.add(part.counts[0] <= -1)  # infeasible: a required class has no option left

    def _constrain_unit(self, picked: Callable[[Value], Bytes], level: Bytes, tail: Bytes, ahead: Bytes = 0) -> None:
        """Constrain level + gather + tail ≤ limit and level + max(compute + tail, reduce) + ahead ≤ limit for one
        unit's backward.
        """
        if isinstance(tail, int):
            fixed = tail
            self._fits(level + picked(lambda o: o.call.gather + fixed))
            self._fits(level + picked(lambda o: max(o.compute_peak + fixed, o.reduce_peak)) + ahead)
            return
        self._fits(level + picked(lambda o: o.call.gather) + tail)
        self._fits(level + picked(lambda o: o.compute_peak) + tail + ahead)
        self._fits(level + picked(lambda o: o.reduce_peak) + ahead)

    def _constrain_runs(self, part: GroupCounts, level: Bytes, tail: Bytes, ahead: Bytes) -> tuple[Bytes, Bytes]:
        """Constrain the runs of a group: the level changes evenly within a run, so that its peak is at its first unit
        or near its last. Return the reduce buffer in flight and the prefetched bytes after it.

        While the first unit computes, the reduce buffer of the run before is in flight; for the other units it is that
        of their own run. Replicas leave it.
        """
        for option, x, used, following in self._runs[part]:
            level, own = self._as_variable(level), option.bytes.reduce_tail
            change, prefetched, compute, reduce = (
                option.change,
                option.bytes.prefetched,
                option.compute_peak,
                option.reduce_peak,
            )
            end, twice, thrice = level + change * x, self._at_least(x, 2), self._at_least(x, 3)
            both = max(option.call.gather, compute)
            self._fits(level + both + tail, used)
            if not option.bytes.managed:
                self._fits(level + compute + tail + ahead, used)
                self._fits(end - change + compute + tail + ahead, used)
                level = end
                continue
            self._fits(level + reduce, used)
            self._fits(level + change + both + own, twice)
            self._fits(end - change + both + own, twice)
            self._fits(end - change + reduce, used)
            if prefetched:
                self._fits(level + compute + prefetched + tail, twice)
                self._fits(level + reduce + prefetched, twice)
                self._fits(level + change + compute + prefetched + own, thrice)
                self._fits(end - 2 * change + compute + prefetched + own, thrice)
                self._fits(end - 2 * change + reduce + prefetched, twice)
            self._fits(level + compute + following + tail, used, ~twice)
            self._fits(end - change + compute + following + own, twice)
            self._fits(end - change + reduce + following, used)
            level, tail, ahead = end, self._latest(used, own, tail), self._latest(used, following, ahead)
        return tail, ahead

    def _backward_runs(self, part: GroupCounts, ahead: Bytes) -> tuple[Runs, Bytes]:
        """Return the runs in the order of backward, each with the bytes prefetched for the nearest unit before it that
        FSDP2 manages, and these bytes for the next group; `ahead` are those before the group.
        """
        runs = []
        for option, x, used in reversed(part.runs()):
            runs.append((option, x, used, ahead))
            if option.bytes.managed:
                ahead = self._latest(used, option.bytes.prefetched, ahead)
        return runs[::-1], ahead

    def _constrain_finish(self, level: Bytes) -> None:
        """Constrain the last reductions, of units gathered for the whole step, one by one; then level + optimizer
        scratch ≤ limit.
        """
        groups = [self._groups[group] for group in self._timeline.parts if isinstance(group, UnitGroup)]
        reduced = self._sum([*groups, *self._whole_step], lambda o: o.bytes.reduced_after)
        level = level + self._sum(groups, lambda o: 0 if o.bytes.at_end else o.bytes.gradients_settled)
        late = [own for own in groups if own.group.ends_late]
        for own in sorted([*late, *self._whole_step], key=lambda own: own.group.units):  # in FSDP2's order
            self._fits(level + own.total(lambda o: end_moments(o.bytes, all_kinds).filled))
            self._fits(level + own.total(lambda o: end_moments(o.bytes, all_kinds).reduced))
            level = level + own.total(lambda o: end_moments(o.bytes, all_kinds).left)
        level = level - reduced - self._sum(self._groups.values(), lambda o: o.bytes.copies)
        if self._job.optimizer.step is not OptimizerStep.FOR_LOOP:
            self._fits(level + self._sum(self._groups.values(), lambda o: o.bytes.step_scratch))
        for own in () if self._linear else self._groups.values():
            for option, _, used in own.runs():
                if self._job.optimizer.step is OptimizerStep.FOR_LOOP or option.bytes.states_passing:
                    self._fits(level + max(option.bytes.step_scratch, option.bytes.states_passing), used)


def _tails(part: GroupCounts) -> tuple[int, int]:
    """Return the bytes of the smallest and of the largest reduce buffer that an option of the group leaves in
    flight.
    """
    tails = [option.bytes.reduce_tail for option in part.group.options]
    return min(tails), max(tails)


def _is_replica(option: Option) -> int:
    """Return 1 for the option of a replica, else 0."""
    return int(not option.bytes.managed)
