"""Every moment of a step as a sum over units and segments, beside the walk that carries a level along."""

import random
from collections.abc import Iterator
from dataclasses import asdict, replace

from hypothesis import strategies as st

from hf_osdp.planner.affine import Affine
from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.cost.moments import SegmentBytes, gathered_ahead
from hf_osdp.planner.cost.units import merged_gradients, unit_bytes
from hf_osdp.planner.decision import Batch, UnitLayout, layouts_for
from hf_osdp.planner.description import GatherSpan, ModelDescription, Segment
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep, Precision, TrainingJob
from hf_osdp.planner.wire import WireFormat
from tests.helpers.descriptions import at_random
from tests.helpers.properties import holds
from tests.helpers.random_problems import without_root


class Sums:
    """What is there at a moment of the last micro-step, or of an `earlier` one, found anew each time. `done` are units
    whose gradients were reduced, or are held.
    """

    def __init__(self, description, choices, world_size, job, batch, *, earlier=False):
        self.description, self.job, self.samples = description, job, batch.micro_batch_size
        self.batch = batch
        units = [unit_bytes(u, c, world_size, job, batch) for u, c in zip(description.units, choices, strict=True)]
        self.units = [unit.earlier for unit in units] if earlier else units
        self.reduces = [not (earlier and batch.holds_gradients(choice)) for choice in choices]
        spans = [unit.span for unit in description.units]
        self.where = [segment.unit for segment in description.segments]
        own = [
            SegmentBytes.of(s, spans[s.unit], self.samples, choices[s.unit].activations) for s in description.segments
        ]
        recomputes = any(choice.activations.recomputes for choice in choices)
        held = [
            s.under(choices[s.unit].activations.recomputation).held_bytes.bytes(self.samples) if recomputes else 0
            for s in description.segments
        ]
        self.bytes = [replace(terms, saved=terms.saved + more) for terms, more in zip(own, held, strict=True)]
        self.whole = [i for i, span in enumerate(spans) if span is GatherSpan.STEP]
        self.passing = [i for i, span in enumerate(spans) if span is not GatherSpan.STEP and i in self.where]
        self.managed = [i for i, choice in enumerate(choices) if choice.shard_size > 1 or choice.on_host]
        self.late = [i for i in self.passing if description.units[i].ends_late and i in self.managed]
        self.at_end = sorted([*self.whole, *self.late])
        self.shares = {i: len(unit.module_names) for i, unit in enumerate(description.units)}
        self.first = {unit: self.where.index(unit) for unit in self.passing}
        flags = [i in self.managed for i in range(len(choices))]
        self.next_gather = gathered_ahead(description, flags)

    def moment(self, phase, unit, *, gathered, activations, gradients, buffers) -> tuple:
        label = "(all)" if unit is None else self.description.units[unit].label
        held = {name: sum(getattr(unit, name) for unit in self.units) for name in ("parameters", "optimizer")}
        outputs = self.description.output_bytes.bytes(self.samples) if self.job.holds_outputs else 0
        there = dict(
            held, gathered=gathered, activations=activations,
            gradients=gradients + sum(u.gradients_held for u in self.units),
            buffers=buffers,
            model_buffers=self.description.buffer_bytes + self.description.input_bytes.bytes(self.samples),
            held_outputs=outputs,
        )  # fmt: skip
        return phase, label, there

    def saved(self, until: int) -> int:
        return sum(terms.saved for terms in self.bytes[:until])

    def kept(self, since: int = 0) -> int:
        return sum(terms.kept for terms in self.bytes[since:])

    def gathered(self, kept: list[int], whole: list[int]) -> int:
        copies = sum(unit.copies for unit in self.units)
        return copies + sum(self.units[i].kept for i in kept) + sum(self.units[i].gathered for i in whole)

    def ahead(self, i: int) -> int:
        """What FSDP2 prefetched when the last backward of a unit that it manages began, this one or one before."""
        began = next((j for j in range(i, len(self.where)) if self.where[j] in self.managed), None)
        unit = None if began is None else self.next_gather[began]
        return 0 if unit is None else self.units[unit].prefetched

    def stage(self, i: int) -> int:
        """What is beside the gather that FSDP2 prefetches when segment i begins its backward; the root, whose modules
        contain the others, begins in its last.
        """
        unit = self.where[i]
        runs_whole = self.where.count(unit) >= self.shares[unit]
        shared = unit in self.whole and self.description.units[unit].fqn and runs_whole
        issues = unit in self.managed and (unit in self.passing or shared or i == len(self.where) - 1)
        target = self.next_gather[i] if issues else None
        return 0 if target is None or self.units[target].kept else self.units[target].gather_stage

    def forward(self) -> Iterator[tuple]:
        for unit, own in ((u, self.units[u]) for u in self.whole):
            beside = max(own.copy_out, own.gather_stage - own.gathered)
            if beside <= 0:
                continue
            buffer = max(self.units[u].gather_buffer for u in self.whole)
            gather = self.gathered([], self.whole) + buffer + beside
            yield self.moment("forward: gather", unit, gathered=gather, activations=0, gradients=0, buffers=0)
        for i, unit in enumerate(self.where):
            terms = self.units[unit]
            there = self.gathered([u for u in self.passing if self.first[u] < i], self.whole)
            before = [u for u in self.where[:i] if u not in self.whole and u in self.managed]
            buffer = (
                self.units[before[-1]].gather_buffer
                if before
                else max((self.units[u].gather_buffer for u in self.whole), default=0)
            )
            own = buffer
            if unit not in self.whole:
                gather = (
                    there + buffer + terms.gather_buffer + max(terms.gathered + terms.copy_out, terms.gather_stage)
                )
                yield self.moment(
                    "forward: gather", unit, gathered=gather, activations=self.saved(i), gradients=0, buffers=0
                )
                own = terms.gathered + (terms.gather_buffer if unit in self.managed else buffer)
            running = self.saved(i) + self.bytes[i].forward_peak
            yield self.moment("forward", unit, gathered=there + own, activations=running, gradients=0, buffers=0)

    def gradients(self, i: int) -> int:
        """Those that are there when segment i begins its backward."""
        whole = sum(
            p.numel * self.job.precision.gathered_dtype(p).itemsize
            for u in self.whole if u in self.where and self.units[u].unsharded_gradients
            for p in self.description.units[u].trainable if self.comes(u, p.name) > i
            and (not self.units[u].adds or p.name in [names[0] for names in self.description.units[u].shared])
        )  # fmt: skip
        done = [u for u in self.passing if self.first[u] > i]
        reduced = sum(
            self.units[u].unsharded_gradients if u in self.late else self.units[u].gradients_after for u in done
        )
        return whole + reduced

    def comes(self, unit: int, name: str) -> int:
        """The segment from whose backward on a parameter that is gathered for the whole step has a gradient."""
        in_blocks_too = [i for i, segment in enumerate(self.description.segments) if name in segment.gradients]
        traced = max(in_blocks_too, default=max(i for i, u in enumerate(self.where) if u == unit))
        stretches = [i for i, u in enumerate(self.where) if u in self.whole]
        return min((i for i in stretches if i >= traced), default=max(stretches))

    def merging(self, i: int) -> int:
        """The sum of a parameter's gradients, in each segment of a unit but the one that backward reaches first."""
        unit = self.where[i]
        adds = unit in self.where[i + 1 :] or self.where.count(unit) == 1
        return merged_gradients(self.description.units[unit], self.job) if adds else 0

    def in_flight(self, done: list[int]) -> int:
        """The reduce input of the nearest unit that reduces in this micro-step."""
        nearest = min((u for u in done if self.reduces[u]), key=self.first.__getitem__, default=None)
        return 0 if nearest is None else self.units[nearest].reduce_tail

    def backward(self) -> Iterator[tuple]:
        for i in reversed(range(len(self.where))):
            unit, terms = self.where[i], self.units[self.where[i]]
            done = [u for u in self.passing if self.first[u] > i and u not in self.late]
            waits = [u for u in self.late if self.first[u] > i]
            freed = [u for u in done if u in self.managed]
            tail = self.in_flight(freed)
            buffers = sum(self.units[u].reduced_after for u in done)
            there = self.gathered([u for u in self.passing if self.first[u] <= i], [*self.whole, *waits])
            level = dict(activations=self.saved(i + 1) + self.kept(i + 1), gradients=self.gradients(i))
            own = 0
            if unit not in self.whole:
                cast = terms.cast_buffer + max(terms.copy_out, terms.gather_stage - terms.gathered)
                own, cast = (0, 0) if terms.kept else (terms.gathered, cast)
                yield self.moment(
                    "backward: gather", unit, gathered=there + own + terms.prefetched, buffers=buffers + tail + cast,
                    **level,
                )  # fmt: skip
            if stage := self.stage(i):
                yield self.moment(
                    "backward: gather", unit, gathered=there + own + self.ahead(i), buffers=buffers + tail + stage,
                    **level,
                )  # fmt: skip
            own_peak = self.bytes[i].adding_peak if terms.adds else self.bytes[i].backward_peak
            level["activations"] += own_peak + self.merging(i)
            yield self.moment("backward", unit, gathered=there + own + self.ahead(i), buffers=buffers + tail, **level)
            if unit not in self.at_end and self.first[unit] == i:
                left = dict(gathered=there - terms.kept + self.ahead(i))
                buffers += 0 if unit in self.managed else tail
                own = self.bytes[i].gradient + self.bytes[i].kept if unit in self.managed else self.bytes[i].arrived
                saved, gradients = self.saved(i) + self.kept(i + 1) + own, self.gradients(i)
                yield self.moment(
                    "backward: reduce", unit, activations=saved + terms.unsharded_gradients, gradients=gradients,
                    buffers=buffers + terms.reduce_input + terms.reduce_copy, **left,
                )  # fmt: skip
                after = buffers + terms.reduced_after + terms.reduce_input + terms.reduce_work
                yield self.moment(
                    "backward: reduce", unit, activations=saved, gradients=gradients + terms.gradients_after,
                    buffers=after, **left
                )  # fmt: skip

    def finish(self) -> Iterator[tuple]:
        before = [u for u in self.passing if u not in self.late]
        settled = sum(self.units[u].gradients_after for u in before)
        for place, unit in enumerate(self.at_end):
            reduced, waiting = self.at_end[:place], self.at_end[place:]
            terms = self.units[unit]

            def gradients(reduced: list[int], waiting: list[int]) -> int:
                shards = sum(self.units[u].gradients_after for u in reduced)
                return settled + shards + sum(self.units[u].unsharded_gradients for u in waiting)

            level = dict(activations=self.kept(), gathered=self.gathered([], waiting[1:]))
            buffers = sum(self.units[u].reduced_after for u in (*before, *reduced)) + terms.reduce_input
            filled = buffers + terms.reduce_copy
            yield self.moment(
                "reduce", unit, gradients=gradients(reduced, waiting) - terms.joined, buffers=filled, **level
            )
            more = terms.reduced_after + terms.reduce_work
            yield self.moment(
                "reduce", unit, gradients=gradients([*reduced, unit], waiting[1:]), buffers=buffers + more, **level
            )

    def update(self) -> Iterator[tuple]:
        highest = max(sum(unit.step_scratch for unit in self.units), *(unit.step_passing for unit in self.units))
        shards = sum(self.units[u].gradients_after for u in {*self.passing, *self.at_end})
        yield self.moment(
            "optimizer step", None, gathered=0, activations=self.kept(), gradients=shards, buffers=highest
        )


