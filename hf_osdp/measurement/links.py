"""Measure collectives: α and β of `seconds = α + β * bytes`, in the groups that FSDP2 forms."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from ..distributed.collectives import Stages, unit_collectives
from ..planner.affine import linear_fit
from ..planner.hardware import Collective, CollectiveTiming, DeviceSpec, Link
from ..planner.training_job import divisors
from .timing import barrier, over_ranks, rounds, synchronize, trimmed_mean

_SMALL_BYTES = 2**12
"""Bytes of the whole tensor in the first message, of which most is latency."""
_SIZES_BYTES = {"cpu": (2**16, 2**19, 2**21, 2**23, 2**25), "cuda": (2**20, 2**23, 2**26, 2**28)}
"""Bytes of the whole tensor: from sizes dominated by latency to sizes dominated by bandwidth."""
_MIN_SIZES = 3
"""Sizes that are timed even in a short measurement: the largest separates bandwidth from delays that a busy machine
adds to each call.
"""
_MIN_ROUNDS, _MAX_ROUNDS = 3, 25
_CALLS = 2 + _MIN_ROUNDS
"""Least calls of each size: two choose the sizes."""
_LIMIT_S, _LIMIT_FACTOR = 10.0, 4.0
"""The whole measurement takes at most this many seconds or, if longer, this many times the requested time; slow
links omit sizes.
"""


def group_sizes(world: int, local: int, *, every: bool = False) -> tuple[list[int], list[int]]:
    """Return the sizes of the groups to measure: of those that gather and scatter, and of those that reduce replicas.

    These are the world, a node of `local` ranks, and the ranks at one position in all nodes, from which links and
    other sizes follow (`planner/cost/collectives.py`); with `every` they are all divisors of the world. Each group
    needs a barrier of all ranks in the store and a communicator, so 250 groups of 128 ranks would delay each start.
    """
    shards, replicas = ([*divisors(world)],) * 2 if every else ([local, world], [world // local, world])
    return [size for size in sorted(set(shards)) if size > 1], [size for size in sorted(set(replicas)) if size > 1]


def measure_collectives(
    device: torch.device, seconds: float, *, local: int, every_size: bool = False
) -> tuple[CollectiveTiming, ...]:
    """Time all-gather, reduce-scatter and all-reduce, as FSDP2 issues them; return the slowest rank's timings.
    Collective.

    All groups of a size run at once, as they do in training. Shard groups (all-gather, reduce-scatter) are contiguous
    ranks; ranks of a group that reduces replicas (all-reduce) of an r x s mesh are `world / r` apart. Groups of
    several whole nodes are also timed in two stages. As in FSDP2, each call has new buffers, and its input has just
    been written.

    Args:
        device: where the tensors are.
        seconds: about how long to measure in total. Three sizes are always timed, unless that takes more than 10
            seconds and more than four times as long: on a slow link messages are small and few.
        local: ranks on each node.
        every_size: measure groups of every size, see `group_sizes`.
    """
    limit_s = max(_LIMIT_S, _LIMIT_FACTOR * seconds)
    began = time.perf_counter()
    with ExitStack() as stack:
        tests = _tests(*group_sizes(dist.get_world_size(), local, every=every_size), local, device, stack)
        left_s = limit_s
        for number, test in enumerate(tests):
            share_s = left_s / (len(tests) - number)
            left_s -= test.choose_sizes(device, target_s=seconds / len(tests) / _MIN_ROUNDS, limit_s=share_s)
        (spent_s,) = over_ranks([time.perf_counter() - began])
        for _ in rounds(seconds, least=_MIN_ROUNDS, most=_MAX_ROUNDS, limit_s=limit_s - spent_s):
            for test in tests:
                for nbytes, taken in test.taken.items():
                    taken.append(test.timed(nbytes, device))
    return tuple(test.timing(local) for test in tests)


@dataclass(slots=True)
class _CollectiveTest:
    collective: Collective
    size: int
    group: dist.ProcessGroup
    run: Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], object]
    """Issues the collective, given the whole tensor and this rank's part."""
    taken: dict[int, list[float]] = field(default_factory=dict)
    """This rank's seconds by bytes of the whole tensor."""

    def timed(self, nbytes: int, device: torch.device) -> float:
        """Return the seconds of one call on this rank. Collective."""
        whole, part = self._buffers(nbytes, device)
        barrier(device)
        start = time.perf_counter()
        self.run(whole, part, self.group)
        synchronize(device)
        return max(time.perf_counter() - start, 1e-9)

    def choose_sizes(self, device: torch.device, *, target_s: float, limit_s: float) -> float:
        """Warm up, omit messages that take too long, and return the seconds of this and of the least number of rounds.
        Collective.

        A round should take about `target_s`, all rounds at most `limit_s`; two sizes are always measured.
        """
        needed_s = spent_s = last_s = 0.0
        chosen: list[int] = []
        for nbytes in (_SMALL_BYTES, *_SIZES_BYTES[device.type]):
            if len(chosen) > 1 and needed_s + _CALLS * last_s * nbytes / chosen[-1] > limit_s:
                break
            if len(chosen) > _MIN_SIZES and 5 * spent_s > target_s:
                break  # the next takes about four times as long as the last
            warm_s, last_s = over_ranks([self.timed(nbytes, device), self.timed(nbytes, device)])
            needed_s += warm_s + (_CALLS - 1) * last_s
            spent_s += last_s
            chosen.append(nbytes)
        self.taken = {nbytes: [] for nbytes in (chosen[1:] if len(chosen) > _MIN_SIZES else chosen)}
        return needed_s

    def timing(self, local: int) -> CollectiveTiming:
        seconds = over_ranks([trimmed_mean(taken) for taken in self.taken.values()])
        latency_s, seconds_per_byte = linear_fit(
            [(4 * self._numel(n), s) for n, s in zip(self.taken, seconds, strict=True)]
        )
        return CollectiveTiming(
            collective=self.collective,
            group_size=self.size,
            latency_s=latency_s,
            seconds_per_byte=seconds_per_byte,
            crosses_nodes=any(
                ranks[0] // local != ranks[-1] // local for ranks in _members(self.collective, self.size)
            ),
        )

    def _buffers(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.empty(self._numel(nbytes), device=device)
        match self.collective:
            case Collective.ALL_GATHER | Collective.TWO_STAGE_ALL_GATHER:
                return whole, whole.chunk(self.size)[dist.get_rank(self.group)].zero_()
            case Collective.REDUCE_SCATTER | Collective.TWO_STAGE_REDUCE_SCATTER:
                return whole.zero_(), torch.empty(whole.numel() // self.size, device=device)
            case Collective.ALL_REDUCE:
                return whole.zero_(), whole
        raise AssertionError(self.collective)

    def _numel(self, nbytes: int) -> int:
        return -(-nbytes // 4 // self.size) * self.size


def _tests(
    shards: list[int], replicas: list[int], local: int, device: torch.device, stack: ExitStack
) -> list[_CollectiveTest]:
    """Make the tests, whose groups are destroyed when the stack closes; gathers and reductions of one size share a
    group. Collective.
    """
    formed: dict[str, dist.ProcessGroup] = {}

    def group_of(members: list[list[int]]) -> dist.ProcessGroup:
        if len(members) == 1:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        if (key := str(members)) not in formed:
            groups = [dist.new_group(ranks) for ranks in members]
            formed[key] = next(group for group, ranks in zip(groups, members, strict=True) if dist.get_rank() in ranks)
            stack.callback(dist.destroy_process_group, formed[key])
        return formed[key]

    def shard_tests(size: int, *, stages: Stages | None = None) -> list[_CollectiveTest]:
        group = group_of(_members(Collective.ALL_GATHER, size))
        gather, scatter = unit_collectives(group, device.type, stages)
        gathers = Collective.ALL_GATHER if stages is None else Collective.TWO_STAGE_ALL_GATHER
        scatters = Collective.REDUCE_SCATTER if stages is None else Collective.TWO_STAGE_REDUCE_SCATTER
        return [
            _CollectiveTest(gathers, size, group, gather),
            _CollectiveTest(
                scatters, size, group, lambda whole, part, own: scatter(part, whole, own, dist.ReduceOp.SUM)
            ),
        ]

    def reduce(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> object:
        return dist.all_reduce(whole, group=group)

    groups = {size: group_of(_members(Collective.ALL_REDUCE, size)) for size in replicas}
    tests = [_CollectiveTest(Collective.ALL_REDUCE, size, group, reduce) for size, group in groups.items()]
    for size in shards:
        tests += shard_tests(size)
        if 1 < local < size and size % local == 0:
            starts = range(0, dist.get_world_size(), size)
            between = [list(range(start + place, start + size, local)) for start in starts for place in range(local)]
            tests += shard_tests(
                size, stages=Stages(between=group_of(between), within=group_of(_members(Collective.ALL_GATHER, local)))
            )
    return tests


def _members(collective: Collective, size: int) -> list[list[int]]:
    world = dist.get_world_size()
    stride = world // size
    if collective is Collective.ALL_REDUCE:
        return [list(range(first, world, stride)) for first in range(stride)]
    return [list(range(first, first + size)) for first in range(0, world, size)]


def links_of(spec: DeviceSpec, timings: Sequence[CollectiveTiming], *, local: int, world: int) -> tuple[Link, Link]:
    """Return the links inside and between nodes that explain the measured all-gathers.

    A ring of g ranks, where one hop per node leaves the node, takes t = (g - 1) α + (g - 1) / g · bytes / bandwidth.
    """
    gathers = {timing.group_size: timing for timing in timings if timing.collective is Collective.ALL_GATHER}
    if not gathers:
        memory = Link(
            latency_s=0.0,
            bytes_per_s=spec.memory_bytes_per_s,
            source="one process: no link, the speed of memory",
            assumed=True,
        )
        return memory, memory
    within = [size for size in gathers if size <= local]
    inside = _ring_link(gathers[max(within)]) if within else None
    if world <= local and inside is not None:
        return inside, replace(inside, assumed=True)
    across = _ring_link(gathers[world], crossings=world // local, inside=inside)
    return inside or replace(across, assumed=True), across


def _ring_link(timing: CollectiveTiming, *, crossings: int | None = None, inside: Link | None = None) -> Link:
    """Return the link of a ring's hops: of all hops, or of the `crossings` that leave a node; `inside` is the link
    of the others.
    """
    hops = timing.group_size - 1
    measured_hops = hops if crossings is None else min(hops, crossings)
    others_s = 0.0 if inside is None else (hops - measured_hops) * inside.latency_s
    return Link(
        latency_s=max(0.0, timing.latency_s - others_s) / measured_hops,
        bytes_per_s=hops / timing.group_size / timing.seconds_per_byte,
        source=f"measured: all-gather over {timing.group_size} ranks",
    )
