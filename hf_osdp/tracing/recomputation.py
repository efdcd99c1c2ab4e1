"""Which operators of a block are worth saving where the rest of its forward runs again in backward.

For each amount of memory the best to save are those with the most time for each byte: a *frontier* from saving the input alone to saving
all that autograd asks for. What an operator takes is found on fake tensors, at a rough rate of FLOPs and bytes: devices differ in it, but
not so much that the order of operators does. The search gets each way with its bytes and work, as traced, and the device's own rates.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import DescriptionError
from ..modeling.selective import CallCounter
from ..planner.description import Recomputation, RecomputedSegment, Segment
from .recorder import PhaseRecord
from .tensors import storages_in

_log = logging.getLogger(__name__)
_FLOPS_PER_BYTE = {"cpu": 20.0, "cuda": 150.0}
"""Products that a device makes while it moves a byte: about 0.5 TFLOP/s at 25 GB/s, 312 TFLOP/s at 2 TB/s (A100, bf16)."""
_MOST_WAYS = 6
"""Of a block, beside saving all: more hardly add to the frontier, and each is traced."""
_LEAST_GAIN = 0.003
"""Part of the frontier's whole area by which a way must add to it."""
_OPERATORS_OF_MODES = 1.5
"""What an operator takes longer inside `selective_contexts`, as a multiple of its own dispatch: some 8 µs (torch 2.13, CPU)."""
_NAMED = 0.05
"""Part of the largest output from which an operator is named."""

Point = tuple[float, float]
"""Bytes that are saved, and work that is left for backward."""


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
    """Of its outputs; 0 where they cannot be saved: views, what is written in place, what the block returns. Casts are not listed."""


