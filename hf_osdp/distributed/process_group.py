"""The process group: preparation for it, a group for long waits, and calls that every rank must make."""

from __future__ import annotations

import atexit
import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import groupby
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from ..errors import LaunchError, OSDPError, one_line
from .device import prefer_expandable_segments
from .launcher import is_torchruns_store, launched_rank, launched_world_size, most_restarts, number, variable

T = TypeVar("T")
ALL_CALL_S = 3600.0
"""How long `require_all` waits at most: longer than a rank may log or write beforehand."""
_POLL_S = 0.05
_START_S = 300.0
"""How long ranks of one launch wait for each other; torchrun has started all of them."""
_NAME_S = 20.0
"""How long the name of rank 0's machine may take to be known: a cluster may start machines one after the other."""
_GLOO_ENDS_S = 0.1
_ANSWER_S = 3.0
"""How long ranks that wait for one another may take to say so; where one has ended, the launcher ends the others."""
_KEY = "hf_osdp/start"
_log = logging.getLogger(__name__)

_gloo_groups: WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = WeakKeyDictionary()
"""By their purpose, for each default group."""
_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""How often all ranks have called `require_all`."""


def prepare_group() -> None:
    """Prepare for the process group of `env://`: CUDA's allocator, and torchrun's store. Collective, unless the group
    has formed.

    torchrun keeps its store over restarts (pytorch issue 135712): gloo would find addresses of processes that have
    ended. Rank 0 deletes them once all ranks of this start are here, before any of them can form the group.
    """
    prefer_expandable_segments()  # before the process group, which initialises CUDA
    rank, ranks = launched_rank(), launched_world_size()
    if ranks > 1:
        _let_gloo_end()
    if ranks > 1 and not dist.is_initialized():
        _check_address(variable("MASTER_ADDR"), number("MASTER_PORT", 1))
    if ranks == 1 or not is_torchruns_store():
        return
    if not dist.is_initialized():
        _meet(variable("MASTER_ADDR"), number("MASTER_PORT"), rank, ranks)
    elif rank == 0 and most_restarts() and not _meet.cache_info().currsize:  # the script formed the group
        _log.warning(
            "A restart may hang, since torchrun keeps its store: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for"
            " torchrun."
        )


@cache
def _let_gloo_end() -> None:
    """Let gloo's threads free the tensors of their last work before the interpreter ends.

    They need the interpreter for it, and abort the process where it is gone: 4 of 50 processes did that which ended
    after an all-gather, none of 50 with this wait (torch 2.13.0, two loaded cores).
    """
    atexit.register(time.sleep, _GLOO_ENDS_S)


def _check_address(address: str, port: int) -> None:
    """Refuse an address that nobody can have: torch would look for it for minutes."""
    if not 0 < port < 2**16:
        raise ValueError(f"MASTER_PORT={port} must be from 1 to {2**16 - 1}; let the launcher set it.")

    def is_known() -> bool:
        with suppress(socket.gaierror):
            return bool(socket.getaddrinfo(address, port))
        return False

    poll(is_known, _NAME_S if address else 0.0)
    if address and not is_known():
        raise LaunchError(
            f"MASTER_ADDR={address!r} is not known on {socket.gethostname()}; give the name or the IP address of rank"
            " 0's machine."
        )


@cache
def _meet(address: str, port: int, rank: int, ranks: int) -> None:
    """Meet all ranks of this start in torchrun's store, once in each process."""
    try:
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_START_S))
        _forget_earlier_start(store, ranks) if rank == 0 else _meet_rank_zero(store, rank)
    except RuntimeError as error:
        raise LaunchError(
            f"Rank {rank} did not meet the other ranks of this start at {address}:{port}; look at their output"
            f" ({one_line(error)[:200]})."
        ) from error


def _forget_earlier_start(store: Store, ranks: int) -> None:
    """Wait on rank 0 for the others, each of which tells a token, and delete the addresses of earlier starts.

    Keys begin with a new token of rank 0, and the answer has those of all, so that no rank takes the answer of an
    earlier start for its own.
    """
    token = uuid.uuid4().hex
    space = PrefixStore(f"{_KEY}/{token}", store)
    store.set(_KEY, token)
    tokens = " ".join(space.get(str(rank)).decode() for rank in range(1, ranks))
    for key in filter(lambda key: key.startswith("default_pg/"), store.list_keys()):
        store.delete_key(key)
    space.set("met", tokens)


