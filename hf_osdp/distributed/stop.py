"""Stop all ranks after the same step when one of them receives SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from .process_group import step_group

EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a process that SIGTERM ended, by which the launcher knows that the run is not finished."""
waits_in_background: dict[Callable[[], None], None] = {}
"""Collective calls that `StopSignal.exit` makes, on every rank in the same order, to wait for work in the
background; they may raise.
"""


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

    With NCCL, a rank whose peer has died waits on the device and runs no Python, so that the handler does not run
    either: the launcher ends it by SIGKILL.
    """

    def __init__(self) -> None:
        self.received = False
        """This process has received SIGTERM."""
        self.stopped = False
        """All ranks know that a rank has received SIGTERM."""
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._process = os.getpid()
        self._ends = False
        """The process is about to exit, and ignores SIGTERM until then."""

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
        self.received = self.stopped = self._ends = False
        if threading.current_thread() is threading.main_thread():
            self._process, before = os.getpid(), signal.signal(signal.SIGTERM, self._note)
            if before != self._note:  # our handler stays after SIGTERM has ended a loop
                self._before = before

    def agreed(self) -> bool:
        """Return whether a rank had received SIGTERM by the end of the previous step; the same on every rank.

        Collective, once per step.
        """
        if (group := step_group()) is None:
            self.stopped = self.received
            return self.stopped
        if self._pending is not None:
            flag, work = self._pending
            work.wait()
            self.stopped = self.stopped or bool(flag.item())
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
        if not self._ends and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
        self._pending = None

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
