"""SIGTERM on one rank becomes one decision of all, between two steps."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

EXIT_CODE = 128 + signal.SIGTERM
"""What a shell reports of a process that SIGTERM ended: the launcher knows that the run is not over."""


class StopSignal:
    """Notes SIGTERM, and tells all ranks at the same step.

    ```python
    with StopSignal() as stop:
        for batch in loader:
            ...
            optimizer.step()
            if stop.agreed():            # on every rank, after every optimizer step
                accelerator.save_state("out/checkpoint-last")
                break
    stop.exit()                          # with code 143, where SIGTERM ended the loop
    ```

    The ranks' answers travel while the next step runs, so that nobody waits for them: all stop one step after the signal. On CUDA they
    go through the host, and the device's stream is not waited for.

    Outside of the `with`, and in threads other than the main one, SIGTERM does what it did.
    """

    def __init__(self) -> None:
        self.received = False
        """SIGTERM came to this process."""
        self.stopped = False
        """A rank had it, and all know."""
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._before: object = None
        self._installed = False

    def __enter__(self) -> StopSignal:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def start(self) -> None:
        """Listen. Collective."""
        self.received = self.stopped = False
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._installed = True

    def finish(self) -> None:
        """Listen no more. Collective."""
        try:
            if self._pending is not None:
                self._pending[1].wait()
            if self._group is not None:
                dist.destroy_process_group(self._group)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Listen no more, where an error ended training: what the ranks had begun together stays as it is."""
        if self._installed:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            self._installed = False
        self._group = self._pending = None

    def exit(self) -> None:
        """End the process where SIGTERM ended the loop, with the code that says so; nothing where it did not."""
        if self.stopped:
            sys.exit(EXIT_CODE)

    def agreed(self) -> bool:
        """Whether a rank had its signal before the step before this one ended; the same on every rank. Collective, once a step."""
        if self._group is None:
            self.stopped = self.received
            return self.stopped
        if self._pending is not None:
            flag, work = self._pending
            work.wait()
            self.stopped = self.stopped or bool(flag.item())
        flag = torch.tensor([self.received], dtype=torch.int32)
        self._pending = (flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True))
        return self.stopped

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
