"""Stop all ranks after the same step when one of them has received SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from .process_group import gloo_group

EXIT_CODE = 128 + signal.SIGTERM
"""What a shell reports of a process that SIGTERM ended: the launcher knows that the run is not over."""
waits_in_background: dict[Callable[[], None], None] = {}
"""What `StopSignal.exit` waits for, on every rank in the same order: collective calls that return, or raise, when something is done."""


class Stopped(SystemExit):
    """SIGTERM ended the loop, at the same step on every rank."""


class StopSignal:
    """Note SIGTERM, and tell all ranks at the same step.

    ```python
    with StopSignal() as stop:
        for batch in loader:
            ...
            optimizer.step()
            if stop.agreed():            # on every rank, after every optimizer step
                accelerator.save_state("out/checkpoint-last")
                break
    stop.exit()                          # where SIGTERM ended the loop: once the checkpoint is complete, with code 143
    ```

    The ranks' answers travel while the next step runs, so that nobody waits for them: all stop one step after the signal. On CUDA they
    go through the host, and the device's stream is not waited for.

    Outside of the `with`, in forks, and in threads other than the main one, SIGTERM does what it did. Where it ended the loop, a further
    one does nothing any more: a launcher sends it to the other ranks as soon as one has ended, and they may still be writing.
    """

    def __init__(self) -> None:
        self.received = False
        """SIGTERM came to this process."""
        self.stopped = False
        """A rank had it, and all know."""
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._process = os.getpid()
        self._ends = False
        """The process is to end: SIGTERM does nothing more until it has."""

    def __enter__(self) -> StopSignal:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def start(self) -> None:
        self.received = self.stopped = self._ends = False
        if threading.current_thread() is threading.main_thread():
            self._process, before = os.getpid(), signal.signal(signal.SIGTERM, self._note)
            self._before = self._before if before == self._note else before  # it stayed where SIGTERM ended a loop before

    def agreed(self) -> bool:
        """Return whether a rank had its signal before the step before this one ended; the same on every rank. Collective, once a step."""
        if (group := gloo_group()) is None:
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
        """Listen no more; where SIGTERM ended the loop, it does nothing more until the process ends. Collective."""
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
        """End the process where SIGTERM ended the loop, with the code that says so; nothing where it did not.

        Collective where a checkpoint is still being written in the background: it is complete then.

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
        """Note the signal; a fork, which is no rank, ends by it."""
        self.received = True
        if os.getpid() != self._process:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