def _meet_rank_zero(store: Store, rank: int) -> None:
    """Tell rank 0's latest start a token, until its answer has it."""
    token, seen, until = uuid.uuid4().hex, "", time.monotonic() + _START_S
    while time.monotonic() < until:
        space = PrefixStore(f"{_KEY}/{seen}", store)
        if seen and space.check(["met"]) and token in space.get("met").decode():
            return
        if (latest := store.get(_KEY).decode()) != seen:
            seen = latest
            store.set(f"{_KEY}/{seen}/{rank}", token)
        time.sleep(_POLL_S / 5)
    raise LaunchError(f"Rank {rank} waited {_START_S:g} s for rank 0 of this start; look at rank 0's output.")


def differences(values_of_rank: Mapping[int, Mapping[str, str]]) -> str | None:
    """Return which ranks have which value, for each name whose values differ; None if there is none.

    An empty value matches any other.
    """
    parts = []
    for name in dict.fromkeys(name for one in values_of_rank.values() for name in one):
        ranks_of_value: dict[str, list[int]] = {}
        for rank, one in values_of_rank.items():
            if value := one.get(name, "not known"):
                ranks_of_value.setdefault(value, []).append(rank)
        if len(ranks_of_value) > 1:
            listed = [f"{value} on {ranks_text(ranks)}" for value, ranks in ranks_of_value.items()]
            parts.append(f"{name} is {', '.join(listed)}")
    return "; ".join(parts) or None


def are_several_ranks() -> bool:
    """Return whether there is a process group of several real ranks, not of torch's `fake` backend."""
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"


def gloo_group(purpose: str = "objects") -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks with the default group's timeout; None if there is no other real rank.

    Collective the first time; the group is formed once for each process group and purpose.
    """
    world = dist.group.WORLD
    if world is None or not are_several_ranks():
        return None
    groups = _gloo_groups.setdefault(world, {})
    if purpose not in groups:
        if purpose != "objects":
            host_barrier()
        try:
            groups[purpose] = dist.new_group(backend="gloo", timeout=own_timeout())
        except RuntimeError as error:
            reason = one_line(str(error).split("Exception raised from")[0])[:160].rstrip(". ")  # without the C++ stack
            raise LaunchError(
                f"Rank {dist.get_rank()} on {socket.gethostname()} cannot connect to other ranks over gloo"
                f" ({reason}). Set GLOO_SOCKET_IFNAME (now {variable('GLOO_SOCKET_IFNAME', 'not set')}) on each"
                " machine to the interface that faces the others, as `ip -br addr` lists them."
            ) from error
    return groups[purpose]


def step_group() -> dist.ProcessGroup | None:
    """Return a group as `gloo_group`, for what ranks agree on in every step: a rank that saves, while another trains,
    then waits instead of taking its answer.
    """
    return gloo_group("steps")


def own_timeout() -> timedelta:
    """Return the default group's timeout, for which there is no public call; torch's default if it does not say
    (torch 2.11 to 2.13).
    """
    world = dist.distributed_c10d._get_default_group()
    device = torch.device("cuda" if "nccl" in dist.get_backend_config() else "cpu")
    timeout: timedelta = getattr(getattr(world._get_backend(device), "options", None), "_timeout", default_pg_timeout)
    return timeout


def all_gather_objects(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's object, in rank order, over `gloo_group` or another group of all ranks. Collective."""
    values = [mine] * (dist.get_world_size() if dist.is_initialized() else 1)
    if (group := group or gloo_group()) is not None:
        dist.all_gather_object(values, mine, group=group)
    return values


def host_barrier() -> None:
    """Wait until every rank is here; raise within milliseconds if one has died.

    Called before a group is formed: that waits for a dead rank as long as the store does, minutes.
    """
    if (group := gloo_group()) is not None:
        dist.barrier(group=group)


