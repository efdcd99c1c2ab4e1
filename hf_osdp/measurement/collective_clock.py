"""How long each collective of a step takes, seen where torch dispatches it: the same on gloo and on NCCL."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..distributed.mesh import collective_device, world_size
from ..distributed.topology import find_topology
from ..distributed.two_stage import listening
from ..planner.hardware import Collective

_OPERATORS = {
    "_allgather_base_": Collective.ALL_GATHER,
    "_reduce_scatter_base_": Collective.REDUCE_SCATTER,
    "allreduce_": Collective.ALL_REDUCE,
}
"""Names in the namespace `c10d` of what FSDP2 issues, equal in torch 2.11 and 2.13."""
_SMALLEST_BYTES = 1024
"""What is smaller is a loss or a gradient norm, not a unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One collective, once its group is complete."""

    collective: Collective
    group_size: int
    crosses_nodes: bool
    nbytes: int
    """Of the whole tensor: all shards together for all-gather and reduce-scatter."""
    seconds: float


class CollectiveClock(TorchDispatchMode):
    """Times all-gathers, reduce-scatters and all-reduces that are issued inside the context.

    What is made of several calls and says so (`distributed/announce.py`) is one. On the CPU each is waited for where it is
    issued, as FSDP2 does on gloo anyway. On CUDA events are recorded on the stream that waits for it, and nothing blocks.
    A profiler would tell the same, but on CUDA it takes device memory, of which a run near its limit has none.

    Making the first one is collective where nobody has asked for the topology yet.

    Args:
        device: where the tensors lie.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._ranks_per_node = find_topology().ranks_per_node
        self._seen: list[tuple[Collective, tuple[int, bool], int, Any, Any]] = []
        self._announced: tuple[Collective, tuple[int, bool], int, Any] | None = None
        self._hearing: list[AbstractContextManager[None]] = []

    def __enter__(self) -> CollectiveClock:
        self._hearing.append(listening(self))
        self._hearing[-1].__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._hearing.pop().__exit__(*exception)

    def begins(self, collective: Collective, group: dist.ProcessGroup, nbytes: int) -> None:
        """A collective of several calls begins."""
        self._announced = (collective, self._place(group), nbytes, self._now())

    def ends(self) -> None:
        """All its calls were issued; each was waited for."""
        assert self._announced is not None, "it was told that it began"
        self._seen.append((*self._announced, self._now()))
        self._announced = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # let it unfold into operators on local tensors, which come here again
        kwargs = kwargs or {}
        known = isinstance(func, OpOverload) and func.namespace == "c10d"
        if self._announced is not None:
            # Gloo's pieces are waited for by who sent them: one after the other would never end.
            return func(*args, **kwargs) if not (known and self._on_cuda) else _waited(func(*args, **kwargs))
        collective = _OPERATORS.get(func.overloadpacket.__name__) if known else None
        nbytes = max((t.numel() * t.element_size() for t in _tensors(args)), default=0) if known else 0
        if collective is None or nbytes < _SMALLEST_BYTES:
            return func(*args, **kwargs)
        began = self._now()
        result = _waited(func(*args, **kwargs))
        self._seen.append((collective, self._place(_group(args)), nbytes, began, self._now()))
        return result

    def calls(self) -> tuple[CollectiveCall, ...]:
        """What this rank saw, waiting for other ranks included. On CUDA this waits for the last of them."""
        return tuple(
            CollectiveCall(
                collective=collective, group_size=size, crosses_nodes=crosses, nbytes=nbytes, seconds=self._seconds(began, ended)
            )
            for collective, (size, crosses), nbytes, began, ended in self._seen
            if size > 1
        )

    def _place(self, group: dist.ProcessGroup) -> tuple[int, bool]:
        """Ranks of a process group, and whether they lie on several nodes."""
        ranks = dist.get_process_group_ranks(group)
        return group.size(), len({rank // self._ranks_per_node for rank in ranks}) > 1

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, began: Any, ended: Any) -> float:
        if not self._on_cuda:
            return ended - began
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3


def of_last_rank(calls: Sequence[CollectiveCall]) -> tuple[CollectiveCall, ...]:
    """The calls with the seconds of the rank that came to each one last: what is left is the collective, not the waiting. Collective.

    Args:
        calls: this rank's; every rank issues the same ones in the same order, as one plan makes it do.

    Returns:
        The same on every rank; empty where ranks saw different numbers of calls.
    """
    if world_size() == 1:
        return tuple(calls)
    count = torch.tensor([len(calls), -len(calls)], dtype=torch.float64, device=collective_device())
    dist.all_reduce(count, op=dist.ReduceOp.MIN)
    least, most = count.tolist()
    if least != -most or not calls:
        return ()
    seconds = torch.tensor([call.seconds for call in calls], dtype=torch.float64, device=collective_device())
    dist.all_reduce(seconds, op=dist.ReduceOp.MIN)
    return tuple(replace(call, seconds=quickest) for call, quickest in zip(calls, seconds.tolist(), strict=True))


def _group(args: Sequence[Any]) -> dist.ProcessGroup:
    """The process group of a collective: the first script object among its arguments."""
    return dist.ProcessGroup.unbox(next(value for value in args if isinstance(value, torch.ScriptObject)))


def _waited(result: Any) -> Any:
    """A collective's result, once it is there (on CUDA: for the current stream).

    NCCL's work is null where it was not asked for one (torch 2.8 and later): `unbox` says so, where a call of its methods ends the process.
    """
    for boxed in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(boxed, torch.ScriptObject) and (work := dist.Work.unbox(boxed)) is not None:
            work.wait()
    return result


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
