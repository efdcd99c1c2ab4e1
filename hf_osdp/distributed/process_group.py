"""The process group: check launched ranks and their versions, a group for long waits, and calls that every rank
must make.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from typing import TypedDict, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from ..errors import LaunchError, OSDPError, one_line
from ..versions import package_versions
from .device import prefer_expandable_segments
from .launcher import (
    is_torchruns_store,
    launched_rank,
    launched_world_size,
    master_address,
    most_restarts,
    number,
    variable,
)

T = TypeVar("T")
_log = logging.getLogger(__name__)
TIMEOUT_VARIABLE = "OSDP_LAUNCH_TIMEOUT_S"
ALL_CALL_S = 300.0
"""How long `require_all` waits: longer than a rank may log or write beforehand, less than NCCL's 600 s."""
_LONGEST_WAIT = timedelta(hours=6)
"""Longer than any save or search; by default NCCL and gloo end waits after 600 and 1800 s.

If a rank ends, the others stop waiting.
"""
_POLL_S = 0.05
_READ_S = 2.0
"""How much longer than rank 0 the others wait, and how long rank 0 waits while they read a refusal."""
_KEY = "hf_osdp/start"

_gloo_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_step_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""How often all ranks have called `require_all`."""


class RankReport(TypedDict):
    """What a rank tells the others at the start, as JSON.

    `token` identifies this call, so that a restart differs from earlier starts.
    """

    rank: int
    ranks: int
    host: str
    process: int
    token: str
    versions: dict[str, str]


def check_ranks() -> None:
    """Wait until every launched rank has started, and compare their versions. Collective.

    Ranks report in the store of `env://` or of the process group, and wait for `OSDP_LAUNCH_TIMEOUT_S` (300 s). A
    single process returns at once. First, `prefer_expandable_segments` sets up CUDA's allocator.

    Raise LaunchError, with the same message on every rank that reported, if ranks are missing or run different
    versions. Also raise it if a rank was started twice, or rank 0's machine cannot be reached.
    """
    prefer_expandable_segments()  # before the process group, which initialises CUDA
    limit_s = launch_timeout_s()
    if are_several_ranks():
        rank, size, store = dist.get_rank(), dist.get_world_size(), _store("start")
        shared = most_restarts() and is_torchruns_store()
        if rank == 0 and shared and not _env_store.cache_info().currsize:  # otherwise `_collect` has cleared it
            _log.warning(
                "A restart may hang, since torchrun keeps its store: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for"
                " torchrun."
            )
    elif dist.is_initialized() or not all(map(variable, ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))):
        return
    else:
        rank, size = launched_rank(), launched_world_size()
        if size == 1:
            return
        store = _env_store(rank, number("MASTER_PORT"), limit_s)
    mine = RankReport(
        rank=rank, ranks=size, host=socket.gethostname(), process=os.getpid(), token=uuid.uuid4().hex,
        versions=package_versions(),
    )  # fmt: skip
    try:
        reports = (_collect if rank == 0 else _report)(store, mine, limit_s)
    except RuntimeError as error:  # torch's errors of stores
        raise LaunchError(
            f"Rank {rank} on {mine['host']} lost rank 0's machine at {master_address()} while ranks reported"
            f" ({_reason(error)}):"
            " a process there ended; its own output shows why."
        ) from error
    if line := refusal(reports, waited_s=limit_s):
        if rank == 0:
            time.sleep(_READ_S)  # this process may host the store from which the others read
        raise LaunchError(line)


def launch_timeout_s() -> float:
    """Return the seconds to wait for launched ranks: `OSDP_LAUNCH_TIMEOUT_S`, else 300, the default of `TCPStore`."""
    text = variable(TIMEOUT_VARIABLE, "300")
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise ValueError(
        f"{TIMEOUT_VARIABLE}={text} is not a number of seconds above 0; give one, such as 300, or leave it out."
    )


def _collect(store: Store, mine: RankReport, limit_s: float) -> list[RankReport]:
    """Wait on rank 0 for the others' reports, and publish all. A new token for each start separates them from those of
    earlier starts.

    torchrun keeps its store over restarts (pytorch issue 135712): gloo would find addresses of processes that have
    ended. They are deleted here, before any rank can form the group.
    """
    space = PrefixStore(f"{_KEY}/{mine['token']}", store)
    store.set(_KEY, mine["token"])
    keys = [str(rank) for rank in range(1, mine["ranks"])]
    _poll(lambda: space.check(keys), limit_s)
    reports: list[RankReport] = [mine, *(json.loads(space.get(key)) for key in keys if space.check([key]))]
    if not dist.is_initialized():
        for key in filter(lambda key: key.startswith("default_pg/"), store.list_keys()):
            store.delete_key(key)
    space.set("reports", json.dumps(reports))
    return reports


def _report(store: Store, mine: RankReport, limit_s: float) -> list[RankReport]:
    """Report on another rank to rank 0's latest start, until the answer contains this call's token."""
    seen, until, problem = (
        "",
        time.monotonic() + limit_s + _READ_S,
        f"waited {limit_s:g} s at {master_address()} for rank 0",
    )
    while time.monotonic() < until:
        token = store.get(_KEY).decode() if store.check([_KEY]) else ""
        space = PrefixStore(f"{_KEY}/{seen}", store)
        if seen and space.check(["reports"]):  # before reading about a later start of rank 0
            reports: list[RankReport] = json.loads(space.get("reports"))
            if mine["token"] in [report["token"] for report in reports]:
                return reports
            if mine["ranks"] != reports[0]["ranks"]:
                problem = f"was started as one of {mine['ranks']} ranks, and rank 0 at {master_address()} as one of {reports[0]['ranks']}"  # noqa: E501
            others = [f"process {one['process']} on {one['host']}" for one in reports if one["rank"] == mine["rank"]]
            if others and others != [f"process {mine['process']} on {mine['host']}"]:
                problem = f"was started twice: rank 0 at {master_address()} counts {others[0]}"
                if not is_torchruns_store():  # the store started with rank 0's process, so that this is not a restart
                    break
        if token != seen:
            seen = token
            store.set(f"{_KEY}/{seen}/{mine['rank']}", json.dumps(mine))
        time.sleep(_POLL_S / 5)
    raise LaunchError(
        f"Rank {mine['rank']} on {mine['host']} {problem}. Look at rank 0's output, start each rank once, and give"
        " each machine its own"
        " --machine_rank (--node-rank) and the same number of processes; if rank 0 only needs longer, raise"
        f" {TIMEOUT_VARIABLE}."
    )


@functools.cache  # rank 0's server must live until the process group's store has joined it
def _env_store(rank: int, port: int, limit_s: float) -> Store:
    """Open the store of `env://`, without waiting for others to join it."""
    hosts, timeout = rank == 0 and not is_torchruns_store(), timedelta(seconds=limit_s)
    try:  # multi-tenant: the group's own store then joins this server
        return TCPStore(
            variable("MASTER_ADDR"), port, is_master=hosts, timeout=timeout, wait_for_workers=False, multi_tenant=hosts
        )
    except RuntimeError as error:
        failed = f"could not reach rank 0's machine at {master_address()} within {limit_s:g} s"
        remedy = (
            "start the command there too, give every machine its address (main_process_ip, main_process_port;"
            " torchrun: --master-addr,"
            " --master-port), and let the firewall pass this port"
        )
        if hosts:
            failed = f"cannot wait for the others at {master_address()}"
            remedy = "another run may hold the port: end it, or set MASTER_PORT to a free one on every machine"
        raise LaunchError(f"Rank {rank} on {socket.gethostname()} {failed} ({_reason(error)}); {remedy}.") from error


def refusal(reports: Sequence[RankReport], *, waited_s: float) -> str | None:
    """Return a message about ranks whose versions or number of ranks differ, else about those that did not report;
    None if all is well.
    """
    values_of_rank = {
        report["rank"]: {**report["versions"], "the number of ranks": str(report["ranks"])} for report in reports
    }
    if found := differences(values_of_rank, {report["rank"]: f" ({report['host']})" for report in reports}):
        return (
            f"Ranks run different versions: {found}. Install the same versions on every machine, for example by"
            " constraints.txt, and start"
            " every machine with the same number of ranks."
        )
    if not (missing := set(range(reports[0]["ranks"])) - set(values_of_rank)):
        return None
    hosts = ", ".join(dict.fromkeys(report["host"] for report in reports))
    return (
        f"{len(missing)} of {reports[0]['ranks']} ranks did not report within {waited_s:g} s: {_ranks(missing)}"
        f" ({_ranks(values_of_rank)}"
        f" on {hosts} did). Look at the output of their machines; if they were never started, start them, and check"
        " that they reach rank"
        f" 0's machine at {master_address()}: address, port, firewall. If they only need longer, raise"
        f" {TIMEOUT_VARIABLE}."
    )


def differences(
    values_of_rank: Mapping[int, Mapping[str, str]], suffixes: Mapping[int, str] | None = None
) -> str | None:
    """Return which ranks have which value, for each name whose values differ; None if there is none.

    An empty value matches any other. `suffixes` are written after ranks.
    """
    parts = []
    for name in dict.fromkeys(name for one in values_of_rank.values() for name in one):
        ranks_of_value: dict[str, list[int]] = {}
        for rank, one in values_of_rank.items():
            if value := one.get(name, "not known"):
                ranks_of_value.setdefault(value, []).append(rank)
        if len(ranks_of_value) > 1:
            listed = [
                f"{value} on {_ranks(ranks)}{(suffixes or {}).get(ranks[0], '')}"
                for value, ranks in ranks_of_value.items()
            ]
            parts.append(f"{name} is {', '.join(listed)}")
    return "; ".join(parts) or None


def are_several_ranks() -> bool:
    """Return whether there is a process group of several real ranks, not of torch's `fake` backend."""
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"


