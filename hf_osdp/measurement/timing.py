"""Measure times: on the CPU and on CUDA, of one rank or the slowest of all ranks, and of collectives."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ..distributed.collectives import listening
from ..distributed.mesh import collective_device, find_topology, world_size
from ..modeling.wrapping import SkippableMode
from ..planner.affine import linear_fit
from ..planner.hardware import Collective, CollectiveTiming

Moment = float | torch.cuda.Event
_MIN_CALLS, _MAX_CALLS = 3, 20
_OPERATORS = {
    "_allgather_base_": Collective.ALL_GATHER,
    "_reduce_scatter_base_": Collective.REDUCE_SCATTER,
    "allreduce_": Collective.ALL_REDUCE,
}
"""Names in the namespace `c10d` of the collectives that FSDP2 issues, equal in torch 2.11 and 2.13."""
_MIN_UNIT_BYTES = 1024
"""Smaller messages are losses or gradient norms, not units."""


def now(device: torch.device) -> Moment:
    """Return the time: the CPU's clock, or an event recorded on the current stream without waiting for it."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(began: Moment, ended: Moment) -> float:
    """Return the seconds between two moments of one device; on CUDA wait for the later one."""
    if isinstance(began, float) or isinstance(ended, float):
        assert isinstance(began, float) and isinstance(ended, float), "both of one device"
        return ended - began
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def call_seconds(
    run: Callable[[], object], device: torch.device, seconds: float, *, waits: bool = True
) -> list[float]:
    """Return the times of three to twenty calls, within about `seconds`, after one warm-up call.

    With `waits` they include the device's work; otherwise they end when the CPU has issued it.
    """
    taken: list[float] = []
    deadline = 0.0
    while len(taken) <= _MIN_CALLS or (len(taken) <= _MAX_CALLS and time.perf_counter() < deadline):
        synchronize(device)
        began = time.perf_counter()
        run()
        if waits:
            synchronize(device)
        taken.append(max(time.perf_counter() - began, 1e-9))
        deadline = deadline or time.perf_counter() + seconds
    return taken[1:]


def median_seconds(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    return statistics.median(call_seconds(run, device, seconds))


def barrier(device: torch.device) -> None:
    """Wait until every rank has reached this call and its device is idle."""
    synchronize(device)
    if dist.is_initialized():
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def over_ranks(values: Sequence[float], op: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX) -> list[float]:
    """Return each value's maximum over all ranks, or its reduction by `op`. Collective."""
    if world_size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=collective_device())
    dist.all_reduce(tensor, op=op)
    return tensor.tolist()


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the highest and lowest tenth.

    Medians of ranks that wait for each other would sum to less than a step.
    """
    trimmed = len(values) // 10
    return statistics.fmean(sorted(values)[trimmed : len(values) - trimmed])


def rounds(seconds: float, *, least: int, most: int, limit_s: float = float("inf")) -> Iterator[int]:
    """Count rounds until the time is up on some rank; every rank counts the same. Collective.

    Measuring every quantity in each round, instead of one after the other, spreads disturbances of the machine over
    all of them. After the first, no round begins that would end after `limit_s`, even if fewer than `least` rounds
    have run.
    """
    began = time.perf_counter()
    for number in range(most):
        if number >= least or (number and limit_s < float("inf")):
            (elapsed_s,) = over_ranks([time.perf_counter() - began])
            if elapsed_s * (number + 1) / max(number, 1) > limit_s or (number >= least and elapsed_s >= seconds):
                return
        yield number


def seconds_without_core() -> float:
    """Return how long this thread has been ready to run while other programs had the cores, since it began; 0 where
    the system does not count it.

    Linux does: the second field of `schedstat` (kernel documentation, scheduler/sched-stats).
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def cores_are_shared(device: torch.device) -> bool:
    """Return whether ranks on some node compute on the CPU with more threads than cores; the same on every rank.

    Collective.
    """
    oversubscribed = device.type == "cpu" and find_topology().ranks_per_node * torch.get_num_threads() > usable_cores()
    return bool(over_ranks([oversubscribed])[0])


def work_clock(device: torch.device) -> Callable[[], float]:
    """Return a clock for CPU work of a few milliseconds that all ranks do at once. Collective.

    If ranks share cores, a rank's short work may run undisturbed, but the next collective waits for the work of every
    rank. Then the clock returns the CPU seconds of this process, times ranks over cores.
    """
    if not cores_are_shared(device):
        return time.perf_counter
    share = find_topology().ranks_per_node / usable_cores()
    return lambda: share * time.process_time()


