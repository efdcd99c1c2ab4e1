"""How long each collective of a step takes, seen where torch dispatches it: the same on gloo and on NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..distributed.collectives import listening
from ..distributed.mesh import collective_device, find_topology, world_size
from ..planner.hardware import Collective
from .timing import Moment, now, seconds_between

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

    Several calls that are announced as one collective (`distributed/announce.py`) are timed as one. On the CPU each is waited for
    where it is issued, as FSDP2 does on gloo anyway. On CUDA events are recorded on the stream that waits for it, and nothing blocks.
    A profiler would tell the same, but on CUDA it takes device memory, of which a run near its limit has none.
    """

    def __init__(self, device: torch.device) -> None:
        """Make a clock for tensors on a device. Collective where the topology is not known yet."""
        super().__init__()
        self._device = device
        self._ranks_per_node = find_topology().ranks_per_node
        self._seen: list[tuple[CollectiveCall, Moment, Moment]] = []
        self._announced: tuple[CollectiveCall, Moment] | None = None
        self._listening: list[AbstractContextManager[None]] = []

    def __enter__(self) -> CollectiveClock:
        self._listening.append(listening(self))
        self._listening[-1].__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._listening.pop().__exit__(*exception)

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


def _waited(result: object) -> object:
    """Return a collective's result, once it is there (on CUDA: for the current stream).

    NCCL's work is null where it was not asked for one (torch 2.8 and later): `unbox` says so, where a call of its methods ends the process.
    """
    for boxed in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(boxed, torch.ScriptObject) and (work := dist.Work.unbox(boxed)) is not None:
            work.wait()
    return result