class OperatorLog(TorchDispatchMode):
    """List the operators of one call of a block, whose modules are told apart while the log is on.

    Raises:
        DescriptionError: inside, where the block draws from a `torch.Generator` of its own, which checkpointing does not restore.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._block = block
        self._counter = CallCounter()
        self._running = [""]
        self._hooks = ExitStack()
        self._storages: dict[int, LoggedCall] = {}
        """By storage, the call that made it; where it was freed and its address used again, the later one."""
        self.calls: list[LoggedCall] = []
        """In the order in which they ran."""

    def __enter__(self) -> OperatorLog:
        for name, module in self._block.named_modules():
            if name:
                self._hooks.callback(module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)).remove)
                self._hooks.callback(module.register_forward_hook(self._leaving, always_call=True).remove)
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
            _warn_of_generator(type(self._block).__name__)
            raise DescriptionError(f"{type(self._block).__name__} draws from a torch.Generator of its own.")
        before = {storage._cdata for _, storage in storages_in((args, kwargs))}
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._exclude(before)  # some of them are written
        if call is None:
            return result
        cost = PhaseRecord()
        cost.count(func, args, kwargs, result)
        logged = LoggedCall(call=call, module=self._running[-1], flops=cost.matmul_flops, traffic_bytes=cost.traffic_bytes)
        made = {storage._cdata: storage.nbytes() for _, storage in storages_in(result)}
        if made and not func._schema.is_mutable and not before & set(made):
            logged.saved_bytes = sum(made.values())
            self._storages |= dict.fromkeys(made, logged)
        self.calls.append(logged)
        return result

    def returned(self, output: object) -> None:
        """Leave out what the block returns: its caller may change it in place, and the next block saves it as its input."""
        self._exclude({storage._cdata for _, storage in storages_in(output)})
        self._storages.clear()

    def _exclude(self, storages: set[int]) -> None:
        for key in storages & set(self._storages):
            self._storages[key].saved_bytes = 0

    def _leaving(self, *_: object) -> None:
        self._running.pop()


@functools.cache
def _warn_of_generator(block: str) -> None:
    _log.warning(
        "%s draws random numbers from a torch.Generator of its own; recomputation would draw others, so that no block is recomputed."
        " Draw from torch's default generator to allow it.", block,
    )  # fmt: skip


def recomputations(calls: Sequence[LoggedCall], beside_input: int, device_type: str) -> tuple[Recomputation, ...]:
    """Return ways to recompute a block of these operators, from that which saves its input alone to that which saves most.

    Saving all takes `beside_input` bytes beyond the input, at the batch size of `calls`.
    """
    work = {one.call: _work(one.flops, one.traffic_bytes, device_type) for one in calls}
    whole = sum(work.values()) or 1.0
    paying = (one for one in calls if one.saved_bytes and work[one.call])
    worth = sorted(paying, key=lambda one: work[one.call] / one.saved_bytes, reverse=True)
    corners = [(0.0, whole)]
    for one in worth:
        nbytes, left = corners[-1]
        corners.append((nbytes + one.saved_bytes, left - work[one.call]))
    corners.append((float(max(1, beside_input)), 0.0))
    counts = corner_indices(corners, most=_MOST_WAYS, least_gain=_LEAST_GAIN)[:-1]
    order = {one.call: number for number, one in enumerate(calls)}
    names = _names(calls)
    ways = []
    for count in counts:
        saved = sorted(worth[:count], key=lambda one: order[one.call])
        largest = max((one.saved_bytes for one in saved), default=0)
        named = tuple(dict.fromkeys(names[one.call] for one in saved if one.saved_bytes > _NAMED * largest))
        share = round(max(0.0, corners[count][1] / whole), 3)
        ways.append(Recomputation(saved_calls=tuple(one.call for one in saved), share=share, names=named))
    return tuple(ways)


def corner_indices(points: Sequence[Point], *, most: int, least_gain: float) -> list[int]:
    """Return the indices of at most `most` corners of the lower hull of points, by rising bytes, and of the last point.

    Left out are points with more bytes than the last, or that a mix of two others is no worse than, then those with which least of the
    hull's area goes, and those that add less to it than `least_gain` of the rectangle around the first and the last point.
    """
    last = len(points) - 1
    hull: list[int] = []
    for index in sorted((i for i, p in enumerate(points) if i == last or p[0] < points[last][0]), key=lambda i: points[i]):
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


def worthwhile(plain: Segment, ways: Sequence[Segment], device_type: str, samples: int) -> list[int]:
    """Return which ways, as traced, are better than a mix of their neighbours; the first always is one."""

    def point(segment: Segment) -> Point:
        backward = segment.backward
        return segment.saved_bytes(samples), _work(backward.matmul_flops(samples), backward.traffic_bytes(samples), device_type)

    corners = corner_indices([*map(point, ways), point(plain)], most=len(ways), least_gain=0.0)
    return sorted({0, *corners} - {len(ways)})


def with_share(way: RecomputedSegment, whole: RecomputedSegment, plain: Segment, device_type: str, samples: int) -> RecomputedSegment:
    """Return a way with a budget with the part of a full recomputation's work that is left, as traced; others as they are."""
    if way.recomputation.budget is None:
        return way
    part, all_of_it, none = (
        _work(costs.backward.matmul_flops(samples), costs.backward.traffic_bytes(samples), device_type)
        for costs in (way.costs, whole.costs, plain)
    )
    share = (part - none) / (all_of_it - none) if all_of_it > none else 1.0
    return replace(way, recomputation=replace(way.recomputation, share=round(min(max(share, 0.0), 1.0), 3)))


def with_modes(costs: Segment, way: Recomputation) -> Segment:
    """Return the costs with the CPU's time in the modes that save and replay outputs, as operators that it issues beside the own."""
    if not way.saved_calls:
        return costs
    in_modes = costs.forward.operators.scaled(_OPERATORS_OF_MODES, constants=True)  # of forward, and about as many when it runs again
    forward, backward = (replace(phase, operators=phase.operators.plus(in_modes)) for phase in (costs.forward, costs.backward))
    return replace(costs, forward=forward, backward=backward)


def _work(flops: float, traffic_bytes: float, device_type: str) -> float:
    """Return bytes that move, with FLOPs counted as the bytes that move in their time."""
    return flops / _FLOPS_PER_BYTE[device_type] + traffic_bytes


def _triangle(a: Point, b: Point, c: Point) -> float:
    """Return twice the area of a triangle: positive where b lies below the line from a to c."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _names(calls: Sequence[LoggedCall]) -> dict[str, str]:
    """Return what a person calls each call: the module of a product by as much of its name as tells it apart, else the operator."""
    modules = {one.module for one in calls if one.flops and one.module}
    endings = Counter(name.split(".")[-1] for name in modules)

    def name_of(one: LoggedCall) -> str:
        operator = one.call.partition("#")[0]
        if not one.flops or operator == "attention" or not one.module:
            return operator
        parts = one.module.split(".")
        return parts[-1] if endings[parts[-1]] == 1 else ".".join(parts[-2:])

    return {one.call: name_of(one) for one in calls}