def gloo_group() -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks with a longer timeout than the default group; None if there is no other real
    rank.

    Collective the first time; the group is formed once for each process group.
    """
    return _host_group(_gloo_groups, lambda world: _LONGEST_WAIT)


def step_group() -> dist.ProcessGroup | None:
    """Return a group as `gloo_group`, with the default group's timeout, for what ranks agree on in every step.

    A process cannot end before its last operation has, so that a pending one on `gloo_group` would keep a rank that
    is cut off from another for hours.
    """
    if dist.is_initialized() and dist.group.WORLD not in _step_groups:
        host_barrier()
    return _host_group(_step_groups, _own_timeout)


def _own_timeout(world: dist.ProcessGroup) -> timedelta:
    """Return a group's timeout, for which there is no public call; torch's default if it does not say (torch 2.11 to
    2.13).
    """
    device = torch.device("cuda" if "nccl" in dist.get_backend_config() else "cpu")
    timeout: timedelta = getattr(getattr(world._get_backend(device), "options", None), "_timeout", default_pg_timeout)
    return timeout


def _host_group(
    groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup],
    timeout_of: Callable[[dist.ProcessGroup], timedelta],
) -> dist.ProcessGroup | None:
    world = dist.group.WORLD
    if world is None or not are_several_ranks():
        return None
    if world not in groups:
        try:
            groups[world] = dist.new_group(backend="gloo", timeout=timeout_of(world))
        except RuntimeError as error:
            raise LaunchError(
                f"Rank {dist.get_rank()} on {socket.gethostname()} cannot connect to other ranks over gloo"
                f" ({_reason(error)}). Set"
                f" GLOO_SOCKET_IFNAME (now {variable('GLOO_SOCKET_IFNAME', 'not set')}) on each machine to the"
                " interface that faces"
                " the others, as `ip -br addr` lists them."
            ) from error
    return groups[world]


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


def require_all(what: str) -> None:
    """Wait until every rank has called this with the same `what`, such as `GPT2LMHeadModel.generate`; else raise
    OSDPError.

    Ranks poll the store, so that a rank that calls alone gets an error after `ALL_CALL_S` instead of hanging.
    """
    world = dist.group.WORLD
    if world is None or not are_several_ranks():
        return
    store, rank, call = _store("all_call"), dist.get_rank(), _calls.get(world, 0) + 1
    keys = [f"{call}/{other}" for other in range(world.size())]
    store.set(keys[rank], what)
    _poll(lambda: store.check(keys), ALL_CALL_S)
    called = [store.get(key).decode() if store.check([key]) else None for key in keys]
    if None not in called:
        _calls[world] = call
    with suppress(NotImplementedError):  # raised by stores without delete_key
        store.delete_key(
            keys[rank] if None in called else f"{call - 2}/{rank}"
        )  # all ranks have read it: they have made a call since
    if missing := [other for other, name in enumerate(called) if name != what]:
        alike = [other for other, name in enumerate(called) if name == what]
        raise OSDPError(
            f"{what} gathers a sharded model and must be called on every rank, but ranks {alike} called it and, within"
            f" {ALL_CALL_S:.0f} s, ranks {missing} did not; call it on all, and use the result on one."
        )


def _store(name: str) -> Store:
    return PrefixStore(f"hf_osdp/{name}", dist.distributed_c10d._get_default_store())


def _poll(condition: Callable[[], bool], seconds: float) -> None:
    """Wait at most `seconds` until a condition is true; the store's own `wait` prints a warning after its timeout."""
    until, pause = time.monotonic() + seconds, 0.001
    while not condition() and time.monotonic() < until:
        time.sleep(pause := min(2 * pause, _POLL_S))


def _reason(error: Exception) -> str:
    """Return torch's message without its C++ stack, short enough for one line."""
    return one_line(str(error).split("Exception raised from")[0])[:160].rstrip(". ")


def _ranks(ranks: Iterable[int]) -> str:
    """Write ranks with consecutive ones as ranges, as in `ranks 0-3, 8`."""
    found = sorted(set(ranks))
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(found), key=lambda pair: pair[1] - pair[0])]
    return f"rank{'' if len(found) == 1 else 's'} " + ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs
    )
