"""How long each collective of a step takes, seen where torch dispatches it: the same on gloo and on NCCL."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..distributed.collectives import listening
from ..distributed.mesh import find_topology
from ..planner.affine import linear_fit
from ..planner.hardware import Collective, CollectiveTiming
from .timing import Moment, now, over_ranks, seconds_between

_OPERATORS = {
    "_allgather_base_": Collective.ALL_GATHER,
    "_reduce_scatter_base_": Collective.REDUCE_SCATTER,
    "allreduce_": Collective.ALL_REDUCE,
}
"""Names in the namespace `c10d` of what FSDP2 issues, equal in torch 2.11 and 2.13."""
_SMALLEST_BYTES = 1024
"""What is smaller is a loss or a gradient norm, not a unit."""
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One collective, once its group is complete."""

    collective: Collective
    group_size: int
    crosses_nodes: bool
    nbytes: int
    """Of the whole tensor: all shards together for all-gather and reduce-scatter."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTotal:
    """All calls of one collective in groups of one size, in one optimizer step."""

    collective: Collective
    group_size: int
    calls: int
    nbytes: int
    """Of whole tensors, over all calls."""
    seconds: float
    """Over all calls, without waiting for ranks that come late."""


class CollectiveClock(TorchDispatchMode):
    """Times all-gathers, reduce-scatters and all-reduces that are issued inside the context.

    Several calls that are announced as one collective (`distributed/collectives.py`) are timed as one. On the CPU each is waited for
    where it is issued, as FSDP2 does on gloo anyway. On CUDA events are recorded on the stream that waits for it, and nothing blocks.
    A profiler would tell the same, but on CUDA it takes device memory, of which a run near its limit has none.
    """

    leaves_compiled_code = True
    """Blocks that are compiled send nothing, and run without the clock: under a mode they would run as they are."""

    def __init__(self, device: torch.device) -> None:
        """Make a clock for tensors on a device. Collective where the topology is not known yet."""
        super().__init__()
        self._device = device
        self._ranks_per_node = find_topology().ranks_per_node
        self._seen: list[tuple[CollectiveCall, Moment, Moment]] = []
        self._announced: tuple[CollectiveCall, Moment] | None = None
        self._listening = ExitStack()

    def __enter__(self) -> CollectiveClock:
        self._listening.enter_context(listening(self))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._listening.close()

    def begins(self, collective: Collective, group: dist.ProcessGroup, nbytes: int) -> None:
        """Note that a collective of several calls begins."""
        self._announced = (self._call(collective, group, nbytes), now(self._device))

    def ends(self) -> None:
        """Note that all its calls were issued; each was waited for."""
        assert self._announced is not None, "it was told that it began"
        self._seen.append((*self._announced, now(self._device)))
        self._announced = None

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> object:  # noqa: ANN401
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # let it unfold into operators on local tensors, which come here again
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func.namespace != "c10d":
            return func(*args, **kwargs)
        if self._announced is not None:
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

    def calls(self) -> tuple[CollectiveCall, ...]:
        """Return what this rank saw, waiting for other ranks included. On CUDA this waits for the last of them."""
        found = (replace(call, seconds=seconds_between(began, ended)) for call, began, ended in self._seen)
        return tuple(call for call in found if call.group_size > 1)

    def _call(self, collective: Collective, group: dist.ProcessGroup, nbytes: int) -> CollectiveCall:
        """Describe a call whose seconds are not known yet."""
        nodes = {rank // self._ranks_per_node for rank in dist.get_process_group_ranks(group)}
        return CollectiveCall(collective=collective, group_size=group.size(), crosses_nodes=len(nodes) > 1, nbytes=nbytes, seconds=0.0)


def of_last_rank(calls: Sequence[CollectiveCall]) -> tuple[CollectiveCall, ...]:
    """Return the calls with the seconds of the rank that came to each one last: the collective without the waiting. Collective.

    Every rank issues the same ones in the same order, as one plan makes it do; empty where ranks saw different numbers of calls.
    """
    least, most = over_ranks([len(calls), -len(calls)], dist.ReduceOp.MIN)
    if least != -most or not calls:
        return ()
    seconds = over_ranks([call.seconds for call in calls], dist.ReduceOp.MIN)
    return tuple(replace(call, seconds=quickest) for call, quickest in zip(calls, seconds, strict=True))


def totals_of(calls: Sequence[CollectiveCall], *, steps: int) -> tuple[CollectiveTotal, ...]:
    """Return the totals of one step, where `calls` has those of several."""
    groups = _grouped(calls, lambda call: (call.collective, call.group_size))
    return tuple(
        CollectiveTotal(
            collective=collective,
            group_size=size,
            calls=len(members) // steps,
            nbytes=sum(call.nbytes for call in members) // steps,
            seconds=sum(call.seconds for call in members) / steps,
        )
        for (collective, size), members in sorted(groups.items())
    )


def timings_of(calls: Sequence[CollectiveCall]) -> tuple[CollectiveTiming, ...]:
    """Return lines through the median time of each size of message."""
    timings = []
    groups = _grouped(calls, lambda call: (call.collective, call.group_size, call.crosses_nodes))
    for (collective, size, crosses), members in sorted(groups.items()):
        by_bytes = _grouped(members, lambda call: call.nbytes)
        points = [(nbytes, statistics.median(max(call.seconds, 1e-9) for call in same)) for nbytes, same in by_bytes.items()]
        latency_s, per_byte_s = linear_fit(points)
        timings.append(
            CollectiveTiming(
                collective=collective, group_size=size, crosses_nodes=crosses, latency_s=latency_s, seconds_per_byte=per_byte_s
            )
        )  # fmt: skip
    return tuple(timings)


def _grouped(calls: Sequence[CollectiveCall], key: Callable[[CollectiveCall], _Key]) -> dict[_Key, list[CollectiveCall]]:
    groups: dict[_Key, list[CollectiveCall]] = defaultdict(list)
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
