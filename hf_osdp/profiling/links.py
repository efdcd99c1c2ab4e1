"""How long collectives take: α and β of `seconds = α + β * bytes`, measured in groups as FSDP2 forms them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..planner.hardware import Collective, CollectiveTiming
from ..planner.lines import fit_line
from .together import largest, rounds, synchronize, typical, wait_for_all

__all__ = ["fit_line", "measure_collectives"]

_SIZES_BYTES = {"cpu": (2**16, 2**19, 2**21, 2**23, 2**25), "cuda": (2**20, 2**23, 2**26, 2**28)}
"""Of the whole tensor: from where latency rules to where bandwidth does."""
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 25


def measure_collectives(
    device: torch.device, group_sizes: Sequence[int], seconds: float, *, local_world_size: int | None = None
) -> tuple[CollectiveTiming, ...]:
    """Time all-gather, reduce-scatter and all-reduce. Every rank must call this, with the same arguments.

    All groups of a size run at once, as they do in training. Shard groups (all-gather, reduce-scatter) are contiguous ranks;
    the groups that reduce replicas (all-reduce) of an r x s mesh are `world / r` ranks apart. Buffers are new for each call
    and their input has just been written, as FSDP2's are.

    Args:
        device: where the tensors are.
        group_sizes: sizes to measure, each a divisor of the world size above 1.
        seconds: about how long to measure, all together.
        local_world_size: ranks on each node; None takes all to be on one.

    Returns:
        Timings of the slowest rank, the same on every rank.
    """
    if not group_sizes:
        return ()
    local = local_world_size or dist.get_world_size()
    with _groups(group_sizes) as groups:
        tests = [_Test(collective, size, group) for (collective, size), group in groups.items()]
        _choose_sizes(tests, device, seconds)
        for _ in rounds(seconds, device, least=_LEAST_ROUNDS, most=_MOST_ROUNDS):
            for test in tests:
                for nbytes, taken in test.taken.items():
                    taken.append(test.timed(nbytes, device))
    return tuple(test.timing(device, local) for test in tests)


@dataclass(slots=True)
class _Test:
    """One collective in groups of one size; `taken` holds this rank's seconds by bytes of the whole tensor."""

    collective: Collective
    size: int
    group: dist.ProcessGroup | None
    taken: dict[int, list[float]] = field(default_factory=dict)

    def timed(self, nbytes: int, device: torch.device) -> float:
        """Seconds of one call on fresh buffers."""
        whole, part = self._buffers(nbytes, device)
        wait_for_all(device)
        start = time.perf_counter()
        self._run(whole, part)
        synchronize(device)
        return max(time.perf_counter() - start, 1e-9)

    def _buffers(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole tensor and this rank's part, with what is sent just written."""
        numel = self.numel(nbytes)
        whole = torch.empty(numel, device=device)
        match self.collective:
            case Collective.ALL_GATHER:
                part = whole.chunk(self.size)[dist.get_rank(self.group)]
                part.zero_()
                return whole, part
            case Collective.REDUCE_SCATTER:
                return whole.zero_(), torch.empty(numel // self.size, device=device)
            case Collective.ALL_REDUCE:
                return whole.zero_(), whole
        raise AssertionError(self.collective)

    def numel(self, nbytes: int) -> int:
        return -(-nbytes // 4 // self.size) * self.size

    def _run(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        # torch 2.13 deprecates the names that 2.11 has
        match self.collective:
            case Collective.ALL_GATHER:
                (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(whole, part, group=self.group)
            case Collective.REDUCE_SCATTER:
                (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(part, whole, group=self.group)
            case Collective.ALL_REDUCE:
                dist.all_reduce(whole, group=self.group)

    def timing(self, device: torch.device, local: int) -> CollectiveTiming:
        """The line through the slowest rank's typical time of each size."""
        seconds = largest([typical(taken) for taken in self.taken.values()], device)
        latency_s, seconds_per_byte = fit_line([(4 * self.numel(n), s) for n, s in zip(self.taken, seconds, strict=True)])
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
            if number > 1 and 5 * spent_s > budget_s:
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


@contextmanager
def _groups(group_sizes: Sequence[int]) -> Iterator[dict[tuple[Collective, int], dist.ProcessGroup | None]]:
    """This rank's group for each collective and size; None stands for the world's own."""
    found: dict[tuple[Collective, int], dist.ProcessGroup | None] = {}
    try:
        for size in group_sizes:
            for collective in Collective:
                found[collective, size] = None
                if size == dist.get_world_size():
                    continue
                members = _members(collective, size)
                groups = [dist.new_group(ranks) for ranks in members]
                found[collective, size] = next(g for g, ranks in zip(groups, members, strict=True) if dist.get_rank() in ranks)
        yield found
    finally:
        for group in found.values():
            if group is not None:
                dist.destroy_process_group(group)
