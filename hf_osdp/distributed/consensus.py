"""Agreement between ranks: one result, one plan, or the same error on all; and a warning when a rank stops responding.

A rank that dies needs no heartbeat: the launcher and the broken connections of the process group end the others.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store

from ..errors import OSDPError, PlanMismatchError
from ..planner.job import OptimizerSpec, Precision
from ..planner.plan import Plan
from .device import own_gpu
from .mesh import rank, world_size
from .process_group import all_gather_objects, are_several_ranks, check_ranks, differences, gloo_group

T = TypeVar("T")
_SAME_MEMORY = 0.02
"""Fraction: devices with the same name whose memory differs by less are of one kind."""
BEAT_S = 5.0
SILENT_BEATS = 6
"""Missed beats before a warning: 30 s."""
_OVER = "over"
_IDLE_CPU_S = 0.05
"""CPU seconds between two checks; a thread that uses less is idle."""
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = (str(Path(_TORCH, "distributed")), str(Path(__file__).parent))
_log = logging.getLogger(__name__)


def on_rank_zero(fn: Callable[[], T]) -> T:
    """Run `fn` on rank 0 and return its result, which must be picklable, or raise its error, on every rank. Collective.

    A `ValueError` and hf_osdp's errors keep type and attributes; others become an `OSDPError` that names the type.
    """
    if world_size() == 1:
        return fn()
    message: list[bytes | None] = [None]
    cause: BaseException | None = None
    group = gloo_group()
    if rank() == 0:
        try:
            message[0] = pickle.dumps((fn(), None))
        except BaseException as error:  # whatever happens here must not leave the other ranks waiting
            cause, message[0] = error, pickle.dumps((None, _as_picklable(error)))
    dist.broadcast_object_list(message, src=0, group=group)
    assert message[0] is not None
    outcome: tuple[T, tuple[type[Exception], str, dict[str, Any]] | None] = pickle.loads(message[0])  # from this run's rank 0, not a file
    result, failure = outcome
    if failure is None:
        return result
    if cause is not None and not isinstance(cause, Exception):
        raise cause  # an interrupt keeps its type on rank 0
    kind, text, attributes = failure
    sent = kind.__new__(kind, text)
    vars(sent).update(attributes)
    raise sent from cause


def _as_picklable(error: BaseException) -> tuple[type[Exception], str, dict[str, Any]]:
    """Return the nearest error type that all ranks know, the message in one line, and the attributes that can be pickled."""
    text = " ".join(str(error).split())
    attributes = {name: value for name, value in vars(error).items() if isinstance(value, (int, float, str, tuple, type(None)))}
    for kind in type(error).__mro__:
        if kind is ValueError or (issubclass(kind, OSDPError) and kind.__module__ == OSDPError.__module__):
            return kind, text, attributes
    return OSDPError, f"Rank 0 failed with {type(error).__name__}: {text}", {}


def require_same(mine: Mapping[str, str], hint: str = "") -> None:
    """Raise PlanMismatchError, with the same message on every rank, if ranks are about to run different things. Collective.

    `mine` maps names to what this rank is about to run; an empty text matches any other. `hint` is a further remedy.
    """
    if found := differences(dict(enumerate(all_gather_objects(mine)))):
        raise PlanMismatchError(
            f"Ranks are about to run different things: {found}. Run the same program with the same arguments on every rank.{hint}"
        )


def require_same_run(model: nn.Module, *asked: object, **more: object) -> None:
    """Compare the ranks' versions, models, options and devices, before planning. Collective.

    Options are the fields of dataclasses in `asked`, and `more`. For objects, files, and `memory_limit`, which may be measured, only their
    presence is compared; `sequence_length`, which may be read from the data, is not compared. If `device_type` is `cuda`, the devices'
    names are compared, and their memory if it differs by 2 % or more.
    """
    if not are_several_ranks():
        return
    check_ranks()
    start_heartbeat()
    options = {field.name: getattr(one, field.name) for one in asked if is_dataclass(one) for field in fields(one)} | more
    texts = {name: _option_text(name, value) for name, value in options.items() if name != "sequence_length"}
    require_same({"the model": _model_text(model), **texts})
    if options.get("device_type") == "cuda":  # CPUs and their memory may differ
        found = torch.cuda.get_device_properties(own_gpu()) if torch.cuda.is_available() else None
        memories = [nbytes for nbytes in all_gather_objects(found.total_memory if found else 0) if nbytes] or [0]
        alike = max(memories) - min(memories) < _SAME_MEMORY * max(memories)
        name = found.name if found else ""
        device = name if alike or not found else f"{name} with {found.total_memory // 2**20} MiB"
        require_same({"the device": device}, " Plans need devices of one kind; select them by CUDA_VISIBLE_DEVICES on each machine.")


def _model_text(model: nn.Module) -> str:
    tensors = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    elements = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} ({len(tensors)} tensors, {elements} elements, {hashlib.sha256(repr(tensors).encode()).hexdigest()[:8]})"


def _option_text(name: str, value: object) -> str:
    if value is None:
        return "left out"
    if isinstance(value, Plan):
        return value.fingerprint
    plain = isinstance(value, (bool, int, float, str, tuple, Precision, OptimizerSpec))
    return repr(value) if plain and name not in ("hardware", "plan", "profile", "memory_limit") else "given"


class WaitDetector:
    """Detects that a thread has waited in one collective for long: its position does not change, and it uses no CPU time."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread, self._checks = thread, 0
        self._seen: tuple[str | None, float] = None, 0.0

    def check(self) -> str | None:
        """Return, once, the collective in which the thread has waited during the last `SILENT_BEATS` checks; else None."""
        clock = getattr(time, "pthread_getcpuclockid", None)
        if clock is None or self._thread.ident is None:
            return None
        place, cpu_s = self._place(), time.clock_gettime(clock(self._thread.ident))
        is_waiting = place is not None and place == self._seen[0] and cpu_s - self._seen[1] < _IDLE_CPU_S
        self._checks = self._checks + 1 if is_waiting else 0
        self._seen = place, cpu_s
        return place if self._checks == SILENT_BEATS else None

    def _place(self) -> str | None:
        """Return the function of torch.distributed that the thread is in, and the line that called it; None if it is in none."""
        frame = sys._current_frames().get(cast(int, self._thread.ident))
        if frame is None or not frame.f_code.co_filename.startswith(_COLLECTIVES):
            return None
        name = frame.f_code.co_name
        while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, *_COLLECTIVES)):
            frame = frame.f_back
        return f"{name}, called at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class Heartbeat(threading.Thread):
    """Counts up in the process group's store, over a separate connection, and checks that the next rank does so, too."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        super().__init__(name="hf_osdp heartbeat", daemon=True)
        self._store, self._rank, self._next = store, str(rank), str((rank + 1) % world_size)
        self._ends, self._process = threading.Event(), os.getpid()
        self._heard, self._missed, self._count = "", 0, 0
        self._beats_since: float | None = None

    def run(self) -> None:
        threading.Thread(target=self._watch, name="hf_osdp watch", daemon=True).start()
        with suppress(RuntimeError):  # the store ends with rank 0's process or its launcher, which then end the other ranks
            while dist.is_initialized():
                self._beats_since = time.monotonic()
                self.beat()
                self._beats_since = None
                if self._ends.wait(BEAT_S):
                    break
            self._store.set(self._rank, _OVER)
        self._ends.set()  # ends `_watch` as well

    def _watch(self) -> None:
        """Warn of what beats cannot show: the store does not answer, or this rank waits although every rank beats."""
        wait_detector, has_warned = WaitDetector(threading.main_thread()), False
        while not self._ends.wait(BEAT_S):
            since, silent_s = self._beats_since, SILENT_BEATS * BEAT_S
            is_silent = since is not None and time.monotonic() - since > silent_s
            if is_silent and not has_warned:
                _log.warning(
                    "The store on rank 0's machine has not answered for %.0f s: its process is stopped (SIGSTOP, a debugger), the machine"
                    " hangs, or the network is cut.", silent_s,
                )  # fmt: skip
            has_warned = is_silent
            if (place := wait_detector.check()) is not None:
                _log.warning(
                    "Rank %s on %s has waited for other ranks for %.0f s, in %s. If this does not end, a rank does something else, or the"
                    " network between two ranks is cut.", self._rank, socket.gethostname(), silent_s, place,
                )  # fmt: skip

    def beat(self) -> None:
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
            _log.warning("%s responds again, after %.0f s.", who, silent_s)

    def end(self) -> None:
        """Tell the others that this rank has ended, except from a forked process."""
        if os.getpid() == self._process:
            self._ends.set()
            self.join(SILENT_BEATS * BEAT_S)  # Python aborts (SIGABRT) if a process ends while a thread is in torch's store


def start_heartbeat() -> None:
    """Start to watch the next rank, once for each process group."""
    if any(isinstance(thread, Heartbeat) for thread in threading.enumerate()):
        return
    with suppress(NotImplementedError, RuntimeError):  # a store that cannot be shared with a thread
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # not in torch's stubs
        store.set_timeout(timedelta(seconds=SILENT_BEATS * BEAT_S))
        heartbeat = Heartbeat(PrefixStore("hf_osdp/heartbeat", store), dist.get_rank(), dist.get_world_size())
        heartbeat.start()
        atexit.register(heartbeat.end)
