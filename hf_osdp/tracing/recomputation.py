"""Choose the operators of a block whose outputs are worth saving when the rest of its forward runs again in backward.

For each amount of memory, the best outputs to save are those with the most time per byte: a *frontier* from saving
only the input to saving all that autograd saves. An operator's time is estimated on fake tensors from its FLOPs and
bytes at rough rates; devices differ, but rarely in the order of operators. The search receives each policy with its
traced bytes and work, and uses the device's own rates.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import DescriptionError
from ..modeling.selective import CallCounter, operator_name
from ..planner.description import Recomputation, Segment
from .tensors import storages_in
from .work import PhaseRecord

_FLOPS_PER_BYTE = {"cpu": 20.0, "cuda": 150.0}
"""FLOPs that a device computes while it moves a byte: about 0.5 TFLOP/s at 25 GB/s, 312 TFLOP/s at 2 TB/s (A100,
bf16).
"""
_MAX_POLICIES = 6
"""Most policies to recompute a block, without saving all: each is traced, and more hardly improve the frontier."""
_MIN_GAIN = 0.003
"""Least share of the frontier's area that a policy must add."""
_MODE_OVERHEAD = 1.5
"""Additional time of an operator inside `selective_contexts`, as a multiple of its own dispatch: about 8 µs (torch
2.13, CPU).
"""
_NAMED_SHARE = 0.05
"""Operators are named if their output exceeds this share of the largest one."""

Point = tuple[float, float]
"""Bytes that are saved, and work that backward has to repeat."""


@dataclass(slots=True, kw_only=True)
class LoggedCall:
    """One operator of a block's forward."""

    call: str
    """Its name and number, see `Recomputation.saved_calls`."""
    module: str
    """Name, inside the block, of the module that ran it."""
    flops: int
    traffic_bytes: int
    saved_bytes: int = 0
    """Bytes of its outputs; 0 if they cannot be saved: views, tensors written in place, outputs of the block."""


