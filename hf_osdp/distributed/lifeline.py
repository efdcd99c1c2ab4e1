"""One rank ends by an exception, or dies: all ranks end, within `END_S`, that rank's message first.

Every rank holds a connection to rank 0 from the time when ranks came together to the end of the process. Whoever ends by an
exception says so; a normal end says goodbye; of a process that dies the kernel closes the connection, at once and whatever its
Python was doing. Rank 0 passes the first failure on to all (`lifeline_roles.py`), and each ends (`ending.py`).

In one process there is no lifeline.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import TracebackType

import torch.distributed as dist

from .launched import local_rank, one_machine
from .lifeline_roles import Hub, Member, Spoke
from .rank_reports import absent_line, no_lifeline_line
from .shutdown import Lifeline
from .stores import wait_for
from .wire import connect, listen

_JOIN_S = 10.0
"""For all to be on the line."""

_log = logging.getLogger(__name__)


class _Process:
    """What there is one of: the line, and the interpreter's hooks."""

    line: Lifeline | None = None
    place: dict[str, object] | None = None
    """Where others reach this line; on rank 0."""
    excepthook: Callable[..., object] | None = None
    """The one before ours."""
    leaves: int | None = None
    """The process that says goodbye when it ends; a fork does not."""
    earlier: BaseException | None = None
    """What an interactive interpreter had shown before; a rank of a notebook is a fork of one."""


def join(store: dist.Store, *, rank: int, world_size: int, address: str | None = None) -> None:
    """Hold a line to all other ranks from now to the end of the process. Collective; a second call keeps the line that there is.

    A rank that cannot be reached is told of in a warning, and the run goes on.

    Args:
        store: that all ranks reach, with nothing of an earlier call in it.
        rank: this rank.
        world_size: how many there are.
        address: where the launcher says that ranks meet; None where it does not.
    """
    me = Member(rank=rank, host=socket.gethostname(), local_rank=local_rank())
    if rank == 0:
        _host(store, me, world_size, address)
    else:
        _attend(store, me, world_size, address)
    _hook_the_interpreter()


def current() -> Lifeline | None:
    """The lifeline of this process; None where it runs alone."""
    return _Process.line


def leave() -> None:
    """Say goodbye now: for processes that end by `os._exit`, which others else take for a death."""
    line, _Process.line = _Process.line, None
    if line is not None:
        line.leave()


def _host(store: dist.Store, me: Member, world_size: int, address: str | None) -> None:
    """Rank 0: say where the line is, and wait for all."""
    line = _Process.line
    if line is None or line.me != me or line.world_size != world_size:
        leave()
        token = secrets.token_hex(16)
        try:
            listener, hosts = listen(address, one_machine=one_machine(world_size, address))
        except OSError as error:
            store.set("line", json.dumps(None))
            _log.warning(no_lifeline_line(me.rank, me.host, place="a port of its own", reason=str(error)))
            return
        reached_at = address if address and hosts == [me.host] else hosts[0]
        _Process.place = {"hosts": hosts, "port": listener.getsockname()[1], "token": token}
        line = _Process.line = Lifeline(me, Hub(me, world_size, listener, reached_at, token), world_size=world_size, token=token)
    store.set("line", json.dumps(_Process.place))
    assert isinstance(line.end, Hub)
    if missing := line.end.missing(_JOIN_S):
        _log.warning(absent_line(missing, waited_s=_JOIN_S))


def _attend(store: dist.Store, me: Member, world_size: int, address: str | None) -> None:
    """Other ranks: go where the line is, unless this is the one that they are on."""
    place = json.loads(store.get("line")) if wait_for(store, ["line"], _JOIN_S) else None
    line = _Process.line
    if place is None or (line is not None and line.me == me and line.token == place["token"]):
        return
    leave()
    hosts = [*place["hosts"], *([address] if address else [])]
    try:
        spoke = Spoke(connect(hosts, place["port"]), me, place["token"])
    except OSError as error:
        where = f"{', '.join(dict.fromkeys(hosts))} port {place['port']}"
        _log.warning(no_lifeline_line(me.rank, me.host, place=where, reason=str(error)))
        return
    _Process.line = Lifeline(me, spoke, world_size=world_size, token=place["token"])


# ---------------------------------------------------------------------------------------------------------- the interpreter


def _hook_the_interpreter() -> None:
    """Be told of exceptions, of normal ends, and of forks."""
    if _Process.excepthook is None:  # once: torch's own hook goes before ours later, and calls it
        _Process.excepthook, sys.excepthook = sys.excepthook, _excepthook
        os.register_at_fork(after_in_child=_forget)
    if _Process.leaves != os.getpid():
        # Not atexit, which forks of multiprocessing pass over: ranks of a notebook are such.
        _Process.leaves, _Process.earlier = os.getpid(), _shown_last()
        Finalize(None, _process_ends, exitpriority=0)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    def say() -> None:
        assert _Process.excepthook is not None
        _Process.excepthook(kind, error, trace)

    if _Process.line is None:
        say()
    else:
        _Process.line.fail(error, say)


def _process_ends() -> None:
    """At exit; in a rank of a notebook also by an error, on its way to multiprocessing. `sys.exit` by itself is a normal end.

    An error may have come by without our hook: other packages put theirs in its place.
    """
    line, error = _Process.line, sys.exc_info()[1] or _ended_by()
    if line is None or line.verdict is not None:
        if line is not None:
            line.wait_for_the_new_start()
        return
    if isinstance(error, SystemExit):
        error = error.__context__
    if error is None:
        leave()
    else:
        line.fail(error, lambda: None)


def _ended_by() -> BaseException | None:
    """What ended the main thread. Where somebody types, an error ends nothing."""
    error = _shown_last()
    return None if error is _Process.earlier or hasattr(sys, "ps1") else error


def _shown_last() -> BaseException | None:
    """The last error that the interpreter showed: `last_exc` from Python 3.12 on."""
    return getattr(sys, "last_exc", getattr(sys, "last_value", None))


def _forget() -> None:
    """A fork must not keep a dead rank's connections open."""
    line, _Process.line = _Process.line, None
    if line is not None:
        line.end.close()
