"""How times are taken: on the CPU and on CUDA, alone and on all ranks at once, where the slowest counts; of collectives, too."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..distributed.collectives import listening
from ..distributed.mesh import collective_device, find_topology, world_size
from ..planner.affine import linear_fit
from ..planner.hardware import Collective, CollectiveTiming

Moment = float | torch.cuda.Event
_MIN_CALLS, _MAX_CALLS = 3, 20
_OPERATORS = {
    "_allgather_base_": Collective.ALL_GATHER,
    "_reduce_scatter_base_": Collective.REDUCE_SCATTER,
    "allreduce_": Collective.ALL_REDUCE,
}
"""Names in the namespace `c10d` of what FSDP2 issues, equal in torch 2.11 and 2.13."""
_SMALLEST_BYTES = 1024
"""What is smaller is a loss or a gradient norm, not a unit."""
_Key = TypeVar("_Key", bound=Hashable)


def now(device: torch.device) -> Moment:
    """Return the time: the CPU's clock, or an event that is recorded on the current stream, which nothing waits for."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(began: Moment, ended: Moment) -> float:
    """Return the seconds between two moments of one device; on CUDA this waits for the later one."""
    if isinstance(began, float) or isinstance(ended, float):
        assert isinstance(began, float) and isinstance(ended, float), "both of one device"
        return ended - began
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def call_seconds(run: Callable[[], object], device: torch.device, seconds: float, *, waits: bool = True) -> list[float]:
    """Return the times of three to twenty calls in about so many seconds, after one that warms up.

    They include the device's work where it `waits`; else they end when the CPU has issued it.
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
    """Return when every rank is here and its device is idle."""
    synchronize(device)
    if dist.is_initialized():
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def over_ranks(values: Sequence[float], op: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX) -> list[float]:
    """Return the largest of each value over all ranks, or what `op` makes of it. Collective."""
    if world_size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=collective_device())
    dist.all_reduce(tensor, op=op)
    return tensor.tolist()


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the tenth at either end: medians of ranks that wait for each other sum up to less than a step takes."""
    trimmed = len(values) // 10
    return statistics.fmean(sorted(values)[trimmed : len(values) - trimmed])


def rounds(seconds: float, *, least: int, most: int, limit_s: float = float("inf")) -> Iterator[int]:
    """Count rounds until the time is up on some rank; every rank counts the same. Collective.

    Measuring one thing after the other in each round, and not each to its end, spreads what disturbs the machine over all.
    No round but the first is begun that would end after `limit_s`, not even one of the `least`.
    """
    began = time.perf_counter()
    for number in range(most):
        if number >= least or (number and limit_s < float("inf")):
            (elapsed_s,) = over_ranks([time.perf_counter() - began])
            if elapsed_s * (number + 1) / max(number, 1) > limit_s or (number >= least and elapsed_s >= seconds):
                return
        yield number


def cores_are_shared(device: torch.device) -> bool:
    """Return whether on some node ranks compute on the CPU with more threads than it has cores; the same on every rank. Collective."""
    crowded = device.type == "cpu" and find_topology().ranks_per_node * torch.get_num_threads() > usable_cores()
    return bool(over_ranks([crowded])[0])


