"""What one choice costs one unit: the terms from which memory and time are built.

Every term is a whole number of
bytes on the fullest rank, or seconds. The terms follow what FSDP2 allocates (torch/distributed/fsdp/_fully_shard), not an idealisation:
gathering needs a buffer beside the gathered parameters, reducing needs a copy of the gradients, and a replicated unit
is copied although nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...errors import HardwareError
from ..decision import Batch, UnitLayout
from ..description import GatherSpan, ModelDescription, ParameterSpec, UnitDescription
from ..hardware import Collective, Hardware, HostSpec
from ..job import OptimizerSpec, OptimizerStep, TrainingJob
from .collectives import collective_seconds, gather_seconds, reduce_scatter_seconds, replicate_ring


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """Memory terms of one unit under one choice, in bytes."""

    parameters: int
    """Sharded parameters, held throughout."""
    optimizer: int
    """Optimizer states, held throughout."""
    gradients_held: int
    """Gradients held throughout, because earlier micro-steps left them."""
    gradients_after: int
    """What the unit's gradients add once its backward is done."""
    gradients_settled: int
    """What they add when the last micro-step ends: negative where whole gradients that were held become shards.

    Counted then and not unit by unit, because the micro-steps before end with all of them whole.
    """
    reduced_after: int
    """Reduced gradients that FSDP2 keeps until the end of backward beside those above."""
    gathered: int
    """Unsharded parameters in the compute dtype."""
    gather_buffer: int
    """Output of the all-gather before it is copied out; 0 where nothing is sent."""
    cast_buffer: int
    """What parameters that are cast to the compute dtype or brought to the device, and what lies between two stages of a gather, take
    beyond `gathered` and `gather_buffer`."""
    unsharded_gradients: int
    """Gradients as autograd makes them, before they are reduced or added to whole ones that are held."""
    reduce_input: int
    """Input buffer of the reduce-scatter."""
    reduce_stage: int
    """What the first of two stages of the reduce-scatter leaves to the second; 0 where there is one."""
    last_gradient: int
    """The last parameter's gradient as autograd made it, which a loop variable of FSDP2's `foreach_reduce` keeps alive until
    the reduce-scatter is done."""
    reduce_tail: int
    """The reduce-scatter's input while the next unit's backward runs: it is freed when that one ends."""
    reduce_output: int
    """Output of the reduce-scatter, beyond what becomes the gradient."""
    kept: int
    """Gathered parameters that stay between forward and backward."""
    step_scratch: int
    """Temporaries of the optimizer step."""
    host: int
    """Parameters, gradients and optimizer states on the host; they are not in any other term."""
    host_moment: int = 0
    """What comes to the host beside them for a moment: a gradient that is then added to the one that is there. Units take turns."""
    waiting_gradients: int = 0
    """Gradients of all calls but the first, whole until that one's backward (`GatherSpan.CALLS`)."""

    @property
    def held(self) -> int:
        """Bytes that are there at every moment."""
        return self.parameters + self.optimizer + self.gradients_held

    @property
    def reduce_work(self) -> int:
        """Bytes of a reduce-scatter beside its input and what becomes the gradient."""
        return self.reduce_stage + self.last_gradient + max(0, self.reduce_output - self.reduced_after)

    @property
    def prefetched(self) -> int:
        """Bytes of the gather that runs while the unit after it (in backward: before it) computes."""
        return 0 if self.kept else self.gather_buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSeconds:
    """Time terms of one unit under one choice, in seconds."""

    gather_forward: float
    """All-gather in forward, each micro-step."""
    gather_backward: float
    """All-gather in backward, each micro-step; 0 where parameters are kept."""
    reduce_scatter: float
    """Reduce-scatter of the gradients, in each micro-step that reduces."""
    all_reduce: float
    """All-reduce between replicas, once a step."""
    copy_forward: float
    """FSDP2's own work to gather in forward, on the compute stream: copies into and out of buffers, hooks, views."""
    copy_backward: float
    """The same in backward, with its work to reduce the gradients."""
    optimizer: float
    """Clipping and optimizer step on the unit's shard, once a step."""


def shape_ids(units: Sequence[UnitDescription]) -> tuple[int, ...]:
    """A number for each unit: the same for those that cost the same under equal choices, activations left out."""
    known: dict[tuple[object, ...], int] = {}
    keys = ((unit.span, tuple((p.shape, p.dtype, p.requires_grad, p.keeps_dtype) for p in unit.parameters)) for unit in units)
    return tuple(known.setdefault(key, len(known)) for key in keys)


