"""Every launched rank reports before the process group forms: one that is missing, or runs another version, is an error, not a hang.

Ranks meet in the store that `init_process_group("env://")` uses, under keys of their own. Rank 0 presides:

    rank 0    chair <- a name of its own for this call    waits for report/1 .. report/W-1          outcome <- error or none
    rank r    waits for chair                             report/r <- its host and its versions     waits for outcome

One rank decides, so all have the same outcome, and nobody waits longer than the limit for whoever is before it in this order.
Rank 0 may host the store: it goes on only when those who reported have read the outcome, and holds the store until the group has
formed. A launcher that restarts workers may keep the store; the chair's name, new for each call, tells what is from an earlier
start. (The launcher's count of restarts would not: after a failure on one machine it differs between machines.)
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from importlib import metadata
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import LaunchError
from . import lifeline
from .allocator_settings import prefer_expandable_segments
from .launched import Launch, launch_timeout_s
from .rank_reports import (
    RankReport,
    another_world_line,
    difference_line,
    gloo_line,
    lost_line,
    missing_line,
    port_line,
    silent_line,
    twice_line,
    unreachable_line,
)
from .stores import are_several, call_space, confer, keeps_store, set_start, wait_for
from .waiting import waiting_group

COMPARED = ("hf_osdp", "torch", "accelerate", "transformers")
"""Packages that all ranks must have in one version."""

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.2
"""Between two attempts to reach it."""
_SLICE_S = 1.0
"""How often who waits also looks for objections, or for another chair."""
_READ_S = 5.0
"""How long rank 0 waits for others to read the outcome, and how much longer than rank 0 others wait for it."""
_GLOO_SIGNS = ("Gloo connectFullMesh failed", "Unable to find address for")
"""What gloo says where ranks do not reach each other, or an interface does not exist."""
_CHAIR, _NAME, _OUTCOME, _OBJECTION = "chair", "name", "outcome", "objection"


@contextmanager
def roll_call(*, timeout_s: float | None = None) -> Iterator[None]:
    """Wait until every launched rank is there; form the process group inside. Collective.

    ```python
    with roll_call():
        torch.distributed.init_process_group("nccl")
    ```

    Before that, CUDA's allocator is set as `prefer_expandable_segments` says. Nobody waits where there is a process group, or the
    launcher's variables describe no other process.

    Args:
        timeout_s: seconds to wait for others; None takes the variable `OSDP_LAUNCH_TIMEOUT_S`, else 300.

    Raises:
        LaunchError: ranks are missing, were started twice, or run different versions, in the same line on every rank that
            reported; or rank 0's machine cannot be reached.
        ValueError: the limit or a variable is not a number.
    """
    prefer_expandable_segments()  # a run begins here, and its process group is what begins to use CUDA
    limit_s = launch_timeout_s(timeout_s)
    launch = None if dist.is_initialized() else Launch.from_environment()
    if launch is None:
        yield
        return
    mine = _own_report(launch.rank)
    store = _open_store(launch, mine, limit_s)
    space = meet(store, launch, mine, limit_s)
    lifeline.join(space, rank=launch.rank, world_size=launch.world_size, address=launch.address)
    try:
        with _empty_store(space.get(_NAME).decode()), _gloo_explained(mine):
            yield
    finally:
        del store  # not before: the group's own store has joined the server by now


@contextmanager
def _gloo_explained(mine: RankReport) -> Iterator[None]:
    """Say what to do where gloo does not reach other ranks."""
    try:
        yield
    except RuntimeError as failed:
        if any(sign in str(failed) for sign in _GLOO_SIGNS):
            raise LaunchError(gloo_line(mine, interface=os.environ.get("GLOO_SOCKET_IFNAME"), reason=str(failed))) from failed
        raise


@contextmanager
def _empty_store(name: str) -> Iterator[None]:
    """Within, `env://` gives the process group a part of torchrun's store in which nothing stands yet: after a restart gloo would find
    addresses there, and NCCL its name, of processes that have ended, and wait for them."""
    if not keeps_store():
        yield
        return
    set_start(name)
    stock = distributed_c10d.rendezvous

    def rendezvous(*args: Any, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
        for store, rank, world_size in stock(*args, **options):
            yield dist.PrefixStore(f"hf_osdp/group/{name}", store), rank, world_size

    distributed_c10d.rendezvous = rendezvous
    try:
        yield
    finally:
        distributed_c10d.rendezvous = stock


def meet(store: dist.Store, launch: Launch, mine: RankReport, limit_s: float) -> dist.Store:
    """The roll call in a given store. Collective.

    Args:
        store: one that all ranks reach.
        launch: this process's place among them.
        mine: what it says of itself.
        limit_s: seconds to wait for others.

    Returns:
        The part of the store that belongs to this call.

    Raises:
        LaunchError: see `roll_call`.
    """
    hall = dist.PrefixStore("hf_osdp/roll_call", store)
    try:
        error, space = (_preside if launch.rank == 0 else _attend)(hall, launch, mine, limit_s)
    except RuntimeError as lost:  # torch's errors of stores
        raise LaunchError(lost_line(mine, place=launch.place, reason=str(lost))) from lost
    if error is not None or space is None:
        raise LaunchError(error)
    return space


def compare_versions() -> None:
    """Where a process group exists already: hold the ranks' versions against each other, and a lifeline between them. Collective.

    The group may be NCCL's alone: ranks wait for each other over gloo (`waiting_group`), which is formed here, where its failure is told.

    Raises:
        LaunchError: they differ, in the same line on every rank; or gloo does not reach other ranks.
    """
    if not are_several():
        return
    rank, space = dist.get_rank(), call_space()
    mine = _own_report(rank)
    if line := confer(space, json.dumps(asdict(mine)), lambda said: difference_line([RankReport.read(text) for text in said])):
        raise LaunchError(line)
    lifeline.join(space, rank=rank, world_size=dist.get_world_size(), address=os.environ.get("MASTER_ADDR"))
    with _gloo_explained(mine):
        waiting_group()


def own_versions() -> dict[str, str]:
    """This process's version of each of `COMPARED`, and of Python (major.minor)."""
    return {**{name: _version(name) for name in COMPARED}, "python": ".".join(platform.python_version_tuple()[:2])}


