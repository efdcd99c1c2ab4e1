"""What a process does when another rank ends, and says when it ends itself.

A rank that hears of a failure

    says so        a line on stderr has rank, machine and message; one rank of each machine speaks, none that fails alike
    waits          its main thread has `_GRACE_S` to end by itself
    ends           also out of a collective that never returns
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import IO

import torch.distributed as dist

from . import restart as again
from .lifeline_roles import End, Failure, Hub, Member, Spoke

END_S = 5.0
"""No rank lives longer than this after another failed, in seconds; 30 where a machine went off (`wire.py`)."""
_GRACE_S = 2.0
"""For the main thread to end by itself."""
_ALIKE_S = 0.7
"""Ranks that are about to raise the same do so in this time, and speak for themselves."""
_KILLED_S = 0.05
"""Whoever is being killed together with the rank that died is gone after this time."""
_CAUSE_S = 2.0
"""How long an error of communication waits for its cause."""
_MOST_LETTERS = 500
"""Of a message that is passed on."""
_SIGNS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe", "socket")
"""In what torch's RuntimeErrors say where another rank is gone."""


class Lifeline:
    """What this process does when another rank ends, and says when it ends itself."""

    def __init__(self, me: Member, end: Hub | Spoke, *, world_size: int, token: str) -> None:
        """
        Args:
            me: this rank.
            end: its end of the line.
            world_size: ranks on the line.
            token: what makes this line another than one before.
        """
        self.me, self.world_size, self.token = me, world_size, token
        self.verdict: Failure | None = None
        """The first failure."""
        self.end = end
        self._deciding = threading.Lock()
        self._heard, self._told = threading.Event(), threading.Event()
        self._exit_code = 1
        self._speaks_itself = False
        self._leaving = False
        threading.Thread(target=end.run, args=(self._hear,), name="hf_osdp lifeline", daemon=True).start()

    # --------------------------------------------------------------------------------------- what the main thread has to say

    def fail(self, error: BaseException, say: Callable[[], None], *, exit_code: int = 1) -> None:
        """This rank's main thread ends by an error: say so, after its cause if it has one, and tell all.

        Args:
            error: it.
            say: prints it; without effect where it is only to be told.
            exit_code: what the process is to end with, by itself or by us.
        """
        self._wait_for_the_cause(error)
        self.wait_for_the_new_start()
        self._speaks_itself, self._exit_code = True, exit_code
        try:
            say()
        finally:
            _end_at_the_latest()
            failure = Failure(member=self.me, end=End.FAILED, text=text_of(error))
            if self._decide(failure):
                self.end.send(failure.message())
            if isinstance(self.end, Hub):
                self.end.send({"kind": "told"})

    def start_again(self, limit_bytes: int) -> None:
        """This rank's main thread ran out of memory, and has said so: all ranks start again. Returns where another rank ended before.

        Args:
            limit_bytes: the limit to plan under.
        """
        self._speaks_itself = True
        failure = Failure(member=self.me, end=End.AGAIN, text=str(limit_bytes))
        if isinstance(self.end, Hub):
            self._hear(failure)
        else:
            self.end.send(failure.message())
        self._heard.wait(END_S)
        self.wait_for_the_new_start()

    def wait_for_the_new_start(self) -> None:
        """Where all ranks start again, until this process is replaced: it says and writes nothing more."""
        if self.verdict is not None and self.verdict.end is End.AGAIN:
            time.sleep(2 * END_S)

    def wait_for_rank_zero(self) -> None:
        """Until rank 0 has said what there was to say, or is gone."""
        if isinstance(self.end, Spoke):
            self.end.told.wait(END_S)

    def _wait_for_the_cause(self, error: BaseException) -> None:
        """Where an error follows from another rank's end, until that has been told."""
        if not self._heard.wait(_CAUSE_S if _is_of_communication(error) else 0.0):
            return
        assert self.verdict is not None
        if self.verdict.member != self.me and self.verdict.text != text_of(error):
            self._told.wait(_CAUSE_S)

    def leave(self) -> None:
        """A normal end, because of which nobody else ends."""
        self._leaving = True
        self.end.send({"kind": "bye"})
        if isinstance(self.end, Hub):
            self.end.over = True

    # ----------------------------------------------------------------------------------------------- what the line has to say

    def _hear(self, failure: Failure) -> None:
        """Another rank ended: so does this one."""
        if failure.end is End.AGAIN and isinstance(self.end, Hub):
            failure = replace(failure, text=again.common_variables(int(failure.text), self.end.host))
        if self._leaving or not self._decide(failure):
            return
        _end_at_the_latest()
        if isinstance(self.end, Hub):
            self.end.send(failure.message())
        threading.Thread(target=self._follow, args=(failure,), daemon=True).start()

    def _decide(self, failure: Failure) -> bool:
        """Whether this is the first failure."""
        with self._deciding:
            first = self.verdict is None
            self.verdict = failure if first else self.verdict
        self._heard.set()
        return first

    def _follow(self, failure: Failure) -> None:
        """Say why, and end this process."""
        time.sleep(_ALIKE_S if failure.end is End.FAILED else 0.0 if failure.end is End.AGAIN else _KILLED_S)
        if self._speaks_for(failure.member) and not self._speaks_itself:
            os.write(2, f"hf_osdp: {failure.line}\n".encode())  # whole, whatever the main thread is writing
        self._told.set()
        if isinstance(self.end, Hub):
            self.end.send({"kind": "told"})
        if failure.end is End.AGAIN:
            _start_again(failure)
        time.sleep(_GRACE_S)
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(self._exit_code)

    def _speaks_for(self, member: Member) -> bool:
        """One rank of each machine: the first that lives."""
        if member.host == self.me.host and member.local_rank == self.me.local_rank is not None:  # one number for all: they share a GPU
            return self.me.rank == (1 if member.rank == 0 else 0)
        first = 1 if member.host == self.me.host and member.local_rank == 0 else 0
        return self.me.local_rank in (None, first)


class _Watchdog:
    """There is one of the process."""

    output: IO[str] | None = None
    """Nowhere, once it is set."""


def _start_again(failure: Failure) -> None:
    """Replace this process; where that fails it ends."""
    try:
        again.replace_this_process(again.read_variables(failure.text))
    except (OSError, ValueError) as error:
        os.write(2, f"hf_osdp: This process cannot start again: {error}\n".encode())


def text_of(error: BaseException) -> str:
    """An error in one line, as it is told to others."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


def _end_at_the_latest() -> None:
    """End this process after `END_S` in any case: this watchdog needs neither the interpreter's lock nor a live interpreter."""
    if _Watchdog.output is None:
        _Watchdog.output = open(os.devnull, "w")
        faulthandler.dump_traceback_later(END_S, exit=True, file=_Watchdog.output)


def _is_of_communication(error: BaseException | None) -> bool:
    """Whether torch says, here or in what led here, that it lost another rank."""
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)):
            return True
        error = error.__cause__ or error.__context__
    return False
