"""What one optimizer step of an estimated plan allocates on CUDA, in FSDP2's order, each on its stream (docs/allocator.md)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..allocator.replay import COPY_IN, GATHER, REDUCE, REDUCE_REPLICAS, Event, EventLog, Replay
from ..decision import Batch, UnitLayout
from ..description import GatherSpan, ModelDescription, UnitDescription
from ..job import OptimizerStep, TrainingJob
from .activation_events import events_of_segments
from .local_steps import outer_tensors
from .memory import first_uses, gathered_ahead, merging_segments
from .units import UnitBytes, once_per_shape, unit_bytes

_MICRO_STEPS = 2
"""Micro-steps of an optimizer step that are replayed at most: those between the first and the last are like the first, or allocate less."""
_STEP_COUNT_BYTES = 4
"""A parameter's count of steps, which Adam with fused kernels keeps on the device."""


def replay_of(description: ModelDescription, layouts: Sequence[UnitLayout], world_size: int, job: TrainingJob, batch: Batch) -> Replay:
    """Return the events of one optimizer step on the fullest rank, and by them what torch's allocator makes of a plan on CUDA.

    Args:
        description: the model, with the allocation traces of its segments; a segment without one allocates once for each of its terms.
        layouts: one a unit, in the description's order.
        world_size: ranks.
        job: precision, optimizer.
        batch: micro-batch size and accumulation.
    """
    step = _Step(description, layouts, world_size, job, batch)
    held = step.hold()
    for left in reversed(range(min(batch.accumulation_steps, _MICRO_STEPS))):
        step.micro_step(last=not left)
    before, states = step.log.take(), step.make_states()
    step.optimizer_step()
    return Replay(
        held=held, before_optimizer=before, states=states, optimizer=step.log.take(),
        traced=all(segment.traced for segment in step.segments), expandable_segments=job.expandable_segments,
    )  # fmt: skip


class _Unit:
    """One unit's parameters as FSDP2 handles them, and which of its tensors are there now."""

    def __init__(
        self, unit: UnitDescription, layout: UnitLayout, terms: UnitBytes, world_size: int, job: TrainingJob, batch: Batch
    ) -> None:
        self.layout, self.terms, self.whole_step = layout, terms, unit.span is GatherSpan.STEP
        g, precision, trainable = layout.shard_size, job.precision, unit.trainable
        self.trained = [p.sharded_bytes(g) for p in trainable]
        self.trained_here = [] if layout.on_host else self.trained
        self.states = [nbytes for p in trainable for nbytes in job.optimizer.state_tensors(p, g)] if layout.states_on_host else []
        """Those that come from the host for the step."""
        self.states_here = [] if layout.on_host or layout.states_on_host else [job.optimizer.state_tensors(p, g) for p in trainable]
        if job.local_steps is not None:  # which leave all states here
            states = zip(self.states_here, trainable, strict=True)
            self.states_here = [(*held, *outer_tensors(p, g, world_size, job)) for held, p in states]
        self.handled = self.terms.gathered > 0  # else one process trains the plain module
        self.sources = [
            (p.sharded_bytes(g), g * p.sharded_numel(g) * precision.gathered_dtype(p).itemsize, precision.gathered_dtype(p) is not p.dtype)
            for p in unit.parameters
        ]
        """Of each parameter its shard, its gathered size, and whether it is cast."""
        self.gradient_sizes = [p.numel * precision.gathered_dtype(p).itemsize for p in trainable]
        whole = sum(p.numel * precision.reduced_dtype(p).itemsize for p in trainable)
        self.whole_factor = whole / sum(self.gradient_sizes) if trainable else 1
        """Bytes of a gradient that is held whole over those of one as autograd makes it."""
        self.recast = any(precision.reduced_dtype(p) is not p.dtype for p in trainable)
        self.replicas, self.reduce_stream = g < world_size, REDUCE_REPLICAS if g < world_size else REDUCE
        self.holds = batch.holds_gradients(layout) and self.handled
        self.buffer: int | None = None
        self.gathered: list[int] = []
        self.gradients: list[int] = []
        self.whole: list[int] = []
        """Whole gradients of earlier micro-steps."""
        self.gradient: int | None = None
        """The sharded one; of plain modules all that is in `gradients`."""
        self.partial: int | None = None


