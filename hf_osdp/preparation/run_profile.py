"""The profile of a run: its machine and the times of its blocks, measured at the start, or on a recent earlier start,
from the cache.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from ..distributed.consensus import on_rank_zero
from ..distributed.launcher import is_on
from ..distributed.mesh import find_topology, world_size
from ..distributed.process_group import all_gather_objects
from ..errors import ProfileError
from ..measurement.block_times import TimedModel, measure_block_times
from ..measurement.machine import device_name, measure_hardware, measuring_device, with_memory_of_now
from ..measurement.timing import over_ranks, seconds_without_core, usable_cores
from ..planner.cost.timing import phase_affine
from ..planner.description import GatherSpan, ModelDescription, Segment
from ..planner.files import plain
from ..planner.hardware import Hardware
from ..planner.presets import preset
from ..planner.profile import BlockTimes, Profile, segment_kind
from ..quantities import format_bytes, format_seconds
from .cache import cache_folder, code_hash, implementations, read, write

MEASURED_EARLIER = "measured earlier"
"""Prefix of the source of hardware that was read from the cache."""
MACHINE_S, BLOCKS_S = 0.7, 0.3
"""Short, so that a run with a plan starts at most five seconds later than one without; `hf-osdp profile` measures
more accurately.
"""
_MAX_AGE_S = 24 * 3600
"""A machine's speed changes over time."""
_MAX_AGE_ON_CPU_S = 600
"""Of times of blocks on the CPU, whose cores others share and slow down for minutes: estimates with times of 24 to 55
minutes were 0.48 to 0.86 of measured steps of README's demo in 15 runs, with new ones 0.69 to 1.04 in 9.
"""
_BUSY = 0.1
"""Share of a measurement's time without a core, above which other programs have disturbed it."""
_PASS_S, _MOST_PASS_S = 0.25, 5.0
"""Estimated seconds of a pass of the largest size, and the most for a single sample; about four passes run."""