def unit_bytes(unit: UnitDescription, choice: UnitLayout, world_size: int, job: TrainingJob, batch: Batch) -> UnitBytes:
    """Memory terms of `unit` under `choice`."""
    g = choice.shard_size
    trainable = [p for p in unit.parameters if p.requires_grad]
    precision = job.precision
    parameters = _total(unit.parameters, lambda p: p.sharded_numel(g) * p.dtype.itemsize)
    shards = _total(trainable, lambda p: p.sharded_numel(g) * p.dtype.itemsize)
    gradients = 0 if choice.on_host else shards
    casts = _casts(unit, job)
    copies = world_size > 1 or casts or choice.on_host  # one process in its own precision trains the plain module
    gathered = _total(unit.parameters, lambda p: g * p.sharded_numel(g) * precision.gathered_dtype(p).itemsize) if copies else 0
    reduced = _total(trainable, lambda p: p.sharded_numel(g) * precision.reduced_dtype(p).itemsize)
    recast = any(precision.reduced_dtype(p) is not p.dtype for p in trainable)
    whole = _total(trainable, lambda p: p.numel * precision.reduced_dtype(p).itemsize)
    holds = batch.holds_gradients(choice)
    accumulates = batch.accumulation_steps > 1 and not holds
    if not copies:  # a plain parameter adds up its gradient where it is
        holds, accumulates = False, batch.accumulation_steps > 1
    partial = accumulates and g < world_size  # reduced in the shard group, not yet between replicas
    held = whole if holds else reduced if partial else gradients if accumulates else 0
    output = reduced if copies and (recast or accumulates or choice.on_host) else 0
    if holds:  # whole gradients go before it comes, but for the last one's
        last = _total(trainable[-1:], lambda p: p.numel * precision.reduced_dtype(p).itemsize) if g > 1 else 0
        output = max(0, reduced + (gradients if recast else 0) + last - whole)
    kept_back = reduced if g < world_size and (recast or choice.on_host) else 0
    # beside whole gradients that become less than they were, what is kept back is no more than these were
    beside = max(0, kept_back + gradients - whole) if holds else kept_back
    return UnitBytes(
        parameters=0 if choice.on_host else parameters,
        optimizer=job.optimizer.states * gradients,
        gradients_held=held,
        gradients_after=0 if holds else gradients - held,
        gradients_settled=gradients - whole + kept_back - beside if holds else 0,
        reduced_after=beside,
        gathered=gathered,
        gather_buffer=gathered if g > 1 else 0,
        cast_buffer=_beside_gathered(unit, choice, job) if copies else 0,
        unsharded_gradients=0 if holds and unit.span is not GatherSpan.STEP else _unsharded(trainable, job),
        waiting_gradients=_unsharded(trainable, job) if unit.span is GatherSpan.CALLS else 0,
        reduce_input=reduce_input(unit, g, job) if copies else 0,
        reduce_stage=g // choice.stage_size * reduced if choice.stage_size > 1 else 0,
        last_gradient=0 if g == 1 or (holds and unit.span is not GatherSpan.STEP) else _unsharded(trainable[-1:], job),
        reduce_tail=reduce_input(unit, g, job) if copies else 0,
        reduce_output=output,
        kept=0 if choice.reshard_after_forward else gathered,
        step_scratch=0 if choice.on_host else _step_scratch(trainable, g, job),
        host=_host_bytes(unit, g, job) if choice.on_host else 0,
        host_moment=max((p.sharded_numel(g) * p.dtype.itemsize for p in trainable), default=0)
        if choice.on_host and accumulates and not partial
        else 0,
    )


def reduce_input(unit: UnitDescription, shard_size: int, job: TrainingJob) -> int:
    """Bytes of the input of a reduce-scatter: each gradient's rows, padded to a multiple of the shard group
    (`_get_dim0_padded_size` in torch/distributed/fsdp/_fully_shard/_fsdp_common.py)."""
    trainable = (p for p in unit.parameters if p.requires_grad)
    return _total(trainable, lambda p: shard_size * p.sharded_numel(shard_size) * job.precision.reduced_dtype(p).itemsize)