jobs = st.builds(
    TrainingJob, global_batch_size=st.just(48),
    precision=st.sampled_from([Precision.named("no"), Precision.named("bf16")]),
    optimizer=st.builds(OptimizerSpec, states=st.sampled_from([0, 2]), step=st.sampled_from(OptimizerStep)),
    holds_outputs=st.booleans(),
)  # fmt: skip
batches = st.builds(Batch, micro_batch_size=st.integers(1, 3), accumulation_steps=st.integers(1, 3))


def random_choices(dice, description, world_size, batch) -> list[UnitLayout]:
    """Any layout of each unit, with every other decision that it may take."""
    found = []
    for index, unit in enumerate(description.units):
        sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
        layout = dice.choice(layouts_for(unit.span, sizes, reshard_after_forward=None, stage_sizes=(1, 2)))
        hold = batch.accumulation_steps > 1 and dice.random() < 0.5
        kept = dice.choice(Activations.BASIC) if index in description.recomputable else Activations.SAVE
        away = dice.random() < 0.2
        states = not away and dice.random() < 0.2
        wire = WireFormat.INT8 if layout.shard_size > 1 and dice.random() < 0.3 else None
        found.append(
            replace(layout, reduce_every_micro_step=not hold, activations=kept, on_host=away, states_on_host=states,
                gather_wire=wire)
        )  # fmt: skip
    return found