def hardware_of_run(requested: Hardware | str | None, *, device_type: str, nodes: int | None = None) -> Hardware:
    """Return the hardware to plan a run for, with as many devices as ranks. Collective if torch.distributed is
    initialized.

    It is the requested hardware, such as a profile's; the preset of this name, on the launcher's nodes or `nodes`; or
    for None this machine, as measured.
    """
    ranks, topology = world_size(), find_topology()
    if isinstance(requested, Hardware):
        if requested.world_size != ranks:
            raise ValueError(
                f"The hardware has {requested.world_size} devices, but {ranks} processes are running;"
                f" start {requested.world_size} processes, or describe {ranks} devices."
            )
        if requested.nodes != (nodes or topology.nodes):
            raise ValueError(
                f"The hardware has {requested.nodes} x {requested.devices_per_node} devices (nodes x devices), but the"
                " processes are on"
                f" {topology.nodes} x {topology.ranks_per_node}; describe or profile these, or leave hardware out."
            )
        return requested
    if requested is None:
        if nodes not in (None, topology.nodes):
            raise ValueError(f"nodes={nodes}, but the processes are spread over {topology.nodes}; leave nodes out.")
        return measured_hardware(device_type)
    nodes = nodes or topology.nodes
    if ranks % nodes:
        raise ValueError(f"nodes={nodes} does not divide the {ranks} processes; use a divisor.")
    return preset(requested, nodes=nodes, devices_per_node=ranks // nodes)


def measured_hardware(device_type: str) -> Hardware:
    """Measure the machine, or return what was measured before, with the current sizes of memory. Collective."""
    device = measuring_device(device_type)
    profile, ago = _once(
        None,
        device,
        lambda: Profile(hardware=measure_hardware(device_type=device_type, seconds=MACHINE_S)),
        _MAX_AGE_S,
    )
    if not ago:
        return profile.hardware
    hardware = with_memory_of_now(profile.hardware, device)
    source = f"{MEASURED_EARLIER}, {ago} ago; OSDP_CACHE=0 measures it anew"
    return replace(hardware, device=replace(hardware.device, source=source))


def times_of_run(
    description: ModelDescription, timed: TimedModel, hardware: Hardware, *, device_type: str, room_bytes: int
) -> BlockTimes:
    """Return the times of the model's segments, measured now or on an earlier start of an equal model. Collective.

    `description` is of the whole model, and `timed` has the micro-batches that a plan may run. The copy that is timed
    takes at most `room_bytes`. Raise ProfileError, on every rank, if it cannot be timed.
    """
    device = measuring_device(device_type)
    sizes = _sizes(description, hardware, max(timed.micro_batch_sizes), min(room_bytes, _free_bytes(device)))
    sizes = sizes[-2:] if timed.compile else sizes  # each size is compiled
    timed = replace(timed, micro_batch_sizes=sizes)

    def measure() -> Profile:
        segments = measure_block_times(timed, device=device, seconds=BLOCKS_S, description=description)
        return Profile(hardware=hardware, segments=segments)

    options = (
        sizes, timed.compile, timed.autocast, timed.activation_checkpointing, implementations(timed.model_or_config),
        torch.get_float32_matmul_precision(), is_on("TORCHDYNAMO_DISABLE"), is_on("TORCH_COMPILE_DISABLE"),
    )  # fmt: skip
    # numbers of a new description and of one on disk print alike
    content = (json.dumps(json.loads(json.dumps(plain(description)), parse_int=float)), options)
    profile, ago = _once(content, device, measure, _MAX_AGE_ON_CPU_S if device.type == "cpu" else _MAX_AGE_S)
    shown = " and ".join(", ".join(map(str, sizes)).rsplit(", ", 1))
    when = f"measured {ago} ago" if ago else "measured"
    return BlockTimes.of(profile.segments, description, hardware, f"{when} ({shown} samples at once)")


def _once(
    content: object, device: torch.device, measure: Callable[[], Profile], max_age_s: float
) -> tuple[Profile, str]:
    """Return what `measure` returns, or returned for the same content on the same machine at most `max_age_s` ago, and
    how long ago that was, if it was before. Collective.

    Rank 0 has the file. A measurement during which a rank waited for cores that other programs had is not kept.
    """
    ranks = all_gather_objects((platform.node(), device_name(device), usable_cores()))
    name = hashlib.sha256(repr((code_hash(), content, find_topology(), ranks)).encode()).hexdigest()[:32]
    folder = cache_folder()
    path = None if folder is None else folder / "machines" / f"{name}.json"
    kept = on_rank_zero(lambda: None if path is None else _read_recent(path, max_age_s))
    if kept is None:
        began_s, waited_s = time.perf_counter(), seconds_without_core()
        profile = measure()
        (share,) = over_ranks([(seconds_without_core() - waited_s) / (time.perf_counter() - began_s)])
        on_rank_zero(lambda: None if share > _BUSY or path is None else write(path, profile))
        return profile, ""
    text, age_s = kept
    return Profile.from_json(text), f"{age_s / 3600:.0f} h" if age_s >= 5400 else f"{age_s / 60:.0f} min"


def _read_recent(path: Path, max_age_s: float) -> tuple[str, float] | None:
    """Return a profile, as JSON, and its age in seconds; None if it is missing, damaged or too old."""
    with suppress(OSError, ValueError, ProfileError):
        if 0 <= (age_s := time.time() - path.stat().st_mtime) < max_age_s:
            return Profile.from_json(json.dumps(read(path))).to_json(), age_s
    return None


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
    part = list({segment_kind(description, segment): segment for segment in description.segments}.values())

    def pass_s(samples: int) -> float:
        phases = (phase for segment in part for phase in (segment.forward, segment.backward))
        return sum(phase_affine(phase, description, hardware)(samples) for phase in phases)

    if (needed := _needed_bytes(description, part, 1)) > room_bytes:
        room = format_bytes(room_bytes)
        raise ProfileError(f"One block of each kind needs {format_bytes(needed)} of {room} with one sample.")
    if pass_s(1) > _MOST_PASS_S:
        raise ProfileError(f"One block of each kind takes about {format_seconds(pass_s(1))} with one sample.")
    candidates = sorted({*(2**power for power in range(largest.bit_length())), largest})
    good = [n for n in candidates if pass_s(n) <= _PASS_S and _needed_bytes(description, part, n) <= room_bytes] or [1]
    return tuple(sorted({1, max(1, good[-1] // 2), good[-1]}))


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
