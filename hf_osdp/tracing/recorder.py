"""Record what operators allocate and compute in each segment of the forward pass, in forward and in backward.

A segment is one call of a unit's module, or what the root does between two such calls. In backward an operator belongs
to the segment in which autograd made the node that runs.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import _get_sequence_nr

from ..errors import DescriptionTimeoutError
from .kernel_scratch import Processors, kernel_scratch
from .known_values import KnownValues, is_known
from .memory_tracker import MemoryTracker
from .repeated import Repeatable, keyed, seen_operators
from .tensors import tensors_in
from .work import PhaseRecord

_DEVICE_OF = torch.ops.prim.device.default


@dataclass(slots=True, kw_only=True)
class SegmentRecord:
    """The record of one segment at one batch size; live bytes are those of the whole trace."""

    unit: int
    first_node: int
    copy_of: SegmentRecord | None = None
    """The equal segment that was traced instead of this one."""
    start_bytes: int = 0
    end_bytes: int = 0
    sent_bytes: int = 0
    """Bytes that were offloaded to the host until backward."""
    gradients: list[str] = field(default_factory=list)
    """Names of the parameters whose gradients its backward made, if a name was passed for them."""
    input_gradient_bytes: int = 0
    """Live bytes above `start_bytes` after its backward: the gradient of its input, less an input freed with it."""
    arrival_bytes: int = 0
    """Live bytes above `start_bytes`, without gradients of parameters, when the last of these had come."""
    release: Callable[[], None] | None = None
    """Removes the tensors that its modules store as attributes."""
    freed: list[tuple[SegmentRecord, int]] = field(default_factory=list)
    """Bytes that later segments freed in forward, each with the segment."""
    kept_bytes: int = 0
    """Bytes that `release` freed after backward: they stay live until the next step, with all that autograd holds
    for them.
    """
    forward: PhaseRecord = field(default_factory=PhaseRecord)
    backward: PhaseRecord = field(default_factory=PhaseRecord)


class Recorder(MemoryTracker):
    """Split a forward and backward pass on fake tensors into segments, and count their bytes as the tracker does.

    Call `enter` and `leave` around each unit's module, `begin_backward` between the passes and `close_backward` after
    them. Operators outside of units belong to the root, unit 0.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        known: KnownValues,
        *,
        block_bytes: int = 1,
        processors: Processors | None = None,
        deadline_s: float = math.inf,
    ) -> None:
        """Record operators on a mode's tensors, whose values are in `known`, in storages of whole blocks, and what
        kernels for these processors take while they run.

        Operators raise DescriptionTimeoutError after `deadline_s` of the process's time.
        """
        super().__init__(block_bytes=block_bytes)
        self._processors = processors
        self._mode, self._known, self._seen = mode, known, seen_operators()
        self.records: list[SegmentRecord] = []
        self.inside = False
        self._deadline_s, self._operators = deadline_s, 0
        self._current = self._pending = SegmentRecord(unit=0, first_node=_get_sequence_nr())
        self._in_backward = False
        self._with_gradients: list[nn.Parameter] = []
        self._last_arrival = 0
        """Live bytes when the last of their gradients had come."""
        self._come_bytes = 0
        """Bytes of their gradients."""
        self._first_nodes: list[int] = []
        self._owners: dict[int, SegmentRecord] = {}
        """The segment that made each live storage."""
        self._end_node = 0

    def enter(self, unit: int, copy_of: SegmentRecord | None = None) -> SegmentRecord:
        self.inside = True
        self._pending = SegmentRecord(unit=unit, first_node=_get_sequence_nr(), copy_of=copy_of)
        return self._pending

    def leave(self) -> None:
        """End the unit's segment; the operators that follow belong to the root."""
        self.inside = False
        self._pending = SegmentRecord(unit=0, first_node=_get_sequence_nr())

    def begin_backward(self) -> None:
        """End forward; call this after releasing everything that does not outlive it."""
        self._current.end_bytes = self.current_bytes
        self._in_backward = True
        self._first_nodes = [record.first_node for record in self.records]
        self._end_node = _get_sequence_nr()
        self._enter_backward(self.records[-1])

    def note_gradient(self, parameter: nn.Parameter, name: str | None) -> None:
        """Note a parameter's gradient, which is freed when the segment's backward ends; for
        `register_post_accumulate_grad_hook`.
        """
        self._with_gradients.append(parameter)
        self._last_arrival = self.current_bytes
        if parameter.grad is not None:  # none has come where no path from the loss gave one
            self._come_bytes += self._storages[parameter.grad.untyped_storage()._cdata].nbytes
        if name is not None:
            self._current.gradients.append(name)

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # torch queries it at every operator
        self._operators += 1
        if time.process_time() > self._deadline_s:
            raise DescriptionTimeoutError(f"{self._operators} operators")
        with torch._C.DisableTorchFunction():  # so that reading shapes does not go through function modes
            args, kwargs = self._known.with_fakes(func, args, kwargs or {}, self._mode)
            self._switch_segment()
            phase = self._current.backward if self._in_backward else self._current.forward
            key, given = keyed(func, args, kwargs)
            result = self._repeated(key, given, phase)
            if result is None:
                work = PhaseRecord()
                result = super().__torch_dispatch__(func, types, args, kwargs)
                work.count(func, args, kwargs, result)
                phase.add(work)
                if key is not None and key not in self._seen:
                    self._seen[key] = Repeatable.of(func, given, result, is_known(func, result), work)
            self._note_level(phase)
            scratch = None if self._processors is None else kernel_scratch(func, args, self._processors)
            if scratch is not None:
                phase.scratch.append((len(phase.levels) - 1, scratch))
        return result

    def _update(self, storage: torch.UntypedStorage) -> None:
        self._owners.setdefault(storage._cdata, self._current)
        super()._update(storage)

    def _forget(self, key: int) -> None:
        owner = self._owners.pop(key)
        if owner is not self._current and not self._in_backward:
            owner.freed.append((self._current, self._storages[key].nbytes))
        super()._forget(key)

    def _repeated(self, key: object, given: Sequence[torch.Tensor], phase: PhaseRecord) -> object:
        """Make and count an operator's result from an earlier one with the same key; return None if the operator
        has to run.
        """
        seen = None if key is None else self._seen.get(key)
        if seen is None or (seen.is_small and self._known.knows_all(given)):
            return None
        result = seen.repeat(given, self._mode)
        for tensor in () if seen.is_view else tensors_in(result):
            self._update(tensor.untyped_storage())
        phase.add(seen.work)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False to spare each operator a wrapper: code that dynamo compiles runs outside of this mode."""
        return False

    def _switch_segment(self) -> None:
        """Switch to the segment of the current operator; a pending segment opens only now, as earlier frees belong
        to the previous one.
        """
        if self._in_backward:
            self._switch_backward_segment()
        elif not self.records or self._pending is not self._current:
            self._current.end_bytes = self.current_bytes
            self._current = self._pending
            self._current.start_bytes = self.current_bytes
            self._note_level(self._current.forward)
            self.records.append(self._current)

    def _switch_backward_segment(self) -> None:
        """Switch to the segment whose autograd node runs; gradient accumulation and recomputation stay in the
        current one.
        """
        node = torch._C._current_autograd_node()
        number = self._end_node if node is None else node._sequence_nr()
        if number >= self._end_node:
            return
        record = self.records[max(0, bisect_right(self._first_nodes, number) - 1)]
        if record is not self._current:
            self.close_backward()
            self._enter_backward(record)

    def _enter_backward(self, record: SegmentRecord) -> None:
        self._current = record
        self._note_level(record.backward)

    def _note_level(self, phase: PhaseRecord) -> None:
        phase.levels.append(self.current_bytes)
        phase.come.append(self._come_bytes)

    def close_backward(self) -> None:
        record, before = self._current, self.current_bytes
        for parameter in self._with_gradients:
            parameter.grad = None
        if self._with_gradients:
            gradients = before - self.current_bytes
            record.arrival_bytes = max(0, self._last_arrival - gradients - record.start_bytes)
        self._with_gradients.clear()
        self._come_bytes = 0
        if record.release is not None:
            before = self.current_bytes
            record.release()
            record.kept_bytes += before - self.current_bytes
        record.input_gradient_bytes = max(0, self.current_bytes - record.start_bytes)