def usable_cores() -> int:
    """Return the cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTotal:
    """One call of a collective, or all calls in groups of one size in one optimizer step."""

    collective: Collective
    group_size: int
    crosses_nodes: bool
    calls: int = 1
    nbytes: int
    """Bytes of whole tensors (all shards together for all-gather and reduce-scatter), over all calls."""
    seconds: float
    """Seconds of all calls: as measured on a rank, or without waiting for late ranks (`of_last_rank`)."""


class CollectiveClock(SkippableMode):
    """Time all-gathers, reduce-scatters and all-reduces issued inside the context; several announced as one count as
    one.

    On the CPU each one is waited for when it is issued, as FSDP2 does with gloo anyway. On CUDA events are recorded on
    the waiting stream, and nothing blocks. A profiler would need device memory there, which a run near its limit does
    not have.
    """

    def __init__(self, device: torch.device) -> None:
        """Make a clock for tensors on a device. Collective if the topology is not known yet."""
        super().__init__()
        self._device = device
        self._ranks_per_node = find_topology().ranks_per_node
        self._seen: list[tuple[CollectiveTotal, Moment, Moment]] = []
        self._is_announced = False
        self._listening = ExitStack()

    def __enter__(self) -> CollectiveClock:
        self._listening.enter_context(listening(self._announced))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._listening.close()

    @contextmanager
    def _announced(self, collective: Collective, group: dist.ProcessGroup, nbytes: int) -> Iterator[None]:
        """Time a collective whose calls are issued and waited for inside the context."""
        call, began, self._is_announced = self._call(collective, group, nbytes), now(self._device), True
        try:
            yield
        finally:
            self._seen.append((call, began, now(self._device)))
            self._is_announced = False

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> object:  # noqa: ANN401
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # DTensor then calls operators on local tensors, which are timed here
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func.namespace != "c10d":
            return func(*args, **kwargs)
        if self._is_announced:
            return _wait_for(func(*args, **kwargs))
        collective = _OPERATORS.get(func.overloadpacket.__name__)
        nbytes = max((leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)), default=0)
        if collective is None or nbytes < _MIN_UNIT_BYTES:
            return func(*args, **kwargs)
        group = dist.ProcessGroup.unbox(next(value for value in args if isinstance(value, torch.ScriptObject)))
        began = now(self._device)
        result = _wait_for(func(*args, **kwargs))
        self._seen.append((self._call(collective, group, nbytes), began, now(self._device)))
        return result

    def calls(self) -> tuple[CollectiveTotal, ...]:
        """Return this rank's calls, including its waiting for other ranks. On CUDA wait for the last call."""
        found = (replace(call, seconds=seconds_between(began, ended)) for call, began, ended in self._seen)
        return tuple(call for call in found if call.group_size > 1)

    def _call(self, collective: Collective, group: dist.ProcessGroup, nbytes: int) -> CollectiveTotal:
        nodes = {rank // self._ranks_per_node for rank in dist.get_process_group_ranks(group)}
        return CollectiveTotal(
            collective=collective, group_size=group.size(), crosses_nodes=len(nodes) > 1, nbytes=nbytes, seconds=0.0
        )


def of_last_rank(calls: Sequence[CollectiveTotal]) -> tuple[CollectiveTotal, ...]:
    """Return the calls with the seconds of the rank that reached each one last, which are without waiting. Collective.

    Return no calls if the ranks recorded different numbers of calls.
    """
    least, most = over_ranks([len(calls), -len(calls)], dist.ReduceOp.MIN)
    if least != -most or not calls:
        return ()
    seconds = over_ranks([call.seconds for call in calls], dist.ReduceOp.MIN)
    return tuple(replace(call, seconds=quickest) for call, quickest in zip(calls, seconds, strict=True))


def totals_of(calls: Sequence[CollectiveTotal], *, steps: int) -> tuple[CollectiveTotal, ...]:
    """Return the totals of one step from the calls of several steps."""
    kind = attrgetter("collective", "group_size")
    groups = (list(members) for _, members in groupby(sorted(calls, key=kind), kind))
    return tuple(
        replace(
            members[0], calls=len(members) // steps, nbytes=sum(call.nbytes for call in members) // steps,
            seconds=sum(call.seconds for call in members) / steps,
        )
        for members in groups
    )  # fmt: skip


def timings_of(calls: Sequence[CollectiveTotal]) -> tuple[CollectiveTiming, ...]:
    """Fit lines through the median time of each message size."""
    timings = []
    kind, size = attrgetter("collective", "group_size", "crosses_nodes"), attrgetter("nbytes")
    for (collective, ranks, crosses), members in groupby(sorted(calls, key=kind), kind):
        points = [
            (nbytes, statistics.median(max(call.seconds, 1e-9) for call in same))
            for nbytes, same in groupby(sorted(members, key=size), size)
        ]
        fit = dict(zip(("latency_s", "seconds_per_byte"), linear_fit(points), strict=True))
        timings.append(CollectiveTiming(collective=collective, group_size=ranks, crosses_nodes=crosses, **fit))
    return tuple(timings)


def _wait_for(result: object) -> object:
    """Wait for a collective (on CUDA: on the current stream) and return its result.

    NCCL's work is null if none was requested (torch 2.8 and later): `unbox` then returns None, and a method call would
    end the process.
    """
    for boxed in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(boxed, torch.ScriptObject) and (work := dist.Work.unbox(boxed)) is not None:
            work.wait()
    return result