def gradients_arriving(description: ModelDescription, job: TrainingJob) -> tuple[int, ...]:
    """For each segment, bytes of gradients that are there from its backward until the step's end: those of parameters that are gathered
    for the whole step.

    Where no trace says when they come, they count from the unit's last segment on. Those that come in a block's backward count from
    the stretch on that backward meets before it.
    """
    segments, arriving = description.segments, [0] * len(description.segments)
    stretches = [index for index, s in enumerate(segments) if description.units[s.unit].span is GatherSpan.STEP]
    last = {segments[index].unit: index for index in stretches}
    traced = {name: index for index, segment in enumerate(segments) for name in segment.gradients}
    for unit, at_latest in last.items():
        for p in (p for p in description.units[unit].parameters if p.requires_grad):
            comes = traced.get(p.name, at_latest)
            arriving[next((index for index in stretches if index >= comes), stretches[-1])] += _unsharded([p], job)
    return tuple(arriving)


def merged_gradients(unit: UnitDescription, job: TrainingJob) -> int:
    """Bytes of the sum that autograd makes of a parameter's gradients, beside both of them, when the second comes: of one with
    several names, or of a unit with several calls."""
    shared = {names[0] for names in unit.shared}
    repeated = unit.span is GatherSpan.CALLS
    return _unsharded([p for p in unit.parameters if p.requires_grad and (repeated or p.name in shared)], job)


