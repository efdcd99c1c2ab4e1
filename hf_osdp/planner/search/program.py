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
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from ..cost.moments import all_kinds, end_moments
from ..decision import groups_in
from ..training_job import OptimizerStep, TrainingJob
from .integer_model import GroupCounts, IntegerModel
from .options import LaterCall, Option, Part, RootSegment, Timeline, UnitGroup
from .pattern import ClassMoments, Pattern

if TYPE_CHECKING:
    from .integer_model import Bytes, Count, Value

Key = TypeVar("Key", bound=Hashable)


class Program(IntegerModel):
    """The constraints of every moment. Set an objective by `minimize_...`, then call `solve` or `relax`.

    Args:
        timeline: parts of a micro-step, with the options of each group.
        job: the training job; only its optimizer step matters here.
        limit_bytes: the most that a moment may take; None makes the limit a variable.
        linear: leave out constraints on runs; the model is then a relaxation.
        patterns: restrictions on the counts of a group, by the indices of its units.
    """

    def __init__(
        self,
        timeline: Timeline,
        job: TrainingJob,
        limit_bytes: int | None,
        *,
        linear: bool = False,
        patterns: Mapping[tuple[int, ...], Pattern] = MappingProxyType({}),
    ) -> None:
        super().__init__(timeline, limit_bytes, linear=linear)
        self._timeline, self._job, self._patterns = timeline, job, patterns
        self.rows: dict[tuple[int, ...], list[ClassMoments]] = {}
        """Moments by class of each group that has a pattern, by the indices of its units."""
        self._parts = [self._variables(part) for part in timeline.parts]
        self._whole_step = [self._groups[group] for group in timeline.whole_step]
        self._constrain_host()
        self._constrain_finish(self._constrain_backward(self._constrain_forward()))

    def _variables(self, part: Part) -> GroupCounts | RootSegment:
        """Return a part's variables; a later call shares those of its unit's group."""
        if isinstance(part, LaterCall):
            own = next(variables for group, variables in self._groups.items() if group.units == (part.unit,))
            return replace(own, group=part.of(own.group))
        return self._groups[part] if isinstance(part, UnitGroup) else part

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

    def limit_parts(self, most: int) -> None:
        """Constrain the number of a plan's parts (`Option.parts`)."""
        self._model.add(sum(self._taken(lambda o: o.parts).values()) <= most)

    def _communicators(self) -> Bytes:
        """Return the bytes of all communicators but the one of all ranks. A mesh is formed if the option of at least
        one unit needs it.
        """
        nbytes = self._timeline.communicator_bytes
        formed = self._taken(lambda o: o.meshes) if nbytes else {}
        return sum(groups_in([mesh]) * nbytes * literal for mesh, literal in formed.items())

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
        """Constrain level + copy-out peak + preceding gather buffer and level + forward peak; return the level at
        the end of forward.
        """
        level = (
            self._timeline.model_bytes
            + self._communicators()
            + self._sum(self._groups.values(), lambda o: o.bytes.held)
        )
        level = self._shortened(level + self._sum(self._whole_step, lambda o: o.bytes.gathered))
        buffers: list[Bytes] = [own.of_last(lambda o: o.bytes.gather_buffer) for own in self._whole_step] or [0]
        copying = [own for own in self._whole_step if any(option.bytes.copy_out for option in own.group.options)]
        for own, buffer in itertools.product(copying, buffers):
            self._fits(level + buffer + own.of_last(lambda o: o.bytes.copy_out))
        for part in self._parts:
            if isinstance(part, RootSegment):
                for buffer in buffers:
                    self._fits(level + part.bytes.forward_peak + buffer)
                level = level + part.bytes.saved
                continue
            if len(part.group.units) > 1 and not self._linear:
                self._constrain_forward_runs(part, level)
            for buffer in buffers:
                self._fits(level + buffer + part.of_first(lambda o: o.call.copy_out))
            level = self._shortened(level + part.total(lambda o: o.call.left_by_forward))
            self._fits(level + part.of_last(lambda o: o.call.forward - o.call.left_by_forward))
            buffers = [part.of_last(lambda o: o.bytes.gather_buffer)]
        return level

    def _constrain_forward_runs(self, part: GroupCounts, level: Bytes) -> None:
        """Constrain the runs of a group in forward.

        Forward never lowers the level, so that each run peaks at its last unit.
        """
        before: Bytes = 0
        for option, x, used in reversed(part.runs()):
            level = self._as_variable(level)
            self._fits(level + before + option.call.copy_out, used)
            before = self._latest(used, option.bytes.gather_buffer, before)
            level = level + option.call.left_by_forward * x
            self._fits(level - option.call.left_by_forward + option.call.forward, used)
            if nbytes := option.bytes.gather_buffer:
                self._fits(level - option.call.left_by_forward + nbytes + option.call.copy_out, self._at_least(x, 2))

    def _constrain_backward(self, level: Bytes) -> Bytes:
        """Constrain level + backward peak + reduce buffer in flight + prefetched gather; return the level at the
        end of backward.
        """
        tail: Bytes = 0
        least_tail = 0
        for index, part in reversed(list(enumerate(self._parts))):
            ahead = self._gathered_ahead(index)
            if isinstance(part, RootSegment):
                self._fits(level + part.bytes.backward_peak + tail + ahead)
                level = level - part.bytes.saved + part.gradients
                continue
            if (pattern := self._patterns.get(part.group.units)) is not None:
                self._constrain_classes(part, pattern, level, min(least_tail, *_tails(part)))
            level = self._constrain_group(part, level, ahead, tail)
            if isinstance(self._timeline.parts[index], UnitGroup) and not part.group.ends_late:
                # a later call reduces nothing
                least_tail, most = _tails(part)
                tail = least_tail if least_tail == most else part.of_first(lambda o: o.bytes.reduce_tail)
        running = {part.unit for part in self._parts if isinstance(part, RootSegment)}
        idle = [own for own in self._whole_step if own.group.units[0] not in running]
        return level + self._sum(idle, lambda o: o.bytes.unsharded_gradients)

    def _gathered_ahead(self, index: int) -> Bytes:
        """Return the bytes of the prefetched gather while the part at `index` computes in backward."""
        groups = (before for before in reversed(self._parts[:index]) if isinstance(before, GroupCounts))
        before = next(groups, None) if self._timeline.parts[index].prefetches else None
        return 0 if before is None else before.of_last(lambda o: o.bytes.prefetched)

    def _constrain_group(self, part: GroupCounts, level: Bytes, ahead: Bytes, tail: Bytes) -> Bytes:
        """Constrain a group's backward, last unit first, and return the level after it; `tail` is the reduce buffer
        in flight before it.
        """
        if len(part.group.units) > 1:
            self._constrain_unit(part.of_last, level, tail)
            if not self._linear:
                self._constrain_runs(part, level, tail, ahead)
            tail, _ = _tails(part)  # at least this is in flight when the first unit's backward begins
        level = self._shortened(level + part.total(lambda o: o.change))
        self._constrain_unit(part.of_first, level - part.of_first(lambda o: o.change), tail, ahead)
        return level

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
                    self._fits(one.after + last + following)
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
            self._fits(level + picked(lambda o: max(o.call.compute + fixed, o.reduce_peak)) + ahead)
            return
        self._fits(level + picked(lambda o: o.call.gather) + tail)
        self._fits(level + picked(lambda o: o.call.compute) + tail + ahead)
        self._fits(level + picked(lambda o: o.reduce_peak) + ahead)

    def _constrain_runs(self, part: GroupCounts, level: Bytes, tail: Bytes, ahead: Bytes) -> None:
        """Constrain the runs of a group: the level changes evenly within a run, so that its peak is at its first unit
        or near its last.

        While the first unit computes, the reduce buffer of the run before is in flight; for the other units it is that
        of their own run.
        """
        for option, x, used, following in self._backward_runs(part, ahead):
            level, own = self._as_variable(level), option.bytes.reduce_tail
            change, prefetched, compute, reduce = (
                option.change,
                option.bytes.prefetched,
                option.call.compute,
                option.reduce_peak,
            )
            end, twice, thrice = level + change * x, self._at_least(x, 2), self._at_least(x, 3)
            both = max(option.call.gather, compute)
            self._fits(level + both + tail, used)
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
            level, tail = end, self._latest(used, own, tail)

    def _backward_runs(self, part: GroupCounts, ahead: Bytes) -> list[tuple[Option, Count, Count, Bytes]]:
        """Return the runs in the order of backward, each with the bytes prefetched for the first unit of the next
        run.
        """
        runs = []
        for option, x, used in reversed(part.runs()):
            runs.append((option, x, used, ahead))
            ahead = self._latest(used, option.bytes.prefetched, ahead)
        return runs[::-1]

    def _constrain_finish(self, level: Bytes) -> None:
        """Constrain the last reductions, of units gathered for the whole step, one by one; then level + optimizer
        scratch ≤ limit.
        """
        groups = [self._groups[group] for group in self._timeline.parts if isinstance(group, UnitGroup)]
        running = [own for own in groups if not own.group.ends_late]
        reduced = self._sum([*groups, *self._whole_step], lambda o: o.bytes.reduced_after)
        level = level + self._sum(running, lambda o: o.bytes.gradients_settled)
        late = [own for own in groups if own.group.ends_late]
        for own in sorted([*late, *self._whole_step], key=lambda own: own.group.units):  # in FSDP2's order
            self._fits(level + own.total(lambda o: end_moments(o.bytes, all_kinds).filled))
            self._fits(level + own.total(lambda o: end_moments(o.bytes, all_kinds).reduced))
            level = level + own.total(lambda o: end_moments(o.bytes, all_kinds).left)
        level = level - reduced
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
