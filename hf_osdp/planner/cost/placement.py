"""Costs of where a unit's shards, states and saved activations are: bytes on the device and on the host, copies
between them, and the optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import HardwareError
from ..decision import UnitLayout
from ..description import ModelDescription, Segment, UnitDescription
from ..hardware import Hardware, HostSpec
from ..placement import Activations
from ..training_job import OptimizerSpec, OptimizerStep, TrainingJob


def shard_bytes(unit: UnitDescription, layout: UnitLayout, job: TrainingJob) -> dict[str, int]:
    """Return the terms of `UnitBytes` for a unit's shards and states that are not 0, without gradients on the device.

    On the host, tensors that are copied are in page-locked memory, each rounded up to a power of two.
    """
    g, trainable, optimizer = layout.shard_size, unit.trainable, job.optimizer
    shards, states = [p.sharded_bytes(g) for p in trainable], sum(optimizer.state_bytes(p, g) for p in trainable)
    if layout.on_host:
        pinned = sum((1 + p.requires_grad) * pinned_bytes(p.sharded_bytes(g)) for p in unit.parameters)
        return dict(host=pinned + states, host_moment=max(shards, default=0))
    parameters = sum(p.sharded_bytes(g) for p in unit.parameters)
    largest, foreach = max(shards, default=0), optimizer.step is OptimizerStep.FOREACH
    passing = max((optimizer.matrix_scratch(p, g) for p in trainable), default=0)
    if optimizer.step is OptimizerStep.FOR_LOOP:
        passing = max(passing, int(optimizer.loop_scratch * largest))
    if layout.states_on_host:
        passing = states + max(passing, largest if foreach else 0)
        host = sum(pinned_bytes(nbytes) for p in trainable for nbytes in optimizer.state_tensors(p, g))
        return dict(parameters=parameters, step_passing=passing, host=host)
    scratch = sum(shards) if foreach else 0
    return dict(parameters=parameters, optimizer=states, step_scratch=scratch, step_passing=passing)


def pinned_bytes(nbytes: int) -> int:
    """Return the bytes rounded up to a power of two, as torch allocates page-locked memory
    (`CachingHostAllocatorImpl::allocate`).
    """
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def shard_seconds(
    unit: UnitDescription, layout: UnitLayout, hardware: Hardware, job: TrainingJob
) -> tuple[float, float, float]:
    """Return the seconds of a unit's shards, without collectives: their copies to the device for each gather, those of
    gradients to the host after each reduction, and the optimizer step.
    """
    g, optimizer = layout.shard_size, job.optimizer
    shards = [p.sharded_bytes(g) for p in unit.trainable]
    if layout.on_host:
        host, clipped = host_of(hardware), 3 if job.clips_gradients else 0
        brought = sum(p.sharded_bytes(g) for p in unit.parameters) / host.to_device_bytes_per_s
        update = (optimizer.traffic_per_element() + clipped) * sum(shards) / host.update_bytes_per_s
        return brought, sum(shards) / host.to_host_bytes_per_s, update
    update = _update_seconds(shards, hardware, job)
    if layout.states_on_host:  # one unit's copy to the device overlaps another's copy to the host
        host = host_of(hardware)
        slower = min(host.to_device_bytes_per_s, host.to_host_bytes_per_s)
        update += sum(optimizer.state_bytes(p, g) for p in unit.trainable) / slower
    return 0.0, 0.0, update


def host_of(hardware: Hardware, option: str | None = None) -> HostSpec:
    """Return the host of the devices; HardwareError if it is not known, though the plan or an option needs it."""
    if hardware.host is None:
        asking = f"{option}=True" if option else "The plan puts states or activations on the host"
        otherwise = f", or leave {option} to the planner" if option else ""
        raise HardwareError(
            f"{asking}, but the host of {hardware.device.name} is not known; leave hardware out to have it measured,"
            f" or give a profile (hf-osdp profile) or Hardware(host=...){otherwise}."
        )
    return hardware.host


def _update_seconds(shards: Sequence[int], hardware: Hardware, job: TrainingJob) -> float:
    """Return the time of the device's optimizer step on a rank's shards, and of clipping, which reads each gradient
    twice and writes it once.
    """
    device, optimizer, tensors, nbytes = hardware.device, job.optimizer, len(shards), sum(shards)
    if hardware.fsdp_overhead is None or hardware.backend.overlaps:
        update = optimizer.traffic_per_element() * nbytes / device.memory_bytes_per_s
    else:
        share = optimizer.traffic_per_element() / OptimizerSpec().traffic_per_element()  # AdamW was measured
        update = share * hardware.fsdp_overhead.updates[optimizer.step](tensors, nbytes)
    dispatch = 0.0 if hardware.backend.overlaps else 2 * tensors * device.operator_s
    return update + (3 * nbytes / device.memory_bytes_per_s + dispatch if job.clips_gradients else 0.0)


def saved_bytes(costs: Segment, saved: int, samples: int, activations: Activations) -> tuple[int, int]:
    """Return where the `saved` bytes of a segment are between forward and backward: on the device, and on the host.

    They leave the device at the end of forward and return at the start of backward. `costs` are those under the choice
    of activations. A block's input is one tensor of page-locked memory, rounded up exactly to a power of two; the
    sizes of other saved tensors are unknown, so that their sum is doubled.
    """
    if not activations.offloads:
        return saved, 0
    sent = costs.sent_bytes.bytes(samples)
    rounded = pinned_bytes(sent) if activations == Activations.RECOMPUTE_OFFLOAD else 2 * sent
    return max(0, saved - costs.own_saved_bytes.bytes(samples)), rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTransfer:
    """Seconds of the copies of a unit's activations to the host and back, in one micro-step."""

    out: float = 0.0
    back_beside: float = 0.0
    """The copy back, if it can overlap backward."""
    back_before: float = 0.0
    """The copy back, if backward needs the activations at its start, so that nothing overlaps it."""
    traffic: float = 0.0
    """Time in which both copies use the device's memory bandwidth, which compute lacks."""


NO_TRANSFER = HostTransfer()


def host_transfers(
    description: ModelDescription, hardware: Hardware, samples: float, activations: Activations
) -> tuple[HostTransfer, ...]:
    """Return each unit's copies under its own choice of activations; HardwareError if they need a host that is not
    known.
    """
    transfers = [NO_TRANSFER] * len(description.units)
    for segment in description.segments if activations.offloads else ():
        host, nbytes = host_of(hardware), segment.under(activations.recomputation).sent_bytes.bytes(samples)
        back = nbytes / host.to_device_bytes_per_s
        transfers[segment.unit] = HostTransfer(
            out=nbytes / host.to_host_bytes_per_s,
            back_beside=0.0 if activations.recomputes else back,
            back_before=back if activations.recomputes else 0.0,
            traffic=2 * nbytes / hardware.device.memory_bytes_per_s,
        )
    return tuple(transfers)