def keeping(description: ModelDescription, dice: random.Random) -> ModelDescription:
    """Segments that keep something until the next step, whose backward goes on after their last gradient, and takes
    half where autograd adds gradients.
    """

    def changed(costs: Segment) -> Segment:
        more = {name: Affine(per_sample=dice.choice([0, 300])) for name in ("kept_bytes", "arrival_bytes")}
        adding = costs.backward.peak_bytes.scaled(0.5, constants=True)
        return replace(costs, backward=replace(costs.backward, adding_bytes=adding), **more)

    return replace(description, segments=tuple(segment.each(changed) for segment in description.segments))


RESIDENT = {"buffer_bytes": 13, "input_bytes": Affine(per_sample=17), "output_bytes": Affine(per_sample=19)}
seeds, worlds, kinds = st.integers(0, 10**6), st.sampled_from([1, 2, 4]), ["", "tied", "rootless"]


@holds(seeds, worlds, jobs, batches, st.sampled_from(kinds), st.booleans(), st.booleans(), few=120, many=10_000)
def test_each_moment_is_the_sum_of_what_is_there(seed, world_size, job, batch, kind, stacks, late):
    options = {"tied": kind == "tied", "stacks": stacks, "late": late}
    description = at_random(seed, kinds=2, blocks=4, recomputable=True, **options)
    description = replace(without_root(description) if kind == "rootless" else description, **RESIDENT)
    description = keeping(description, random.Random(seed))
    choices = random_choices(random.Random(seed), description, world_size, batch)
    sums = Sums(description, choices, world_size, job, batch)
    found = estimate_memory(description, choices, world_size, job, batch)
    wanted = [*sums.forward()]
    if batch.accumulation_steps > 1:
        earlier = Sums(description, choices, world_size, job, batch, earlier=True)
        wanted += [(f"earlier {phase}", *rest) for phase, *rest in (*earlier.backward(), *earlier.finish())]
    wanted += [*sums.backward(), *sums.finish(), *sums.update()]
    assert [(m.phase, m.unit, asdict(m.breakdown)) for m in found.moments] == wanted
    assert found.peak_bytes == max(sum(there.values()) for _, _, there in wanted) == found.peak.total_bytes
    waits = sum(terms.host for terms in sums.bytes)
    assert found.host_bytes == sum(u.host for u in sums.units) + max(u.host_moment for u in sums.units) + waits


def test_tied_weights_cost_what_others_of_their_shape_do_not():
    """In one process autograd adds to held gradients in place, but for the sum of a tied parameter's."""
    description = at_random(1247, kinds=2, blocks=4, recomputable=True, tied=True, stacks=True)
    root, tied = description.units[0], description.units[-1]
    assert [p.shape for p in root.parameters] == [p.shape for p in tied.parameters] and tied.shared and not root.shared
    batch = Batch(micro_batch_size=1, accumulation_steps=2)
    choices = random_choices(random.Random(1247), description, 1, batch)
    found = estimate_memory(description, choices, 1, TrainingJob(global_batch_size=2), batch).units
    assert (found[0].unsharded_gradients, found[-1].unsharded_gradients) == (0, 4 * tied.numel)


def test_segments_of_units_in_step_may_free_beyond_saved():
    segment = Segment(unit=0, saved_bytes=Affine(constant=-50, per_sample=10))
    for span, left in ((GatherSpan.STEP, -30), (GatherSpan.USE, 0)):
        assert SegmentBytes.of(segment, span, 2).saved == left
