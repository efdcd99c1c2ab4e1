"""Stop all ranks after the same step when one of them receives SIGTERM."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import ClassVar

import torch
import torch.distributed as dist

from .process_group import step_group

EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a process that SIGTERM ended, by which the launcher knows that the run is not finished."""
waits_in_background: dict[Callable[[], None], None] = {}
"""Collective calls that `StopSignal.exit` makes, on every rank in the same order, to wait for work in the
background; they may raise.
"""


_PATIENCE_S, _POLL_S = 5.0, 0.25


class Stopped(SystemExit):
    """SIGTERM ended the loop, at the same step on every rank."""


class StopSignal:
    """Handle SIGTERM, so that all ranks stop after the same step.

    ```python
    with StopSignal() as stop:
        for batch in loader:
            ...
            optimizer.step()
            if stop.agreed():            # on every rank, after every optimizer step
                accelerator.save_state("out/checkpoint-last")
                break
    stop.exit()                          # after SIGTERM: exit with code 143 once the checkpoint is complete
    ```

    The all-reduce of the signal runs during the next step, so that no rank waits for it: all ranks stop one step after
    the signal. It uses gloo on the host, also with CUDA, and does not synchronise the device's stream.

    Outside of the `with`, in forked processes, and in threads other than the main one, SIGTERM keeps its previous
    effect. Once it has ended the loop, further ones are ignored: a launcher sends it to the other ranks as soon as one
    has exited, and they may still be writing.

    With NCCL, a rank whose peer has died waits on the device and runs no Python, so that the handler would not run
    either. `_Watch` then ends the process, as SIGTERM does without a handler.
    """

    def __init__(self) -> None:
        self.received = False
        """This process has received SIGTERM."""
        self.stopped = False
        """All ranks know that a rank has received SIGTERM."""
        self.is_between_steps = False
        """The loop saves or evaluates, of which one call may take long; set by a loop that knows."""
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._process = os.getpid()
        self._ends = False
        """The process is about to exit, and ignores SIGTERM until then."""
        self._watch: _Watch | None = None
        self._last_s, self._longest_s = math.nan, 0.0
        """When the last step ended, and the longest step, in seconds."""

    def __enter__(self) -> StopSignal:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def start(self) -> None:
        self.received = self.stopped = self.is_between_steps = self._ends = False
        if threading.current_thread() is threading.main_thread():
            self._process, before = os.getpid(), signal.signal(signal.SIGTERM, self._note)
            if before != self._note:  # our handler stays after SIGTERM has ended a loop
                self._before = before
            if may_wait_on_device():
                self._watch = _Watch(lambda: max(_PATIENCE_S, 2 * self._longest_s), lambda: self.is_between_steps)

    def agreed(self) -> bool:
        """Return whether a rank had received SIGTERM by the end of the previous step; the same on every rank.

        Collective, once per step.
        """
        now = time.monotonic()
        self._longest_s, self._last_s = max(self._longest_s, now - self._last_s), now
        if (group := step_group()) is None:
            self.stopped = self.received
        elif self._pending is not None:
            flag, work = self._pending
            work.wait()
            self.stopped = self.stopped or bool(flag.item())
        if self.stopped:
            self._end_watch()  # the checkpoint that follows may take long in one call
        if group is None:
            return self.stopped
        flag = torch.tensor([self.received], dtype=torch.int32)
        self._pending = (flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group, async_op=True))
        return self.stopped

    def finish(self) -> None:
        """Restore the SIGTERM handler; if SIGTERM ended the loop, keep ignoring it until the process exits.

        Collective.
        """
        try:
            if self._pending is not None:
                self._pending[1].wait()
            self._ends = self.stopped
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Restore the SIGTERM handler after an error, without waiting for the pending all-reduce."""
        self._end_watch()
        if not self._ends and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
        self._pending = None

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def exit(self) -> None:
        """Exit with `EXIT_CODE` if SIGTERM ended the loop, else do nothing.

        First wait until a checkpoint that is written in the background is complete, which is collective.

        Raises:
            Stopped: SIGTERM ended the loop.
            CheckpointError: the checkpoint could not be written; on every rank.
        """
        if self.stopped:
            self._ends = True
            for wait in list(waits_in_background):
                wait()
            raise Stopped(EXIT_CODE)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Record the signal; end a forked process, which is not a rank."""
        self.received = True
        if os.getpid() != self._process:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


def may_wait_on_device() -> bool:
    """Return whether collectives run on NCCL, which leaves a rank waiting on its device, without an error, when
    another rank ends.
    """
    return dist.is_initialized() and "nccl" in dist.get_backend_config()


_ran = threading.Event()


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _note_progress(unused: object) -> int:
    """Record that the main thread runs Python: it makes pending calls between two bytecodes.

    Here because Python must find it whenever.
    """
    _ran.set()
    return 0


class _Watch(threading.Thread):
    """End this process if SIGTERM finds the main thread in one call that does not return, such as `loss.item()` on a
    device that waits.

    Python runs a signal's handler between two bytecodes of the main thread, but writes its number to the wake-up
    descriptor at once. A forked process must not: `multiprocessing.Pool` sends its workers SIGTERM, which this process
    has not received.
    """

    _active: ClassVar[set[_Watch]] = set()

    def __init__(self, patience_s: Callable[[], float], may_wait: Callable[[], bool]) -> None:
        """Start to watch, unless another library (such as an event loop) has the wake-up descriptor."""
        super().__init__(name="hf_osdp SIGTERM", daemon=True)
        self._patience_s, self._may_wait = patience_s, may_wait
        self._ended = threading.Event()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            self._ended.set()
        else:
            self._active.add(self)
        self.start()

    def end(self) -> None:
        """Stop watching."""
        if not self._ended.is_set():
            self._ended.set()
            self._active.discard(self)
            signal.set_wakeup_fd(-1)
        os.write(self._write, bytes(1))  # wakes the thread up, also if forked processes hold this end too
        os.close(self._write)

    @classmethod
    def leave_in_fork(cls) -> None:
        """Stop writing a forked process's signals to the pipe."""
        if cls._active:
            signal.set_wakeup_fd(-1)

    def run(self) -> None:
        while (number := os.read(self._read, 1)) and number != bytes(1):
            if number[0] == signal.SIGTERM and not self._ended.is_set():
                self._wait_for_progress()
        os.close(self._read)

    def _wait_for_progress(self) -> None:
        """Exit once the main thread has run no bytecode for longer than the patience."""
        while not self._ended.wait(_POLL_S):
            _ran.clear()
            ctypes.pythonapi.Py_AddPendingCall(_note_progress, None)
            patience_s = self._patience_s()
            if not (_ran.wait(patience_s) or _ran.is_set() or self._may_wait() or self._ended.is_set()):
                text = (
                    f"SIGTERM: this rank has waited {patience_s:.0f} s in one call, as it does after another rank has"
                    " ended;"
                    " it exits without a checkpoint.\n"
                )
                os.write(2, text.encode())
                os._exit(EXIT_CODE)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_Watch.leave_in_fork)