class _Step:
    """Walk through a step as `planner/cost/memory.py` does, and write down events instead of levels."""

    def __init__(
        self, description: ModelDescription, layouts: Sequence[UnitLayout], world_size: int, job: TrainingJob, batch: Batch
    ) -> None:
        self.log = EventLog()
        self._description, self._job, self._samples = description, job, batch.micro_batch_size
        terms = once_per_shape(description.units, partial(unit_bytes, world_size=world_size, job=job, batch=batch))
        self._units = [
            _Unit(unit, layout, terms(index, layout), world_size, job, batch)
            for index, (unit, layout) in enumerate(zip(description.units, layouts, strict=True))
        ]
        self._ahead, self._merging = gathered_ahead(description), merging_segments(description, job)
        self._first_use = first_uses(description)
        last_use = {segment.unit: index for index, segment in enumerate(description.segments)}
        uses = [segment.unit for segment in description.segments]
        arriving = [self._units[unit].gradient_sizes if index == last_use[unit] else () for index, unit in enumerate(uses)]
        activations = [layout.activations for layout in layouts]
        self.segments = events_of_segments(description, activations, batch.micro_batch_size, arriving, self.log)
        self._last_buffer: int | None = None
        self._reduce_input: int | None = None
        self._reducing_replicas: list[int] = []

    def hold(self) -> list[Event]:
        """Return what is there before the first step."""
        description, inputs = self._description, self._description.input_bytes.bytes(self._samples)
        shards = (nbytes for unit in self._units if not unit.layout.on_host for nbytes, _, _ in unit.sources)
        for nbytes in (*shards, description.buffer_bytes, description.other_bytes, inputs, self._job.correction_bytes):
            self.log.make(nbytes)
        return self.log.take()

    def make_states(self) -> list[Event]:
        """Return what the optimizer makes in its first step."""
        spec = self._job.optimizer
        counts = [_STEP_COUNT_BYTES] if spec.states > 1 and spec.step is OptimizerStep.FUSED else []
        for states in (states for unit in self._units for states in unit.states_here):
            for made in (*states, *counts):
                self.log.make(made)
        return self.log.take()

    def micro_step(self, *, last: bool) -> None:
        """Make the events of forward and backward."""
        self._forward()
        outputs = self.log.make(self._description.output_bytes.bytes(self._samples)) if self._job.holds_outputs else None
        self._backward(last)
        self.log.drop(outputs)
        for segment in self.segments:
            segment.end()

    def optimizer_step(self) -> None:
        """Make the events of the optimizer's scratch, and free gradients."""
        for unit in self._units:
            there = [self.log.make(nbytes) for nbytes in unit.states]
            self._make_scratch([max(unit.trained_here)] if there else [])
            self.log.drop(*there)
        rest = [unit for unit in self._units if not unit.layout.step_in_backward and not unit.states]
        self._make_scratch([nbytes for unit in rest for nbytes in unit.trained_here])
        for unit in self._units:
            self._free_gradients(unit)

    def _make_scratch(self, trained: Sequence[int], stream: int = 0) -> None:
        """Make what a step of parameters of these sizes takes for a moment."""
        log, step = self.log, self._job.optimizer.step
        if step is OptimizerStep.FOREACH:
            log.drop(*[log.make(nbytes, stream) for nbytes in trained])
        elif step is OptimizerStep.FOR_LOOP:
            for nbytes in trained:
                half = int(nbytes * self._job.optimizer.loop_scratch / 2)
                log.drop(log.make(half, stream), log.make(half, stream))

    def _free_gradients(self, unit: _Unit) -> None:
        self.log.drop(unit.gradient, *unit.gradients)
        unit.gradient, unit.gradients = None, []

    def _forward(self) -> None:
        for number, unit in enumerate(self._units):
            if unit.whole_step and (number not in self._first_use or not self._description.units[number].fqn):
                self._gather(unit, forward=True)
        for segment, events in zip(self._description.segments, self.segments, strict=True):
            unit = self._units[segment.unit]
            if not unit.gathered:
                self._gather(unit, forward=True)
            events.forward()
            if not unit.whole_step and unit.layout.reshard_after_forward:
                self._free_gathered(unit)
        self.log.drop(self._last_buffer)
        self._last_buffer = None

    def _gather(self, unit: _Unit, *, forward: bool) -> None:
        """Gather, and copy out of the buffer; in forward the buffer stays until the next unit's has been filled."""
        if not unit.handled:
            return
        self._start_gather(unit)
        if unit.layout.shard_size == 1:
            self._copy_replica(unit)
        else:
            unit.gathered = [self.log.make(whole) for _, whole, _ in unit.sources]
        if forward:
            self.log.drop(self._last_buffer)
            self._last_buffer = unit.buffer
        else:
            self.log.drop(unit.buffer)
        unit.buffer = None

    def _start_gather(self, unit: _Unit) -> None:
        """Fill the buffer and send it, on streams of their own."""
        if unit.buffer is not None or unit.layout.shard_size == 1 or not unit.handled:
            return
        log = self.log
        inputs: list[int] = []
        if unit.layout.on_host:
            for nbytes, whole, cast in unit.sources:
                inputs.append(brought := log.make(nbytes, COPY_IN))
                if cast:
                    inputs[-1] = log.make(whole // unit.layout.shard_size, COPY_IN)
                    log.drop(brought)
        elif cast_bytes := sum(whole // unit.layout.shard_size for _, whole, cast in unit.sources if cast):
            inputs.append(log.make(cast_bytes, COPY_IN))
        unit.buffer = log.make(unit.terms.gather_buffer, COPY_IN)
        log.drop(*inputs)
        if unit.terms.cast_buffer:  # what lies between two stages
            log.drop(log.make(unit.terms.cast_buffer, GATHER))

    def _copy_replica(self, unit: _Unit) -> None:
        """Copy each parameter of a replicated unit, by way of one that was brought from the host or cast."""
        log = self.log
        before: int | None = None
        for nbytes, whole, cast in unit.sources:
            source = log.make(nbytes) if unit.layout.on_host else None
            if cast:
                source, brought = log.make(whole), source
                log.drop(brought)
            log.drop(before)
            unit.gathered.append(log.make(whole))
            before = source
        log.drop(before)

    def _free_gathered(self, unit: _Unit) -> None:
        self.log.drop(*unit.gathered)
        unit.gathered = []

    def _backward(self, last: bool) -> None:
        segments = self._description.segments
        late = {number for number, unit in enumerate(self._units) if unit.whole_step}
        for index in range(len(segments) - 1, -1, -1):
            number = segments[index].unit
            unit = self._units[number]
            if not unit.gathered:
                self._gather(unit, forward=False)
            if (ahead := self._ahead[index]) is not None and not self._units[ahead].gathered:
                self._start_gather(self._units[ahead])
            gradients = self.segments[index].backward()
            if merged := self._merging.get(index, 0):
                gradients = self._merged(unit, gradients, merged)
            self._arrive(unit, gradients)
            if unit.whole_step:
                continue
            if index > self._first_use[number]:
                if unit.layout.reshard_after_forward:
                    self._free_gathered(unit)
            elif self.segments[index].handed[True]:  # it makes a gradient of its input, as far as is known
                self._free_gathered(unit)
                self._reduce(unit, last)
            else:  # no gradient of its input tells FSDP2 that its backward is over: it comes last, as the root does
                late.add(number)
        self._finish_backward(late, last)

    def _finish_backward(self, late: set[int], last: bool) -> None:
        """Reduce what comes last."""
        for number in sorted(late):
            unit = self._units[number]
            if number not in self._first_use:  # its modules run somewhere in the others' segments
                unit.gradients = [self.log.make(nbytes) for nbytes in unit.gradient_sizes]
            self._free_gathered(unit)
            self._reduce(unit, last)
        self.log.drop(self._reduce_input, *self._reducing_replicas)
        self._reduce_input, self._reducing_replicas = None, []

    def _merged(self, unit: _Unit, gradients: list[int], merged_bytes: int) -> list[int]:
        """Add the gradients to those that came before, out of place: all are there for a moment."""
        log = self.log
        if not gradients:  # not told apart from the segment's other terms
            log.drop(log.make(merged_bytes))
        sums = []
        for gradient in gradients:
            sums.append(log.make(log.sizes[gradient]))
            before = next((number for number in unit.gradients if log.sizes[number] == log.sizes[gradient]), None)
            unit.gradients = [number for number in unit.gradients if number != before]
            log.drop(before, gradient)
        return sums

    def _arrive(self, unit: _Unit, gradients: list[int]) -> None:
        """Keep new gradients; those of a plain module are added to what is there."""
        if not unit.handled and unit.gradients and len(unit.gradients) == len(unit.gradient_sizes):
            self.log.drop(*gradients)
        else:
            unit.gradients = gradients + unit.gradients  # backward meets the last parameters first

    def _reduce(self, unit: _Unit, last: bool) -> None:
        """Reduce the gradients of a unit whose backward is over, or hold them whole."""
        log = self.log
        if not unit.handled:
            if unit.layout.step_in_backward:
                self._make_scratch(unit.trained_here)
                self._free_gradients(unit)
            return
        if unit.holds:
            self._hold_whole(unit)
            if not last:
                return
            unit.gradients, unit.whole = unit.whole, []
        log.drop(self._reduce_input)
        self._reduce_input = log.make(unit.terms.reduce_input) if unit.terms.reduce_input else None
        late = unit.gradients[-1:] if unit.layout.shard_size > 1 else []
        log.drop(*(gradient for gradient in reversed(unit.gradients) if gradient not in late))
        unit.gradients = []
        reduced = log.make(unit.terms.reduce_input // unit.layout.shard_size, REDUCE)
        if unit.terms.reduce_stage:
            log.drop(log.make(unit.terms.reduce_stage, REDUCE))
        self._settle(unit, reduced, last)
        log.drop(*late)

    def _hold_whole(self, unit: _Unit) -> None:
        """Add a micro-step's gradients to those that are held, or hold them, cast where the reduction's dtype is another."""
        log = self.log
        if unit.whole:
            log.drop(*unit.gradients)
        elif unit.whole_factor == 1:
            unit.whole = unit.gradients
        else:
            for gradient in unit.gradients:
                unit.whole.append(log.make(int(log.sizes[gradient] * unit.whole_factor)))
                log.drop(gradient)
        unit.gradients = []

    def _settle(self, unit: _Unit, reduced: int, last: bool) -> None:
        """Add up a reduce-scatter's output, or make it the gradient."""
        log = self.log
        if unit.replicas and not last:
            if unit.partial is None:
                unit.partial = reduced
            else:
                log.drop(reduced)
            return
        log.drop(unit.partial)
        unit.partial = None
        result = log.make(sum(unit.trained), unit.reduce_stream) if unit.recast else reduced
        if unit.layout.step_in_backward:
            self._make_scratch(unit.trained_here, unit.reduce_stream)
        elif not unit.layout.on_host and unit.gradient is None:  # else it goes to the host, or is added to what is there
            unit.gradient = result
        if unit.recast and unit.gradient != result:
            log.drop(result)
        if unit.gradient == reduced:
            return
        if unit.replicas:
            self._reducing_replicas.append(reduced)
        else:
            log.drop(reduced)