# ---------------------------------------------------------------------------------------------------------- the two roles


def _preside(hall: dist.Store, launch: Launch, mine: RankReport, limit_s: float) -> tuple[str | None, dist.Store]:
    """Rank 0: collect the reports, decide, and see the decision read. Returns the error, if there is one, and where this was."""
    chair = {"space": uuid.uuid4().hex, "host": mine.host, "world_size": launch.world_size}
    space = dist.PrefixStore(chair["space"], hall)
    space.set(_NAME, chair["space"])
    hall.set(_CHAIR, json.dumps(chair))
    others = range(1, launch.world_size)
    objection = _collect(hall, space, chair, others, limit_s)
    present = [rank for rank in others if space.check([_report(rank)])]
    reports = [mine, *(RankReport.read(text) for text in space.multi_get([_report(rank) for rank in present]))]
    error = objection or difference_line(reports)
    if objection is None and len(reports) < launch.world_size:
        error = missing_line(
            reports,
            world_size=launch.world_size,
            ranks_per_machine=launch.ranks_per_machine,
            launchers_met=not launch.hosts_store,
            place=launch.place,
            waited_s=limit_s,
        )
    space.set(_OUTCOME, json.dumps(error))
    wait_for(space, [f"read/{rank}" for rank in present], _READ_S)
    return error, space


def _collect(hall: dist.Store, space: dist.Store, chair: dict[str, object], others: Sequence[int], limit_s: float) -> str | None:
    """Wait until all have reported, someone objects, or the limit is reached. Returns the objection."""
    deadline = time.monotonic() + limit_s
    complete = False
    while not complete and time.monotonic() < deadline:
        complete = wait_for(space, [_report(rank) for rank in others], min(_SLICE_S, deadline - time.monotonic()))
        if space.check([_OBJECTION]):
            return space.get(_OBJECTION).decode()
        now = json.loads(hall.get(_CHAIR))
        if now["space"] != chair["space"]:  # another process presides, too: tell those who report to it
            objection = twice_line(0, [str(chair["host"]), now["host"]])
            dist.PrefixStore(now["space"], hall).set(_OBJECTION, objection)
            return objection
    return None