def work_clock(device: torch.device) -> Callable[[], float]:
    """Return a clock for work of a few milliseconds on the CPU, which all ranks have at once. Collective.

    Where ranks share cores, such work seems to be alone, though every rank's has to be done before the next collective ends. There the
    clock tells the CPU's seconds of this process, times ranks over cores.
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
    """Of whole tensors (all shards together for all-gather and reduce-scatter), over all calls."""
    seconds: float
    """Over all calls; as a rank sees them, or without waiting for ranks that come late (`of_last_rank`)."""


class CollectiveClock(TorchDispatchMode):
    """Times all-gathers, reduce-scatters and all-reduces that are issued inside the context; several announced as one count as one.

    On the CPU each is waited for where it is issued, as FSDP2 does on gloo anyway. On CUDA events are recorded on the stream that waits
    for it, and nothing blocks. A profiler would take device memory there, of which a run near its limit has none.
    """

    leaves_compiled_code = True
    """Blocks that are compiled send nothing, and run without the clock: under a mode they would run as they are."""

    def __init__(self, device: torch.device) -> None:
        """Make a clock for tensors on a device. Collective where the topology is not known yet."""
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
        """Time a collective whose calls are issued, and waited for, inside the context."""
        call, began, self._is_announced = self._call(collective, group, nbytes), now(self._device), True
        try:
            yield
        finally:
            self._seen.append((call, began, now(self._device)))
            self._is_announced = False

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> object:  # noqa: ANN401
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # let it unfold into operators on local tensors, which come here again
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func.namespace != "c10d":
            return func(*args, **kwargs)
        if self._is_announced:
            # Gloo's pieces are waited for by who sent them: one after the other would never end.
            return func(*args, **kwargs) if self._device.type == "cpu" else _waited(func(*args, **kwargs))
        collective = _OPERATORS.get(func.overloadpacket.__name__)
        nbytes = max((leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)), default=0)
        if collective is None or nbytes < _SMALLEST_BYTES:
            return func(*args, **kwargs)
        group = dist.ProcessGroup.unbox(next(value for value in args if isinstance(value, torch.ScriptObject)))
        began = now(self._device)
        result = _waited(func(*args, **kwargs))
        self._seen.append((self._call(collective, group, nbytes), began, now(self._device)))
        return result

    def calls(self) -> tuple[CollectiveTotal, ...]:
        """Return what this rank saw, waiting for other ranks included. On CUDA this waits for the last of them."""
        found = (replace(call, seconds=seconds_between(began, ended)) for call, began, ended in self._seen)
        return tuple(call for call in found if call.group_size > 1)

    def _call(self, collective: Collective, group: dist.ProcessGroup, nbytes: int) -> CollectiveTotal:
        nodes = {rank // self._ranks_per_node for rank in dist.get_process_group_ranks(group)}
        return CollectiveTotal(collective=collective, group_size=group.size(), crosses_nodes=len(nodes) > 1, nbytes=nbytes, seconds=0.0)


def of_last_rank(calls: Sequence[CollectiveTotal]) -> tuple[CollectiveTotal, ...]:
    """Return the calls with the seconds of the rank that came to each one last: the collective without the waiting. Collective.

    They are empty where ranks saw different numbers of calls.
    """
    least, most = over_ranks([len(calls), -len(calls)], dist.ReduceOp.MIN)
    if least != -most or not calls:
        return ()
    seconds = over_ranks([call.seconds for call in calls], dist.ReduceOp.MIN)
    return tuple(replace(call, seconds=quickest) for call, quickest in zip(calls, seconds, strict=True))


def totals_of(calls: Sequence[CollectiveTotal], *, steps: int) -> tuple[CollectiveTotal, ...]:
    """Return the totals of one step, where `calls` has those of several."""
    groups = _grouped(calls, lambda call: (call.collective, call.group_size))
    return tuple(
        replace(
            members[0], calls=len(members) // steps, nbytes=sum(call.nbytes for call in members) // steps,
            seconds=sum(call.seconds for call in members) / steps,
        )
        for _, members in sorted(groups.items())
    )  # fmt: skip


def timings_of(calls: Sequence[CollectiveTotal]) -> tuple[CollectiveTiming, ...]:
    """Return lines through the median time of each size of message."""
    timings = []
    groups = _grouped(calls, lambda call: (call.collective, call.group_size, call.crosses_nodes))
    for (collective, size, crosses), members in sorted(groups.items()):
        by_bytes = _grouped(members, lambda call: call.nbytes)
        points = [(nbytes, statistics.median(max(call.seconds, 1e-9) for call in same)) for nbytes, same in by_bytes.items()]
        fit = dict(zip(("latency_s", "seconds_per_byte"), linear_fit(points), strict=True))
        timings.append(CollectiveTiming(collective=collective, group_size=size, crosses_nodes=crosses, **fit))
    return tuple(timings)


def _grouped(calls: Sequence[CollectiveTotal], key: Callable[[CollectiveTotal], _Key]) -> dict[_Key, list[CollectiveTotal]]:
    groups: dict[_Key, list[CollectiveTotal]] = defaultdict(list)
    for call in calls:
        groups[key(call)].append(call)
    return groups


def _waited(result: object) -> object:
    """Return a collective's result, once it is there (on CUDA: for the current stream).

    NCCL's work is null where it was not asked for one (torch 2.8 and later): `unbox` says so, where a call of its methods ends the process.
    """
    for boxed in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(boxed, torch.ScriptObject) and (work := dist.Work.unbox(boxed)) is not None:
            work.wait()
    return result