def unit_seconds(unit: UnitDescription, choice: UnitLayout, hardware: Hardware, job: TrainingJob) -> UnitSeconds:
    """Time terms of `unit` under `choice`."""
    g, world_size = choice.shard_size, hardware.world_size
    precision = job.precision
    trainable = [p for p in unit.parameters if p.requires_grad]
    gathered = _total(unit.parameters, lambda p: g * p.sharded_numel(g) * precision.gathered_dtype(p).itemsize)
    reduced = _total(trainable, lambda p: g * p.sharded_numel(g) * precision.reduced_dtype(p).itemsize)
    elements = _total(trainable, lambda p: p.sharded_numel(g) * p.dtype.itemsize)
    gather = gather_seconds(hardware, g, choice.stage_size, gathered)
    scatter = reduce_scatter_seconds(hardware, g, choice.stage_size, reduced)
    all_reduce = collective_seconds(hardware, Collective.ALL_REDUCE, replicate_ring(hardware, g), reduced // g)
    handled = world_size > 1 or choice.on_host
    copy_out, copy_in = _handling_seconds(unit, g, gathered, reduced, hardware) if handled else (0.0, 0.0)
    if choice.on_host:
        brought, taken = _host_seconds(unit, g, hardware)
        scatter += taken
        if g == 1:  # FSDP2 brings replicas over when they are copied, on the stream of compute
            copy_out += brought
        else:
            gather += brought
    return UnitSeconds(
        gather_forward=gather,
        gather_backward=gather if choice.reshard_after_forward else 0.0,
        reduce_scatter=scatter,
        all_reduce=all_reduce,
        copy_forward=copy_out,
        copy_backward=copy_in + (copy_out if choice.reshard_after_forward else 0.0),
        optimizer=_update_seconds(len(trainable), elements, hardware, job, on_host=choice.on_host),
    )


def _handling_seconds(unit: UnitDescription, g: int, gathered: int, reduced: int, hardware: Hardware) -> tuple[float, float]:
    """What FSDP2 does beside the collectives to gather a unit and to reduce it: as measured, else copies at the speed of memory."""
    rate, handling = hardware.device.memory_bytes_per_s, hardware.handling
    reductions = 2 if g == 1 else 1  # the reduce-scatter of one rank is a second copy
    if handling is None:
        return 2 * gathered / rate, reductions * 2 * reduced / rate
    copied = gathered if g == 1 else gathered + gathered // g
    trainable = sum(p.requires_grad for p in unit.parameters)
    return handling.gather(len(unit.parameters), copied), handling.reduce(trainable, reductions * reduced)


def _host_seconds(unit: UnitDescription, g: int, hardware: Hardware) -> tuple[float, float]:
    """To bring a unit's shards from the host to the device, and its reduced gradients back."""
    host = host_of(hardware)
    shards = _total(unit.parameters, lambda p: p.sharded_numel(g) * p.dtype.itemsize)
    trained = _total((p for p in unit.parameters if p.requires_grad), lambda p: p.sharded_numel(g) * p.dtype.itemsize)
    return shards / host.to_device_bytes_per_s, trained / host.to_host_bytes_per_s


def host_of(hardware: Hardware) -> HostSpec:
    """The host beside the devices.

    Raises:
        HardwareError: none is known.
    """
    if hardware.host is None:
        raise HardwareError(
            f"States or activations are to lie on the host, but the host of {hardware.device.name} is not known; measure it (profile)."
        )
    return hardware.host


def _update_seconds(tensors: int, nbytes: int, hardware: Hardware, job: TrainingJob, *, on_host: bool) -> float:
    """Optimizer step on a rank's `tensors` parameters of `nbytes`, and clipping: its norm reads each gradient, its factor
    reads and writes it."""
    device, optimizer = hardware.device, job.optimizer
    if on_host:
        clipped = 3 if job.clips_gradients else 0
        return (optimizer.traffic_per_element + clipped) * nbytes / host_of(hardware).update_bytes_per_s
    if hardware.handling is None:
        update = optimizer.traffic_per_element * nbytes / device.memory_bytes_per_s
    else:
        share = optimizer.traffic_per_element / OptimizerSpec().traffic_per_element  # AdamW was measured
        update = share * hardware.handling.updates[optimizer.step](tensors, nbytes)
    dispatch = 0.0 if hardware.backend.overlaps else 2 * tensors * device.operator_s
    return update + (3 * nbytes / device.memory_bytes_per_s + dispatch if job.clips_gradients else 0.0)


def _total(parameters: Iterable[ParameterSpec], value: Callable[[ParameterSpec], int]) -> int:
    return sum(value(p) for p in parameters)


def _casts(unit: UnitDescription, job: TrainingJob) -> bool:
    return any(job.precision.gathered_dtype(p) is not p.dtype for p in unit.parameters)


def _unsharded(parameters: Iterable[ParameterSpec], job: TrainingJob) -> int:
    return _total(parameters, lambda p: p.numel * job.precision.gathered_dtype(p).itemsize)


def _beside_gathered(unit: UnitDescription, choice: UnitLayout, job: TrainingJob) -> int:
    """What parameters that are cast or come from the host take beyond the gathered ones and the gather's buffer.

    Shards are cast and brought over all at once, before anything of their unit is gathered: never more than what is there then.
    What lies between two stages of a gather that runs ahead is there beside the parameters of the unit that backward met before; they
    are taken for as large as the unit's own. Replicas are, one after the other, brought to the device, cast there, and copied.
    """
    if (g := choice.shard_size) > 1:
        shards = _total(unit.parameters, lambda p: p.sharded_numel(g) * job.precision.gathered_dtype(p).itemsize)
        return g // choice.stage_size * shards if choice.stage_size > 1 else 0
    highest = done = 0
    for p in unit.parameters:
        whole, cast = p.numel * job.precision.gathered_dtype(p).itemsize, job.precision.gathered_dtype(p) is not p.dtype
        brought = p.numel * p.dtype.itemsize if choice.on_host else 0
        source = whole if cast else brought
        highest = max(highest, done + brought + (whole if cast else 0), done + source + whole)
        done += whole
    return highest - done


def _host_bytes(unit: UnitDescription, g: int, job: TrainingJob) -> int:
    """States of a unit on the host. Parameters and gradients are in page-locked memory, each in a power of two of bytes."""
    pinned = _total(unit.parameters, lambda p: (1 + p.requires_grad) * pinned_bytes(p.sharded_numel(g) * p.dtype.itemsize))
    trainable = [p.sharded_numel(g) * p.dtype.itemsize for p in unit.parameters if p.requires_grad]
    return pinned + job.optimizer.states * sum(trainable)


def pinned_bytes(nbytes: int) -> int:
    """What page-locked memory for so many bytes takes: torch rounds up to a power of two
    (`CachingHostAllocatorImpl::allocate` in ATen/core/CachingHostAllocator.h)."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def _step_scratch(trainable: Sequence[ParameterSpec], g: int, job: TrainingJob) -> int:
    sizes = [p.sharded_numel(g) * p.dtype.itemsize for p in trainable]
    match job.optimizer.step:
        case OptimizerStep.FUSED:
            return 0
        case OptimizerStep.FOREACH:
            return sum(sizes)
        case OptimizerStep.FOR_LOOP:
            return 2 * max(sizes, default=0)
    raise AssertionError(job.optimizer.step)