def _attend(hall: dist.Store, launch: Launch, mine: RankReport, limit_s: float) -> tuple[str | None, dist.Store | None]:
    """Other ranks: report to whoever presides, and hear the outcome. Returns the error, if there is one, and where this was."""
    reported_to: str | None = None
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if not wait_for(hall, [_CHAIR], min(_SLICE_S, deadline - time.monotonic())):
            continue
        chair = json.loads(hall.get(_CHAIR))
        space = dist.PrefixStore(chair["space"], hall)
        if chair["space"] != reported_to:
            if space.check([_OUTCOME]):  # of an earlier call: rank 0 is yet to come
                time.sleep(_LAST_PAUSE_S)
                continue
            reported_to, deadline = chair["space"], time.monotonic() + limit_s + _READ_S
            if objection := _hand_in(space, launch, mine, chair):
                space.set(_OBJECTION, objection)
                return objection, space
        if wait_for(space, [_OUTCOME], _SLICE_S):
            error = json.loads(space.get(_OUTCOME))
            space.set(f"read/{mine.rank}", "")
            return error, space
    return silent_line(mine, place=launch.place, waited_s=limit_s), None


def _hand_in(space: dist.Store, launch: Launch, mine: RankReport, chair: dict) -> str | None:
    """Report, unless this rank should not be there: then returns the objection."""
    if launch.world_size != chair["world_size"]:
        return another_world_line(mine.rank, mine.host, launch.world_size, first_host=chair["host"], first_size=chair["world_size"])
    first = RankReport.read(space.compare_set(_report(mine.rank), "", json.dumps(asdict(mine))))
    return None if first == mine else twice_line(mine.rank, [first.host, mine.host])


# -------------------------------------------------------------------------------------------------------------- the store


def _open_store(launch: Launch, mine: RankReport, limit_s: float) -> dist.TCPStore:
    """The store of `env://`, without waiting for others to join it.

    Raises:
        LaunchError: the store cannot be opened or reached.
    """
    reason = None if launch.hosts_store else _reach(launch, limit_s)
    if reason is not None:
        raise LaunchError(unreachable_line(mine, place=launch.place, waited_s=limit_s, reason=reason))
    try:
        return dist.TCPStore(
            host_name=launch.address,
            port=launch.port,
            is_master=launch.hosts_store,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
            multi_tenant=launch.hosts_store,  # the group's own store then joins this server
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",  # as torch's env:// has it
        )
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error):
            raise LaunchError(port_line(mine, place=launch.place, reason=str(error))) from error
        raise LaunchError(unreachable_line(mine, place=launch.place, waited_s=limit_s, reason=str(error))) from error


def _reach(launch: Launch, limit_s: float) -> str | None:
    """Try until something listens at the address. Returns why nothing does, at the limit. (Torch tries, too, but prints its stacks.)"""
    deadline, pause = time.monotonic() + limit_s, _FIRST_PAUSE_S
    while True:
        try:
            socket.create_connection((launch.address, launch.port), timeout=max(deadline - time.monotonic(), _LAST_PAUSE_S)).close()
            return None
        except OSError as error:
            if time.monotonic() >= deadline:
                return error.strerror or str(error)
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE_S)


def _own_report(rank: int) -> RankReport:
    return RankReport(rank=rank, host=socket.gethostname(), process=os.getpid(), versions=own_versions())


def _report(rank: int) -> str:
    """The key of a rank's report."""
    return f"report/{rank}"


def _version(name: str) -> str:
    """As imported, else as installed."""
    imported = getattr(sys.modules.get(name), "__version__", None)
    if imported is not None:
        return str(imported)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
