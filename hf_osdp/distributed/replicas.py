"""Reduce gradients between replicas in place of FSDP2's all-reduce: in a format of fewer bits, or overlapped with backward."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from ..planner.hardware import Collective
from .collectives import Works, announced, is_listened
from .wire import WireTransport


class Background:
    """Run functions one after the other in a thread, and wait for all of them.

    The thread is a daemon: joining it when the process exits would wait for ranks that have failed.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue()
        self._errors: list[BaseException] = []

    def run(self, function: Callable[[], None]) -> None:
        """Queue the function; it runs when those before it have ended."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="reduce between replicas")
            self._thread.start()
        self._queue.put(function)

    def wait(self) -> None:
        """Wait until all functions have ended, including those before an interrupted wait; raise the first error."""
        self._queue.join()
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def _work(self) -> None:
        while True:
            function = self._queue.get()
            try:
                function()
            except BaseException as error:
                self._errors.append(error)
            del function
            self._queue.task_done()


@dataclass(eq=False, kw_only=True)
class Replicas:
    """Replaces the process group of a unit's replicas, in which FSDP2 all-reduces gradients after the reduce-scatter."""

    group: dist.ProcessGroup
    transport: WireTransport | None
    """Sends fewer bits; None uses the group's own all-reduce."""
    background: Background | None = None
    """Runs reductions whose result is not read before backward ends."""
    is_read: Callable[[torch.Tensor], bool] = field(default=lambda tensor: True)
    """Whether a reduced tensor is read before backward ends."""

    def __eq__(self, other: object) -> bool:
        """Equal the group itself: torch looks it up to log an error of a collective."""
        return other is self or other is self.group

    def __hash__(self) -> int:
        return hash(self.group)

    def size(self) -> int:
        """Return the number of replicas."""
        return self.group.size()

    def rank(self) -> int:
        """Return this rank's place among the replicas."""
        return self.group.rank()

    def allreduce(self, tensors: Sequence[torch.Tensor], options: dist.AllreduceOptions) -> dist.Work:
        """Reduce in place, as `dist.all_reduce` asks a process group to."""
        for tensor in tensors:
            reduce = partial(self._reduce, tensor, options.reduceOp)
            if self.background is not None:
                # Only after an average does FSDP2 not divide the result.
                if options.reduceOp == dist.ReduceOp.AVG and not is_listened() and not self.is_read(tensor):
                    self.background.run(reduce)
                    continue
                self.background.wait()  # keeps the order of the group's collectives, and completes gradients before others are added
            with announced(Collective.ALL_REDUCE, self.group, tensor):
                reduce()
        return Works((), held=())

    def _reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp) -> None:
        if self.transport is not None:
            self.transport.all_reduce(tensor, operation, self.group)
        else:
            dist.all_reduce(tensor, op=operation, group=self.group)