class OperatorLog(TorchDispatchMode):
    """List the operators of one call of a block, each with the module that ran it; casts are not listed.

    Raises:
        DescriptionError: inside the context, if the block draws from its own `torch.Generator`, which checkpointing
            does not restore, or if this is the second run of a call, and reads what the first has kept or changed.
    """

    def __init__(self, block: nn.Module, first: OperatorLog | None = None) -> None:
        """Log a run of a block; in backward it is the second one of a call whose log is `first`."""
        super().__init__()
        self._block, self._first = block, first
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages that operators have made, by address."""
        self._read: dict[tuple[str, int, int], tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """Storages that calls have read, with their versions, by the call, its number of tensors, and the address."""
        self._counter = CallCounter()
        self._running = [""]
        self._hooks = ExitStack()
        self._storages: dict[int, LoggedCall] = {}
        """The call that made each storage; the latest one if an address was used again."""
        self.calls: list[LoggedCall] = []
        """The calls in the order in which they ran."""

    def __enter__(self) -> OperatorLog:
        for name, module in self._block.named_modules():
            if name:
                self._hooks.callback(
                    module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)).remove
                )
                self._hooks.callback(module.register_forward_hook(self._leave_module, always_call=True).remove)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._hooks.close()

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs, call = kwargs or {}, self._counter.name(func)
        if kwargs.get("generator") is not None:
            raise DescriptionError(
                f"{type(self._block).__name__} draws random numbers from its own torch.Generator; recomputation would"
                " draw different ones. Draw from torch's default generator to allow it."
            )
        given = list(storages_in((args, kwargs)))
        for tensor, storage in given:
            self._note_read((call or operator_name(func), len(given), storage._cdata), tensor._version, storage)
        before = {storage._cdata for _, storage in given}
        result = func(*args, **kwargs)
        for _, storage in storages_in(result):
            if storage._cdata not in before:
                self._made[storage._cdata] = weakref.ref(storage)
        if func._schema.is_mutable:
            self._exclude(before)  # the operator writes some of them
        if call is None:
            return result
        cost = PhaseRecord()
        cost.count(func, args, kwargs, result)
        flops = cost.matmul_flops + cost.attention_flops
        logged = LoggedCall(call=call, module=self._running[-1], flops=flops, traffic_bytes=cost.traffic_bytes)
        made = {storage._cdata: storage.nbytes() for _, storage in storages_in(result)}
        if made and not func._schema.is_mutable and not before & set(made):
            logged.saved_bytes = sum(made.values())
            self._storages |= dict.fromkeys(made, logged)
        self.calls.append(logged)
        return result

    def _note_read(self, key: tuple[str, int, int], version: int, storage: torch.UntypedStorage) -> None:
        self._read[key] = weakref.ref(storage), version
        if self._first is None or storage._cdata in self._made:
            return
        seen, before = self._first._read.get(key, (None, version))
        made = self._first._made.get(storage._cdata)
        was_read = seen is not None and seen() is storage
        if version != before if was_read else made is not None and made() is storage:
            raise DescriptionError(
                f"{type(self._block).__name__} keeps tensors between its runs, such as a cache that it fills in"
                " training; recomputation would run with them changed. Keep none in training to allow it."
            )

    def returned(self, output: object) -> None:
        """Exclude what the block returns: its caller may change it in place, and the next block saves it as its
        input.
        """
        self._exclude({storage._cdata for _, storage in storages_in(output)})
        self._storages.clear()

    def _exclude(self, storages: set[int]) -> None:
        for key in storages & set(self._storages):
            self._storages[key].saved_bytes = 0

    def _leave_module(self, *_: object) -> None:
        self._running.pop()


def recomputations(calls: Sequence[LoggedCall], saved_bytes: int, device_type: str) -> tuple[Recomputation, ...]:
    """Return policies to recompute a block of these operators, from the one that saves only the input to the one that
    saves most.

    Saving all takes `saved_bytes` in addition to the input, at the batch size of `calls`.
    """
    work = {op.call: _work(op.flops, op.traffic_bytes, device_type) for op in calls}
    whole = sum(work.values()) or 1.0
    savable = (op for op in calls if op.saved_bytes and work[op.call])
    best_first = sorted(savable, key=lambda op: work[op.call] / op.saved_bytes, reverse=True)
    corners = [(0.0, whole)]
    for op in best_first:
        nbytes, left = corners[-1]
        corners.append((nbytes + op.saved_bytes, left - work[op.call]))
    corners.append((float(max(1, saved_bytes)), 0.0))
    counts = corner_indices(corners, most=_MAX_POLICIES, least_gain=_MIN_GAIN)[:-1]
    order = {op.call: number for number, op in enumerate(calls)}
    names = _names(calls)
    policies = []
    for count in counts:
        saved = sorted(best_first[:count], key=lambda op: order[op.call])
        largest = max((op.saved_bytes for op in saved), default=0)
        named = tuple(dict.fromkeys(names[op.call] for op in saved if op.saved_bytes > _NAMED_SHARE * largest))
        share = round(max(0.0, corners[count][1] / whole), 3)
        policies.append(Recomputation(saved_calls=tuple(op.call for op in saved), share=share, names=named))
    return tuple(policies)


def corner_indices(points: Sequence[Point], *, most: int, least_gain: float) -> list[int]:
    """Return the indices of at most `most` corners of the lower hull of points, by rising bytes, and of the last
    point.

    Points are left out if they have more bytes than the last, or if a mix of two others is as good. Then the corners
    that add least to the hull's area are removed: those above `most`, and those below `least_gain` of the rectangle
    around the first and the last point.
    """
    last = len(points) - 1
    hull: list[int] = []
    for index in sorted(
        (i for i, p in enumerate(points) if i == last or p[0] < points[last][0]), key=lambda i: points[i]
    ):
        if hull and points[index][0] == points[hull[-1]][0]:
            continue
        while len(hull) > 1 and _triangle(points[hull[-2]], points[hull[-1]], points[index]) <= 0:
            hull.pop()
        hull.append(index)
    whole = abs((points[last][0] - points[0][0]) * (points[0][1] - points[last][1]))
    while len(hull) > 2:
        gains = [_triangle(points[a], points[b], points[c]) for a, b, c in zip(hull, hull[1:], hull[2:], strict=False)]
        least = min(range(len(gains)), key=gains.__getitem__)
        if len(hull) <= most + 1 and gains[least] > least_gain * whole:
            break
        del hull[least + 1]
    return hull


def worthwhile(plain: Segment, policies: Sequence[Segment], device_type: str, samples: int) -> list[int]:
    """Return the indices of the policies that beat a mix of their neighbours, as traced; the first always is one."""

    def point(segment: Segment) -> Point:
        backward = segment.backward
        return segment.saved_bytes(samples), _work(
            backward.flops(samples), backward.traffic_bytes(samples), device_type
        )

    corners = corner_indices([*map(point, policies), point(plain)], most=len(policies), least_gain=0.0)
    return sorted({0, *corners} - {len(policies)})


def with_modes(costs: Segment, policy: Recomputation) -> Segment:
    """Add the CPU time of the modes that save and replay outputs to the costs, as additional operators."""
    if not policy.saved_calls:
        return costs
    in_modes = costs.forward.operators.scaled(
        _MODE_OVERHEAD, constants=True
    )  # in forward, and about as many in its second run
    forward, backward = (
        replace(phase, operators=phase.operators.plus(in_modes)) for phase in (costs.forward, costs.backward)
    )
    return replace(costs, forward=forward, backward=backward)


def _work(flops: float, traffic_bytes: float, device_type: str) -> float:
    """Return the work in bytes: those that move, plus those that could move in the time of the FLOPs."""
    return flops / _FLOPS_PER_BYTE[device_type] + traffic_bytes


def _triangle(a: Point, b: Point, c: Point) -> float:
    """Return twice the area of a triangle: positive if b is below the line from a to c."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _names(calls: Sequence[LoggedCall]) -> dict[str, str]:
    """Return a readable name for each call: for a product the shortest distinct name of its module, else the
    operator.
    """
    modules = {op.module for op in calls if op.flops and op.module}
    endings = Counter(name.split(".")[-1] for name in modules)

    def name_of(op: LoggedCall) -> str:
        operator = op.call.partition("#")[0]
        if not op.flops or operator == "attention" or not op.module:
            return operator
        parts = op.module.split(".")
        return parts[-1] if endings[parts[-1]] == 1 else ".".join(parts[-2:])

    return {op.call: name_of(op) for op in calls}
