"""How long collectives take: α and β of `seconds = α + β * bytes`, measured in groups as FSDP2 forms them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ..distributed.two_stage import Stages, flat_collectives, two_stage_collectives
from ..planner.affine import linear_fit
from ..planner.hardware import Collective, CollectiveTiming
from ..planner.job import divisors
from .synchronize import largest, rounds, synchronize, typical, wait_for_all

__all__ = ["linear_fit", "measure_collectives"]

_SIZES_BYTES = {"cpu": (2**16, 2**19, 2**21, 2**23, 2**25), "cuda": (2**20, 2**23, 2**26, 2**28)}
"""Of the whole tensor: from where latency rules to where bandwidth does."""
_LEAST_SIZES = 3
"""Sizes that are timed however long they take: the largest of them tells bandwidth from what a busy machine adds to each call."""
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 25
_MOST_FOR_ALL = 8
"""Ranks up to which every size is measured: 12 groups."""


def measure_collectives(
    device: torch.device, sizes: GroupSizes, seconds: float, *, local_world_size: int | None = None
) -> tuple[CollectiveTiming, ...]:
    """Time all-gather, reduce-scatter and all-reduce, as FSDP2 will issue them under a plan. Every rank must call this, with
    the same arguments.

    All groups of a size run at once, as they do in training. Shard groups (all-gather, reduce-scatter) are contiguous ranks;
    the groups that reduce replicas (all-reduce) of an r x s mesh are `world / r` ranks apart. Groups of several whole nodes are
    timed in two stages as well. Buffers are new for each call and their input has just been written, as FSDP2's are.

    Args:
        device: where the tensors are.
        sizes: of the groups to measure.
        seconds: about how long to measure, all together.
        local_world_size: ranks on each node; None takes all to be on one.

    Returns:
        Timings of the slowest rank, the same on every rank.
    """
    local = local_world_size or dist.get_world_size()
    with ExitStack() as stack:
        tests = [_Test(collective, size, call) for (collective, size), call in _calls(sizes, local, device, stack).items()]
        _choose_sizes(tests, device, seconds)
        for _ in rounds(seconds, device, least=_LEAST_ROUNDS, most=_MOST_ROUNDS):
            for test in tests:
                for nbytes, taken in test.taken.items():
                    taken.append(test.timed(nbytes, device))
    return tuple(test.timing(device, local) for test in tests)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSizes:
    """Sizes of groups, each a divisor of the world size above 1."""

    shards: tuple[int, ...]
    """Of groups that gather and scatter."""
    replicas: tuple[int, ...]
    """Of groups that reduce replicas."""


def few_sizes(world: int, local: int) -> GroupSizes:
    """The groups of which links and collectives in two stages consist: the world, a node, and ranks of one place in all nodes.

    Forming a group takes all ranks a barrier in the store and its own ranks a communicator, so that every divisor (250 groups of 128 ranks
    in nodes of 8) would hold up each start; up to 8 ranks there are few. Other sizes follow from the links (`planner/cost/collectives.py`).

    Args:
        world: number of ranks.
        local: ranks on each node.
    """
    if world <= _MOST_FOR_ALL:
        return all_sizes(world)
    return GroupSizes(shards=_above_one(local, world), replicas=_above_one(world // local, world))


def all_sizes(world: int) -> GroupSizes:
    """Every divisor of the world size."""
    sizes = _above_one(*divisors(world))
    return GroupSizes(shards=sizes, replicas=sizes)


def _above_one(*sizes: int) -> tuple[int, ...]:
    return tuple(sorted({size for size in sizes if size > 1}))


@dataclass(slots=True)
class _Test:
    """One collective in groups of one size; `taken` holds this rank's seconds by bytes of the whole tensor."""

    collective: Collective
    size: int
    call: _Call
    taken: dict[int, list[float]] = field(default_factory=dict)

    def timed(self, nbytes: int, device: torch.device) -> float:
        """Seconds of one call on fresh buffers."""
        whole, part = self._buffers(nbytes, device)
        wait_for_all(device)
        start = time.perf_counter()
        self.call.run(whole, part)
        synchronize(device)
        return max(time.perf_counter() - start, 1e-9)

    def _buffers(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole tensor and this rank's part, with what is sent just written."""
        numel = self.numel(nbytes)
        whole = torch.empty(numel, device=device)
        match self.collective:
            case Collective.ALL_GATHER | Collective.TWO_STAGE_ALL_GATHER:
                part = whole.chunk(self.size)[dist.get_rank(self.call.group)]
                part.zero_()
                return whole, part
            case Collective.REDUCE_SCATTER | Collective.TWO_STAGE_REDUCE_SCATTER:
                return whole.zero_(), torch.empty(numel // self.size, device=device)
            case Collective.ALL_REDUCE:
                return whole.zero_(), whole
        raise AssertionError(self.collective)

    def numel(self, nbytes: int) -> int:
        return -(-nbytes // 4 // self.size) * self.size

    def timing(self, device: torch.device, local: int) -> CollectiveTiming:
        """The line through the slowest rank's typical time of each size."""
        seconds = largest([typical(taken) for taken in self.taken.values()], device)
        latency_s, seconds_per_byte = linear_fit([(4 * self.numel(n), s) for n, s in zip(self.taken, seconds, strict=True)])
        return CollectiveTiming(
            collective=self.collective,
            group_size=self.size,
            latency_s=latency_s,
            seconds_per_byte=seconds_per_byte,
            crosses_nodes=any(len({rank // local for rank in ranks}) > 1 for ranks in _members(self.collective, self.size)),
        )


def _choose_sizes(tests: Sequence[_Test], device: torch.device, seconds: float) -> None:
    """Warm up, and leave out messages that take too long for the time given. Every rank decides the same."""
    budget_s = seconds / len(tests) / _LEAST_ROUNDS
    for test in tests:
        spent_s = 0.0
        for number, nbytes in enumerate(_SIZES_BYTES[device.type]):
            if number >= _LEAST_SIZES and 5 * spent_s > budget_s:
                break  # the next takes about four times as long as the last
            test.timed(nbytes, device)
            spent_s += largest([test.timed(nbytes, device)], device)[0]
            test.taken[nbytes] = []


def _members(collective: Collective, size: int) -> list[list[int]]:
    """Ranks of each group of this size."""
    world = dist.get_world_size()
    stride = world // size
    if collective is Collective.ALL_REDUCE:
        return [list(range(first, world, stride)) for first in range(stride)]
    return [list(range(first, first + size)) for first in range(0, world, size)]


@dataclass(frozen=True, slots=True)
class _Call:
    """One collective as it is issued: what runs, given the whole tensor and this rank's part, and its group."""

    group: dist.ProcessGroup
    run: Callable[[torch.Tensor, torch.Tensor], object]


def _calls(sizes: GroupSizes, local: int, device: torch.device, stack: ExitStack) -> dict[tuple[Collective, int], _Call]:
    """What is timed, in groups that are given back when the stack is left. Collective.

    Gathers and reductions of one size share a group, as they do in FSDP2, which has one for each axis of a mesh.
    """
    calls: dict[tuple[Collective, int], _Call] = {}
    formed: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def group_of(members: list[list[int]]) -> dist.ProcessGroup:
        key = tuple(tuple(ranks) for ranks in members)
        if len(members[0]) == dist.get_world_size():
            return dist.group.WORLD
        if key not in formed:
            groups = [dist.new_group(ranks) for ranks in members]
            formed[key] = next(group for group, ranks in zip(groups, members, strict=True) if dist.get_rank() in ranks)
            stack.callback(dist.destroy_process_group, formed[key])
        return formed[key]

    for size in sizes.replicas:
        replicas = group_of(_members(Collective.ALL_REDUCE, size))
        calls[Collective.ALL_REDUCE, size] = _Call(replicas, lambda whole, part, group=replicas: dist.all_reduce(whole, group=group))
    for size in sizes.shards:
        shards = group_of(_members(Collective.ALL_GATHER, size))
        gather, scatter = flat_collectives(shards, device.type)
        calls[Collective.ALL_GATHER, size] = _Call(shards, partial(_gather, gather, shards))
        calls[Collective.REDUCE_SCATTER, size] = _Call(shards, partial(_scatter, scatter, shards))
        if 1 < local < size and size % local == 0:
            stages = Stages(between=group_of(_places(size, local)), within=group_of(_members(Collective.ALL_GATHER, local)))
            gather, scatter = two_stage_collectives(stages, device.type)
            calls[Collective.TWO_STAGE_ALL_GATHER, size] = _Call(shards, partial(_gather, gather, shards))
            calls[Collective.TWO_STAGE_REDUCE_SCATTER, size] = _Call(shards, partial(_scatter, scatter, shards))
    return calls


def _gather(gather: AllGather, group: dist.ProcessGroup, whole: torch.Tensor, part: torch.Tensor) -> None:
    gather(whole, part, group)


def _scatter(scatter: ReduceScatter, group: dist.ProcessGroup, whole: torch.Tensor, part: torch.Tensor) -> None:
    scatter(part, whole, group, dist.ReduceOp.SUM)


def _places(size: int, local: int) -> list[list[int]]:
    """Ranks of the same place in the nodes of each group of `size` ranks."""
    starts = range(0, dist.get_world_size(), size)
    return [list(range(start + place, start + size, local)) for start in starts for place in range(local)]
