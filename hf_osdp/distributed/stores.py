"""What ranks write down for each other in torch's store, before or beside any collective."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import LaunchError
from .rank_reports import ended_line, late_line

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.2
"""Between two looks into the store: short while ranks come together, then rare enough for a thousand ranks."""
_CONFER_S = 1800.0
"""How long ranks wait for each other, as long as torch's own collectives do by default."""

_start: str | None = None


def wait_for(store: dist.Store, keys: Sequence[str], seconds: float, *, ended: Callable[[], None] | None = None) -> bool:
    """Whether all keys are there within the time. (The store's own `wait` prints a warning each time that it is over.)

    Args:
        store: where to look.
        keys: what to look for.
        seconds: how long.
        ended: raises where a rank that is waited for has ended.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE_S
    while keys and not store.check(list(keys)):
        if ended is not None:
            ended()
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE_S)
    return True


def ended_peers() -> Callable[[], None] | None:
    """Raises where a rank has ended, once all ranks have called this: gloo ends a collective that waits for it. None without gloo."""
    if "gloo" not in str(dist.get_backend_config()):
        return None
    work = dist.all_reduce(torch.zeros(1), async_op=True)

    def ended() -> None:
        if work.is_completed():
            try:
                work.wait()
            except RuntimeError as error:
                raise LaunchError(ended_line(reason=str(error))) from None

    return ended


def are_several() -> bool:
    """Whether there is a process group of several real ranks."""
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"


def keeps_store() -> bool:
    """Whether torchrun hosts the store: over its restarts it keeps one, and what stands in it (pytorch issue 135712)."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def set_start(name: str) -> None:
    """Name this start of the ranks, the same on all and another after a restart."""
    global _start
    _start = name


def _start_name() -> str:
    if _start is None:
        names = [uuid.uuid4().hex if keeps_store() else ""]
        if keeps_store():
            try:
                dist.broadcast_object_list(names, src=0)
            except RuntimeError as error:  # as gloo ends a collective that waits for a rank which has ended
                raise LaunchError(ended_line(reason=str(error))) from None
        set_start(names[0])
    return _start or ""


def start_space(name: str) -> dist.Store:
    """A part of the process group's store that no earlier start of the ranks wrote into; a collective where `call_space` is one."""
    return dist.PrefixStore(f"hf_osdp/{name}/{_start_name()}", dist.distributed_c10d._get_default_store())


def call_space() -> dist.Store:
    """An empty part of the process group's store, the same on every rank that calls this as often. It needs no collective, but for the
    first one where torchrun hosts the store and the group was not formed in `roll_call`."""
    calls = start_space("calls")
    number = calls.add(f"of_rank/{dist.get_rank()}", 1)
    return dist.PrefixStore(str(number), calls)


def confer(space: dist.Store, mine: object, judge: Callable[[list[Any]], str | None]) -> str | None:
    """Rank 0 hears all ranks and decides. Collective, but by the store: it works also where ranks use different devices.

    Args:
        space: from `call_space`.
        mine: what this rank says; JSON.
        judge: from what all ranks say, in rank order, to what is wrong; called on rank 0.

    Returns:
        What is wrong, the same on every rank; None if nothing is.

    Raises:
        LaunchError: ranks did not come.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    said = [f"said/{other}" for other in range(size)]
    space.set(said[rank], json.dumps(mine))
    ended = ended_peers()
    if rank == 0:
        if not wait_for(space, said, _CONFER_S, ended=ended):
            missing = [other for other in range(size) if not space.check([said[other]])]
            raise LaunchError(late_line(missing, waited_s=_CONFER_S))
        space.set("outcome", json.dumps(judge([json.loads(text) for text in space.multi_get(said)])))
    elif not wait_for(space, ["outcome"], _CONFER_S, ended=ended):
        raise LaunchError(late_line([0], waited_s=_CONFER_S))
    return json.loads(space.get("outcome"))