def store_of(purpose: str) -> PrefixStore | None:
    """Return a part of the process group's store; None if there is no other real rank."""
    store = dist.distributed_c10d._get_default_store() if are_several_ranks() else None
    return None if store is None else PrefixStore(f"hf_osdp/{purpose}", store)


def be_at(place: str) -> None:
    """Tell the other ranks, for an error of theirs, what this rank does now; it waits for nobody."""
    if (store := store_of("at")) is not None:
        store.set(str(dist.get_rank()), place)


def lost_ranks_explained(error: BaseException) -> LaunchError | None:
    """Return an error that says where each rank was when this one waited for others in vain, or lost its connection
    to them; None for another error.
    """
    if not isinstance(error, RuntimeError) or "gloo/transport" not in str(error) or (store := store_of("at")) is None:
        return None
    store.set_timeout(timedelta(seconds=_NAME_S))
    ranks = range(dist.get_world_size())
    store.set(f"waits/{dist.get_rank()}", "")
    is_late = "Timed out" in str(error)
    poll(lambda: store.check([f"waits/{rank}" for rank in ranks]), _ANSWER_S if is_late else 0.0)
    silent = [rank for rank in ranks if not store.check([f"waits/{rank}"])]
    at: dict[str, list[int]] = {}
    for rank in ranks:
        at.setdefault(store.get(str(rank)).decode() if store.check([str(rank)]) else "the start", []).append(rank)
    what, remedy = "lost its connection to", ""
    if is_late:
        what = f"waited {own_timeout().total_seconds():g} s for"
        remedy = "; if it still works, raise the timeout (ddp_timeout, or InitProcessGroupKwargs)"
    return LaunchError(
        f"Rank {dist.get_rank()} {what} {ranks_text(silent) if silent else 'another rank'}. Last seen:"
        f" {'; '.join(f'{ranks_text(found)} at {place}' for place, found in at.items())}. Look at the output and the"
        f" machine of the rank that is behind{remedy}."
    )


def require_all(what: str) -> None:
    """Wait until every rank has called this with the same `what`, such as `GPT2LMHeadModel.generate`; else raise
    OSDPError.

    Ranks poll the store, so that a rank that calls alone gets an error instead of hanging.
    """
    if (store := store_of("all_call")) is None:
        return
    be_at(what)
    world = dist.distributed_c10d._get_default_group()
    rank, call = dist.get_rank(), _calls.get(world, 0) + 1
    keys = [f"{call}/{other}" for other in range(world.size())]
    store.set(keys[rank], what)
    seconds = min(ALL_CALL_S, 0.9 * own_timeout().total_seconds())  # before the group ends ranks that did not call
    poll(lambda: store.check(keys), seconds)
    is_met = store.check(keys)
    names = store.multi_get(keys) if is_met else [store.get(key) if store.check([key]) else None for key in keys]
    called = [None if name is None else name.decode() for name in names]
    if is_met:
        _calls[world] = call
    with suppress(NotImplementedError):  # raised by stores without delete_key
        store.delete_key(
            f"{call - 2}/{rank}" if is_met else keys[rank]
        )  # all ranks have read it: they have made a call since
    if missing := [other for other, name in enumerate(called) if name != what]:
        alike = [other for other, name in enumerate(called) if name == what]
        instead = next((f" ({ranks_text([other])} called {called[other]})" for other in missing if called[other]), "")
        raise OSDPError(
            f"{what} gathers a sharded model and must be called on every rank, but ranks {alike} called it and, within"
            f" {seconds:.0f} s, ranks {missing} did not{instead}; call it on all, and use the result on one."
        )


def poll(condition: Callable[[], bool], seconds: float) -> None:
    """Wait at most `seconds` until a condition is true; the store's own `wait` prints a warning after its timeout."""
    until, pause = time.monotonic() + seconds, 0.001
    while not condition() and time.monotonic() < until:
        time.sleep(pause := min(2 * pause, _POLL_S))


def ranks_text(ranks: Iterable[int]) -> str:
    """Write ranks with consecutive ones as ranges, as in `ranks 0-3, 8`."""
    found = sorted(set(ranks))
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(found), key=lambda pair: pair[1] - pair[0])]
    return f"rank{'' if len(found) == 1 else 's'} " + ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs
    )
