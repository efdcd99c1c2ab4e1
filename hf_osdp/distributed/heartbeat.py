"""Warn when a rank is not heard from: it is stopped, its machine hangs, or the network is cut.

A rank that dies needs none of this: the launcher and the connections of its process group end the others.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

BEAT_S = 5.0
SILENT_BEATS = 6
"""Beats without a sign of life before a warning: 30 s."""
_OVER = "over"
_log = logging.getLogger(__name__)


class Heartbeat(threading.Thread):
    """Count up in the process group's store, by a connection of its own, and look whether the next rank counts, too."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        super().__init__(name="hf_osdp heartbeat", daemon=True)
        self._store, self._rank, self._next = store, str(rank), str((rank + 1) % world_size)
        self._ends, self._process = threading.Event(), os.getpid()
        self._heard, self._missed, self._count = "", 0, 0

    def run(self) -> None:
        """Beat until the process or its process group ends."""
        with suppress(RuntimeError):  # the store ends with rank 0's process or its launcher, which end the others themselves
            while dist.is_initialized():
                self.beat()
                if self._ends.wait(BEAT_S):
                    break
            self._store.set(self._rank, _OVER)

    def beat(self) -> None:
        """Count up; warn where the next rank has not for `SILENT_BEATS`."""
        self._count += 1
        self._store.set(self._rank, f"{socket.gethostname()} {self._count}")
        heard = self._store.get(self._next).decode() if self._store.check([self._next]) else _OVER
        silent_s = self._missed * BEAT_S
        self._missed = self._missed + 1 if heard == self._heard != _OVER else 0
        self._heard, who = heard, f"Rank {self._next} on {heard.split(' ')[0]}"
        if self._missed == SILENT_BEATS:
            _log.warning(
                "%s has not been heard from for %.0f s: it is stopped (SIGSTOP, a debugger), its machine hangs, or the network is cut."
                " Other ranks wait for it in their next collective, until the timeout of the process group.",
                who, SILENT_BEATS * BEAT_S,
            )  # fmt: skip
        elif not self._missed and silent_s >= SILENT_BEATS * BEAT_S and heard != _OVER:
            _log.warning("%s is heard from again, after %.0f s.", who, silent_s)

    def end(self) -> None:
        """Tell the others that this rank has ended; a fork does not."""
        if os.getpid() == self._process:
            self._ends.set()
            self.join(1.0)


def start_heartbeat() -> None:
    """Begin to watch the next rank; once for each process group."""
    if any(isinstance(thread, Heartbeat) for thread in threading.enumerate()):
        return
    with suppress(NotImplementedError, RuntimeError):  # a store that cannot be shared with a thread
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # not in torch's stubs
        store.set_timeout(timedelta(seconds=SILENT_BEATS * BEAT_S))
        heartbeat = Heartbeat(PrefixStore("hf_osdp/heartbeat", store), dist.get_rank(), dist.get_world_size())
        heartbeat.start()
        atexit.register(heartbeat.end)
