"""Reduce gradients between replicas in place of FSDP2's all-reduce: in a format of fewer bits, or beside backward."""

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

    The thread ends with the process: one that waited at its end would wait for ranks that have failed.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._given: queue.Queue[Callable[[], None]] = queue.Queue()
        self._errors: list[BaseException] = []

    def run(self, function: Callable[[], None]) -> None:
        """Begin the function when those before it have ended."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="reduce between replicas")
            self._thread.start()
        self._given.put(function)

    def wait(self) -> None:
        """Return when all functions have ended, those from before an interrupted wait too; raise what the first of them raised."""
        self._given.join()
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def _work(self) -> None:
        while True:
            function = self._given.get()
            try:
                function()
            except BaseException as error:
                self._errors.append(error)
            del function
            self._given.task_done()


@dataclass(eq=False, kw_only=True)
class Replicas:
    """Stands in for the group of a unit's replicas, in which FSDP2 all-reduces what the unit's shard group has reduced."""

    group: dist.ProcessGroup
    transport: WireTransport | None
    """Of fewer bits; None reduces as the group itself does."""
    background: Background | None = None
    """Where reductions run whose result nobody reads before backward ends."""
    is_read: Callable[[torch.Tensor], bool] = field(default=lambda tensor: True)
    """Whether FSDP2 reads a reduced tensor at once."""

    def __eq__(self, other: object) -> bool:
        """Equal the group itself, which torch looks up to log what a collective raised."""
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
                # An average alone leaves FSDP2 nothing to divide by afterwards.
                if options.reduceOp == dist.ReduceOp.AVG and not is_listened() and not self.is_read(tensor):
                    self.background.run(reduce)
                    continue
                self.background.wait()  # collectives of a group keep their order, and a gradient that is added to is there
            with announced(Collective.ALL_REDUCE, self.group, tensor):
                reduce()
        return Works((), held=())

    def _reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp) -> None:
        if self.transport is not None:
            self.transport.all_reduce(tensor, operation, self.group)
        else:
            dist.all_reduce(tensor, op=operation, group=self.group)
