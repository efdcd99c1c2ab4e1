"""Costs of one layout for one unit: seconds, and bytes on the fullest rank as FSDP2 or a replica allocates them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from ..decision import LAYOUT_FIELDS, Batch, Message, UnitLayout
from ..description import DType, GatherSpan, ModelDescription, ParameterSpec, UnitDescription, shard_dim
from ..hardware import Collective, Hardware
from ..training_job import TrainingJob
from .collectives import messages, sharded_seconds, unit_collective_seconds
from .placement import shard_bytes, shard_seconds

T = TypeVar("T")
layout_key = attrgetter(*(name for name in LAYOUT_FIELDS if name != "activations"))
"""The fields of a layout that change the terms of its unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """Memory terms of one unit under one layout in the last micro-step, or in an earlier one, in bytes.

    Less of a term makes no moment higher, but for the terms of `_LOWERING`.
    """

    parameters: int = 0
    """Sharded parameters, held during the whole step."""
    optimizer: int = 0
    """Optimizer states, held during the whole step."""
    step_scratch: int = 0
    """Temporaries of an optimizer step of all parameters at once."""
    step_passing: int = 0
    """Most bytes of the optimizer step that are there for one unit at a time: temporaries of one parameter in a loop,
    of one matrix, and a unit's states from the host."""
    host: int = 0
    """Parameters, gradients and optimizer states on the host; no other term includes them."""
    host_moment: int = 0
    """A gradient on the host that is added to the held one; one at a time over all units."""
    gradients_held: int
    """Gradients from earlier micro-steps, held during the whole micro-step."""
    gradients_after: int
    """Change of the gradients' bytes at the end of the unit's backward: negative where held whole gradients become
    shards."""
    reduced_after: int = 0
    """Reduced gradients that FSDP2 keeps until the end of backward, beside the terms above."""
    copies: int = 0
    """Parameters of a replica in the compute dtype, held in forward and backward of each micro-step, but not in the
    optimizer step."""
    gathered: int = 0
    """Unsharded parameters in the compute dtype."""
    gather_buffer: int = 0
    """Output of the all-gather before it is copied out; 0 if nothing is sent."""
    gather_stage: int = 0
    """Bytes beside the gather buffer while the gather runs: codes of fewer bits, and the buffer between two stages."""
    cast_buffer: int = 0
    """Bytes beside whole parameters while they are copied from the host and cast."""
    copy_out: int = 0
    """Temporaries of the copy out of the gather's buffer: parameters that are not sharded along dimension 0."""
    unsharded_gradients: int
    """Gradients from autograd, before they are reduced or added to held whole gradients; 0 if autograd adds them."""
    joined: int = 0
    """The part of `unsharded_gradients` that is added to held whole gradients before a reduction at the end of
    backward."""
    reduce_input: int = 0
    """Input buffer of the reduce-scatter."""
    reduce_copy: int = 0
    """Bytes beside autograd's gradients before they are freed. Of a replica, its flat gradients. Else the last
    gradient that was copied because it is not sharded along dimension 0; a loop variable keeps the original while the
    input is filled.
    """
    reduce_stage: int
    """Buffer between two stages of the reduce-scatter with codes of fewer bits; or the codes between replicas, if
    they are larger.
    """
    last_gradient: int = 0
    """Gradients from autograd that loop variables of FSDP2's `foreach_reduce` keep until that function returns: the
    last parameter's, and that of `reduce_copy`.
    """
    reduce_tail: int = 0
    """Input of the reduce-scatter while the backward of the next unit runs; it is freed when that backward ends."""
    reduce_output: int = 0
    """Output of the reduce-scatter, without the part that becomes the gradient."""
    kept: int = 0
    """Gathered parameters that stay between forward and backward."""
    leaves_tail: bool = False
    """Whether `reduce_tail` of the unit before stays and this one has none: in a micro-step in which a unit holds its
    gradients it reduces nothing, nor does a replica in FSDP2's way."""
    managed: bool = True
    """Whether FSDP2 runs the unit. Beside a replica its buffers stay for the units of other kind that run between."""
    at_end: bool = False
    """Whether gradients are reduced at the end of backward."""
    adds: bool = False
    """Whether autograd adds gradients to held whole ones as they come, but for those of shared parameters, which wait
    for each other."""
    earlier: UnitBytes | None = field(default=None, compare=False)
    """The terms in an earlier micro-step, which may be equal; None in one, and without accumulation."""

    def in_units(self, size: int) -> UnitBytes:
        """Return the terms in units of `size` bytes, rounded so that no moment has more than before."""
        less: dict[str, Any] = {name: value // size for name, value in zip(_TERMS, _terms(self), strict=True)}
        less |= {name: -(-getattr(self, name) // size) for name in _TERMS if name in _LOWERING}
        if 0 < self.kept < size:  # they seem to be freed, and then would be gathered once more
            less |= {"gather_buffer": 0, "gather_stage": 0, "cast_buffer": 0}
        return replace(self, **less, earlier=self.earlier and self.earlier.in_units(size))

    @classmethod
    def least(cls, choices: Collection[UnitBytes]) -> UnitBytes:
        """Return terms with which no moment is higher than with any of these, but for gathers in backward: those ahead
        of other units, and of parameters that some of these keep.
        """
        columns = zip(*map(_values, choices), strict=True)
        values = {
            name: max(column) if name in _LOWERING else min(column)
            for name, column in zip(_NAMES, columns, strict=True)
        }
        if any(one.kept for one in choices):  # what is kept is not gathered again in backward
            values["gather_stage"] = values["cast_buffer"] = 0
        if len({one.at_end for one in choices}) > 1:  # a replica's gradients are reduced before
            values["unsharded_gradients"] = 0
        earlier = [one.earlier for one in choices if one.earlier is not None]
        return cls(**values, earlier=cls.least(earlier) if earlier else None)

    @property
    def held(self) -> int:
        """Bytes at every moment of forward and backward."""
        return self.parameters + self.optimizer + self.gradients_held + self.copies

    @property
    def reduce_work(self) -> int:
        """Bytes of a reduce-scatter without its input and the resulting gradient."""
        return self.reduce_stage + self.last_gradient + max(0, self.reduce_output - self.reduced_after)

    @property
    def left_at_end(self) -> int:
        """Change of the gradients' bytes in a reduction at the end of backward."""
        return self.gradients_after - self.unsharded_gradients + self.joined

    def coming(self, gradients: tuple[int, int]) -> int:
        """Return the bytes of gradients that a backward leaves beside held ones, given those of all parameters and of
        shared ones (`gradients_arriving`).
        """
        return gradients[self.adds] if self.unsharded_gradients else 0

    @property
    def prefetched(self) -> int:
        """Bytes of the unit's prefetched gather, which overlaps the backward of another unit; 0 if parameters are
        kept.
        """
        return 0 if self.kept else self.gather_buffer

    @property
    def gathering(self) -> int:
        """Bytes beside gathered parameters and gather buffer while the unit is gathered and copied out in forward."""
        return max(self.copy_out, self.gather_stage - self.gathered)

    @property
    def issued(self) -> int:
        """Bytes of that gather while it is issued, before the backward of the other unit computes."""
        return 0 if self.kept else self.gather_buffer + self.gather_stage


_NAMES = tuple(one.name for one in fields(UnitBytes) if one.name != "earlier")
_TERMS = tuple(one.name for one in fields(UnitBytes) if one.type == "int")
_terms, _values = attrgetter(*_TERMS), attrgetter(*_NAMES)
_LOWERING = ("joined", "managed", "at_end", "adds")
"""Terms of which more lowers a moment: they are rounded up, and a bound takes the most of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSeconds:
    """Time terms of one unit under one layout, in seconds per micro-step; `all_reduce` and `optimizer` are per
    optimizer step.
    """

    gather_forward: float
    gather_backward: float
    """0 if parameters are kept."""
    reduce_scatter: float
    """In each micro-step that reduces."""
    all_reduce: float
    """Between replicas."""
    copy_forward: float
    """Work on the compute stream in forward: FSDP2's copies into and out of buffers, hooks and views; copies of a
    replica.
    """
    copy_backward: float
    """Work on the compute stream to gather and to reduce in backward."""
    optimizer: float
    """Clipping, optimizer step on the unit's shard, and `update_gathers`."""
    update_gathers: float = 0.0
    """All-gathers of the updates of matrices in the optimizer step."""


def shape_ids(units: Sequence[UnitDescription]) -> tuple[int, ...]:
    """Return a number for each unit; units have the same number if equal layouts cost the same, activations left
    out.
    """
    known: dict[tuple[object, ...], int] = {}

    def key(unit: UnitDescription) -> tuple[object, ...]:
        shared = {names[0] for names in unit.shared}
        return unit.span, unit.ends_late, tuple(
            (p.shape, p.dtype, p.requires_grad, p.keeps_dtype, p.is_embedding, p.name in shared)
            for p in unit.parameters
        )  # fmt: skip

    return tuple(known.setdefault(key(unit), len(known)) for unit in units)


def once_per_shape(
    units: Sequence[UnitDescription], terms: Callable[[UnitDescription, UnitLayout], T]
) -> Callable[[int, UnitLayout], T]:
    """Return a function of a unit's index and a layout that computes `terms` once for equal units."""
    shapes = shape_ids(units)
    known: dict[tuple[object, ...], T] = {}

    def found(index: int, layout: UnitLayout) -> T:
        key = (shapes[index], layout_key(layout))
        if key not in known:
            known[key] = terms(units[index], layout)
        return known[key]

    return found


def unit_bytes(
    unit: UnitDescription, layout: UnitLayout, world_size: int, job: TrainingJob, batch: Batch
) -> UnitBytes:
    """Return the memory terms of a unit under a layout in the last micro-step, and with accumulation in an earlier
    one: of two the first, before which no gradients are held, of more one between.
    """
    micro_step = partial(_replica_bytes if layout.is_replica else _managed_bytes, unit, layout, world_size, job, batch)
    last = micro_step(earlier=False)
    if batch.accumulation_steps == 1:
        return last
    is_alike = batch.accumulation_steps > 2 and not batch.holds_gradients(layout)
    return replace(last, earlier=last if is_alike else micro_step(earlier=True))


def _managed_bytes(
    unit: UnitDescription, layout: UnitLayout, world_size: int, job: TrainingJob, batch: Batch, *, earlier: bool
) -> UnitBytes:
    """Return the memory terms of a unit that FSDP2 manages."""
    g, precision, trainable = layout.shard_size, job.precision, unit.trainable
    shards = sum(p.sharded_bytes(g) for p in trainable)
    gradients = 0 if layout.away else shards
    gathered = _nbytes(unit.parameters, precision.gathered_dtype, g)
    scatter_input = reduce_input(unit, g, job)
    reduced = scatter_input // g
    recast = any(precision.reduced_dtype(p) is not p.dtype for p in trainable)
    whole, unsharded = (_nbytes(trainable, dtype) for dtype in (precision.reduced_dtype, precision.gathered_dtype))
    copied = _copied(trainable, g)[-1:]
    in_loops = dict.fromkeys([*trainable[-1:], *copied]) if g > 1 else {}
    holds = batch.holds_gradients(layout)
    accumulates = batch.accumulation_steps > 1 and not holds
    partial = accumulates and g < world_size  # reduced in the shard group, not yet between replicas
    held = whole if holds else reduced if partial else gradients if accumulates else 0
    held = 0 if _is_first(batch, earlier=earlier) else held
    output = reduced if recast or accumulates or layout.away else 0
    if layout.away and recast:  # cast on the device, then copied
        output += shards
    last, copy = (
        _nbytes(ps, precision.reduced_dtype if holds else precision.gathered_dtype) for ps in (in_loops, copied)
    )
    joins, casts = holds and held > 0, whole != unsharded
    gather, *reductions = messages(unit, layout, world_size)
    unsharded = unsharded if casts or not joins else merged_gradients(unit, job)
    terms: dict[str, Any] = shard_bytes(unit, layout, job)
    if partial or not accumulates:
        terms["host_moment"] = 0
    terms |= dict(
        gradients_held=held,
        gradients_after=(whole if holds and earlier else gradients) - held,
        gathered=gathered,
        gather_buffer=gathered if g > 1 else 0,
        gather_stage=gather.gather_buffers() + (gathered // layout.stage_size if layout.two_stage else 0),
        cast_buffer=_cast_buffer(unit, job) if g == 1 else 0,
        copy_out=_nbytes(_copied(unit.parameters, g), precision.gathered_dtype),
        unsharded_gradients=0 if joins and not unit.reduced_at_end else unsharded,
        joined=unsharded if joins and unit.reduced_at_end else 0,
        kept=0 if layout.reshard_after_forward else gathered,
        at_end=unit.reduced_at_end,
        adds=joins and not casts,
    )
    if holds and earlier:
        copy = _cast_whole(trainable, job) if casts and not joins else 0
        return UnitBytes(**terms, reduce_copy=copy, reduce_stage=0, leaves_tail=True)
    return UnitBytes(
        **terms,
        reduced_after=reduced if g < world_size and (recast or layout.away) else 0,
        reduce_input=scatter_input,
        reduce_copy=copy,
        reduce_stage=_reduce_stage(unit, layout, job, reduced, reductions),
        last_gradient=last,
        reduce_tail=scatter_input,
        reduce_output=output,
    )


def _is_first(batch: Batch, *, earlier: bool) -> bool:
    """Return whether no gradients are held before a micro-step; an earlier one of three or more is one between."""
    return earlier and batch.accumulation_steps == 2


def _cast_whole(parameters: Sequence[ParameterSpec], job: TrainingJob) -> int:
    """Return the most bytes beside autograd's gradients while these are cast for their reduction and freed, one after
    the other.
    """
    most = beside = 0
    for p in parameters:
        cast, own = (_nbytes([p], dtype) for dtype in (job.precision.reduced_dtype, job.precision.gathered_dtype))
        most, beside = max(most, beside + cast), beside + cast - own
    return most


def _replica_bytes(
    unit: UnitDescription, layout: UnitLayout, world_size: int, job: TrainingJob, batch: Batch, *, earlier: bool
) -> UnitBytes:
    """Return the memory terms of a unit whose parameters are plain (sharding/replicas.py). One process neither copies
    gradients nor reduces them.
    """
    precision, trainable = job.precision, unit.trainable
    accumulates = batch.accumulation_steps > 1 and not _is_first(batch, earlier=earlier)
    terms: dict[str, Any] = shard_bytes(unit, layout, job)
    flat, whole = _nbytes(trainable, attrgetter("dtype")), _nbytes(trainable, precision.gathered_dtype)
    casts, copied = cast_parameters(trainable, job), cast_parameters(unit.parameters, job)
    in_place = accumulates and not casts  # autograd adds to the held gradients
    if accumulates:
        copy = 0 if in_place else whole
    else:
        copy = flat if casts or world_size > 1 else 0
    return UnitBytes(
        **terms,
        gradients_held=flat if accumulates else 0,
        gradients_after=0 if accumulates else flat,
        copies=_nbytes(copied, precision.gathered_dtype),
        unsharded_gradients=merged_gradients(unit, job) if in_place else whole,
        reduce_copy=copy,
        reduce_stage=_reduce_stage(unit, layout, job, flat, messages(unit, layout, world_size)[1:]),
        leaves_tail=True,
        managed=False,
        at_end=unit.span is GatherSpan.STEP,
    )


def cast_parameters(parameters: Iterable[ParameterSpec], job: TrainingJob) -> list[ParameterSpec]:
    """Return the parameters that compute in another dtype than that of their storage."""
    return [p for p in parameters if job.precision.gathered_dtype(p) is not p.dtype]


def reduce_input(unit: UnitDescription, shard_size: int, job: TrainingJob) -> int:
    """Return the bytes of the input of a reduce-scatter: each gradient, padded to a multiple of the shard group.

    See FSDP2's `_get_dim0_padded_size`.
    """
    return _nbytes(unit.trainable, job.precision.reduced_dtype, shard_size)


def gradients_arriving(description: ModelDescription, job: TrainingJob) -> tuple[Mapping[int, tuple[int, int]], ...]:
    """Return for each segment the bytes of gradients that its backward adds, by unit gathered for the whole step: of
    all parameters, and of shared ones.

    A gradient without a traced time counts from the unit's last segment on. A gradient that a block's backward adds
    counts from the nearest later segment of a unit gathered for the whole step, whose backward comes first.
    """
    segments = description.segments
    arriving: list[dict[int, tuple[int, int]]] = [{} for _ in segments]
    whole_step = [index for index, s in enumerate(segments) if description.units[s.unit].span is GatherSpan.STEP]
    last = {segments[index].unit: index for index in whole_step}
    traced = {name: index for index, segment in enumerate(segments) for name in segment.gradients}
    for unit, at_latest in last.items():
        shared = _shared(description.units[unit])
        for p in description.units[unit].trainable:
            comes = traced.get(p.name, at_latest)
            first = next((index for index in whole_step if index >= comes), whole_step[-1])
            own, (every, some) = _nbytes([p], job.precision.gathered_dtype), arriving[first].get(unit, (0, 0))
            arriving[first][unit] = every + own, some + own * (p in shared)
    return tuple(arriving)


def _shared(unit: UnitDescription) -> list[ParameterSpec]:
    """Return the trained parameters with several names, which have several gradients."""
    names = {names[0] for names in unit.shared}
    return [p for p in unit.trainable if p.name in names]


def merged_gradients(unit: UnitDescription, job: TrainingJob) -> int:
    """Return the bytes of autograd's sum of a parameter's gradients, which is live beside both summands."""
    return _nbytes(_shared(unit), job.precision.gathered_dtype)


def unit_seconds(unit: UnitDescription, layout: UnitLayout, hardware: Hardware, job: TrainingJob) -> UnitSeconds:
    """Return the time terms of `unit` under `layout`."""
    g = layout.shard_size
    gathered, reduced = _nbytes(unit.parameters, job.precision.gathered_dtype, g), reduce_input(unit, g, job)
    if layout.is_replica:  # reduced in its own dtype
        reduced = _nbytes(unit.trainable, attrgetter("dtype"))
    brought, taken, update = shard_seconds(unit, layout, hardware, job)
    gather, scatter, replicas = unit_collective_seconds(unit, layout, hardware, gathered, reduced)
    copy_out, copy_in = _copy_seconds(unit, layout, gathered, reduced, hardware, job)
    scatter += taken
    if g == 1:  # FSDP2 copies parameters to the device on the compute stream
        copy_out += brought
    else:
        gather += brought
    sizes = [job.optimizer.gathered_bytes(p, g) for p in unit.trainable]
    gathers = sum(sharded_seconds(hardware, Collective.ALL_GATHER, g, 1, nbytes) for nbytes in sizes if nbytes)
    frees = layout.reshard_after_forward
    return UnitSeconds(
        gather_forward=gather,
        gather_backward=gather if frees else 0.0,
        reduce_scatter=scatter,
        all_reduce=replicas,
        copy_forward=copy_out,
        copy_backward=copy_in + (copy_out if frees else 0.0),
        optimizer=update + gathers,
        update_gathers=gathers,
    )


def _copy_seconds(
    unit: UnitDescription, layout: UnitLayout, gathered: int, reduced: int, hardware: Hardware, job: TrainingJob
) -> tuple[float, float]:
    """Return the seconds in forward and in backward of all that runs to gather and to reduce a unit, or to copy a
    replica and its gradients, without collectives: measured, else copies at memory speed.
    """
    g, dtype, rate = layout.shard_size, job.precision.gathered_dtype, hardware.device.memory_bytes_per_s
    overhead = None if hardware.backend.overlaps else hardware.fsdp_overhead
    if layout.is_replica:
        cast = cast_parameters(unit.parameters, job)
        if not cast and hardware.world_size == 1:
            return 0.0, 0.0
        copied = _nbytes(cast, attrgetter("dtype")) + _nbytes(cast, dtype)
        flat = _nbytes(unit.trainable, dtype) + reduced
        if overhead is None:
            return copied / rate, flat / rate
        return overhead.copy(len(cast), copied), overhead.flatten(len(unit.trainable), flat)
    reductions = 2 if g == 1 else 1  # the reduce-scatter of one rank is a second copy
    if overhead is None:
        again = (_nbytes(_copied(ps, g), dtype) for ps in (unit.parameters, unit.trainable))
        return 2 * (gathered + next(again)) / rate, reductions * 2 * (reduced + next(again)) / rate
    brought = gathered if g == 1 else gathered + gathered // g
    return overhead.gather(len(unit.parameters), brought), overhead.reduce(len(unit.trainable), reductions * reduced)


def queue_seconds(
    unit: UnitDescription, layout: UnitLayout, hardware: Hardware, job: TrainingJob, batch: Batch
) -> float:
    """Return the CPU's seconds for a unit beside a GPU and beside its operators, in a micro-step, with a part of the
    optimizer step.
    """
    cast = cast_parameters(unit.parameters, job)
    if not hardware.backend.overlaps or (layout.is_replica and not cast and hardware.world_size == 1):
        return 0.0
    overhead, trainable = hardware.queueing, len(unit.trainable)
    update = overhead.updates[job.optimizer.step](trainable, 0) / batch.accumulation_steps
    if layout.is_replica:
        return overhead.copy(len(cast), 0) + overhead.flatten(trainable, 0) + update
    gathers = overhead.gather(len(unit.parameters), 0) * (2 if layout.reshard_after_forward else 1)
    reduces = batch.reduce_scatters(layout) * overhead.reduce(trainable, 0) / batch.accumulation_steps
    return gathers + reduces + update


def _nbytes(parameters: Iterable[ParameterSpec], dtype_of: Callable[[ParameterSpec], DType], g: int = 1) -> int:
    """Return the bytes of whole parameters in a dtype, padded for a group of `g` ranks."""
    return sum(g * p.sharded_numel(g) * dtype_of(p).itemsize for p in parameters)


def _copied(parameters: Iterable[ParameterSpec], g: int) -> list[ParameterSpec]:
    """Return the parameters that FSDP2 copies once more in a gather and in a reduction, into the order of ranks."""
    return [p for p in parameters if g > 1 and shard_dim(p.shape, g)]


def _cast_buffer(unit: UnitDescription, job: TrainingJob) -> int:
    """Return the bytes beside whole parameters that are copied from the host, cast and put into place, one by one.

    Casts and copies of shards never exceed the later gather buffer, because FSDP2 makes them before the gather.
    """
    highest = done = 0
    for p in unit.parameters:
        whole, brought = p.numel * job.precision.gathered_dtype(p).itemsize, p.numel * p.dtype.itemsize
        cast = job.precision.gathered_dtype(p) is not p.dtype
        source = whole if cast else brought
        highest = max(highest, done + brought + (whole if cast else 0), done + source + whole)
        done += whole
    return highest - done


def _reduce_stage(
    unit: UnitDescription, layout: UnitLayout, job: TrainingJob, reduced: int, reductions: Sequence[Message]
) -> int:
    """Return the bytes of a reduction beside its input and output; `reduced` are the bytes of a rank's part."""
    stage = layout.shard_size // layout.stage_size * reduced if layout.two_stage else 0
    apart = any(job.precision.reduced_dtype(p).itemsize < 4 for p in unit.trainable)
    codes, replicas = (message.reduce_buffers(separate_sums=apart) for message in reductions)
    return max(stage + codes, replicas)
