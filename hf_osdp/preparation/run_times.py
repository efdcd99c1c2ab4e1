"""Time the blocks of the model that is about to run, in sizes that take a second or two and fit the memory limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

import torch
import torch.distributed as dist

from ..errors import ProfileError
from ..measurement.block_times import TimedModel
from ..measurement.machine import measuring_device
from ..measurement.timing import over_ranks
from ..planner.cost.timing import phase_affine
from ..planner.description import GatherSpan, ModelDescription, Segment
from ..planner.hardware import Hardware
from ..planner.profile import COPIES, BlockTimes, segment_kind
from ..quantities import format_bytes, format_seconds
from .cache import timed_once

_PASS_S, _MOST_PASS_S = 0.25, 5.0
"""Estimated seconds of a pass of the largest size, and the most for a single sample; about seven passes run."""


def times_of_run(
    description: ModelDescription, timed: TimedModel, hardware: Hardware, *, device_type: str, room_bytes: int
) -> BlockTimes:
    """Return the times of the model's segments, measured now or on an earlier start. Collective.

    `description` is of the whole model, and `timed` has the micro-batches that a plan may run. The copy that is timed
    takes at most `room_bytes`. Raise ProfileError, on every rank, if it cannot be timed.
    """
    device = measuring_device(device_type)
    room_bytes = min(room_bytes, _free_bytes(device))
    sizes = _sizes(description, hardware, max(timed.micro_batch_sizes), room_bytes)
    segments, when = timed_once(description, replace(timed, micro_batch_sizes=sizes), device=device)
    shown = " and ".join(", ".join(map(str, sizes)).rsplit(", ", 1))
    return BlockTimes.of(segments, description, hardware, f"measured{when} ({shown} samples at once)")


def _free_bytes(device: torch.device) -> int:
    """Return the least free memory of a rank's GPU; on the CPU the limit alone counts. Collective."""
    if device.type == "cpu":
        return 2**60
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(over_ranks([torch.cuda.mem_get_info(device)[0] + unused], dist.ReduceOp.MIN)[0])


def _sizes(description: ModelDescription, hardware: Hardware, largest: int, room_bytes: int) -> tuple[int, ...]:
    """Return one sample, the most samples whose passes are short and fit, and half of them; raise ProfileError if
    one sample takes too long or does not fit.
    """
    part = _timed_part(description)
    candidates = sorted({*(2**power for power in range(largest.bit_length()) if 2**power <= largest), largest})

    def pass_s(samples: int) -> float:
        phases = (phase for segment in part for phase in (segment.forward, segment.backward))
        return sum(phase_affine(phase, description, hardware)(samples) for phase in phases)

    if (needed := _needed_bytes(description, part, 1)) > room_bytes:
        room = format_bytes(room_bytes)
        raise ProfileError(f"{COPIES} blocks need {format_bytes(needed)} of {room} with one sample.")
    if pass_s(1) > _MOST_PASS_S:
        raise ProfileError(f"{COPIES} blocks take about {format_seconds(pass_s(1))} with one sample.")
    good = [n for n in candidates if pass_s(n) <= _PASS_S and _needed_bytes(description, part, n) <= room_bytes] or [1]
    return tuple(sorted({1, max(1, good[-1] // 2), good[-1]}))


def _timed_part(description: ModelDescription) -> list[Segment]:
    """Return the segments of a pass with a few blocks of each kind."""
    seen: Counter[Hashable] = Counter()
    part = []
    for segment in description.segments:
        kind = segment_kind(description, segment)
        seen[kind] += 1
        if seen[kind] <= COPIES:
            part.append(segment)
    return part


def _needed_bytes(description: ModelDescription, part: list[Segment], samples: int) -> int:
    """Return about the peak of a pass: parameters, the root's gradients, saved activations, the largest segment."""
    item = description.compute_dtype.itemsize

    def nbytes(index: int) -> int:
        return sum(p.numel * max(item, p.dtype.itemsize * p.keeps_dtype) for p in description.units[index].parameters)

    units = {segment.unit for segment in part} | {0}
    whole = [index for index in units if description.units[index].span is not GatherSpan.USE]
    saved = sum(segment.saved_bytes.bytes(samples) for segment in part)
    peaks = (max(s.forward.peak_bytes.bytes(samples), s.backward.peak_bytes.bytes(samples)) for s in part)
    held = description.buffer_bytes + description.input_bytes.bytes(samples)
    return sum(map(nbytes, units)) + sum(map(nbytes, whole)) + saved + max(peaks, default=0) + held
