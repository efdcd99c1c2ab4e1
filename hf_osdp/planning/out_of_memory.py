"""Out of device memory all the same: where, by how much, which plan is safer; and, where that is wanted, all over again by it."""

from __future__ import annotations

import json
import logging
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from ..distributed import restart
from ..distributed.consensus import on_rank_zero
from ..errors import InfeasibleError, OSDPError
from ..planner.description import UnitDescription
from ..planner.files import plain, validated
from ..planner.plan import Plan
from ..quantities import format_bytes, format_seconds
from .memory_errors import is_of_host, is_out_of_memory
from .oom_location import Place, Whereabouts
from .recalibrate import Problem

_LEAST_SHARE = 0.05
"""Of the limit, by which it is lowered at least: where allocations fragment, or others use the device too, the peak says nothing."""
_AMOUNT = r"(\d+(?:\.\d+)?) ([KMGT]iB|bytes)"
_ASKED = re.compile(f"[Tt]ried to allocate {_AMOUNT}")
_ALLOCATED = re.compile(f"Of the allocated memory {_AMOUNT} is allocated by PyTorch")
"""In the message of torch's allocator."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What was seen as memory ran out."""

    place: Place
    allocated_bytes: int | None
    """By tensors; None where the device does not say."""
    asked_bytes: int | None
    """On top of that; None where the allocator does not say."""

    @property
    def needed_bytes(self) -> int | None:
        """What the step would have needed at least."""
        return None if self.allocated_bytes is None else self.allocated_bytes + (self.asked_bytes or 0)

    def __str__(self) -> str:
        if self.allocated_bytes is None:
            return "what was allocated is not known" + (f", {format_bytes(self.asked_bytes)} were asked for" if self.asked_bytes else "")
        return f"{format_bytes(self.allocated_bytes)} were allocated and {format_bytes(self.asked_bytes or 0)} more asked for"


@dataclass(frozen=True, slots=True, kw_only=True)
class Safer:
    """What would take less."""

    limit_bytes: int
    """The `memory_limit` to plan under."""
    plan: Plan | None = None
    """The fastest plan under it; None where none fits."""
    remedies: tuple[str, ...] = ()
    """Where none fits."""


class MemoryWatch:
    """What is needed to explain an error of one model's training."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        units: Sequence[UnitDescription],
        *,
        problem: Problem | str | None,
        on_oom: str,
        device: torch.device,
    ) -> None:
        """
        Args:
            model: with the plan applied.
            plan: what it runs.
            units: the model's.
            problem: what the plan was found for, or rank 0's from `shared_problem`; None where the plan was given.
            on_oom: `raise` or `replan`.
            device: where it runs.
        """
        self.whereabouts = Whereabouts(model, units)
        self._plan, self._found_for, self._device = plan, problem, device
        self.replans = on_oom == "replan"
        self.safer: Safer | None = None
        """Of the shortage that was explained last."""

    def explain(self, error: BaseException) -> str:
        """What there is to say of an error, in one line; `safer` is then set, where another plan helps."""
        self.safer, text = None, str(error)
        shortage = Shortage(
            place=self.whereabouts.place_of(error), allocated_bytes=self._allocated(text), asked_bytes=_bytes_in(_ASKED, text)
        )
        who = f"rank {dist.get_rank()} on {socket.gethostname()}" if dist.is_initialized() else socket.gethostname()
        if self._device.type == "cuda" and is_of_host(error):
            return (
                f"Out of the host's memory on {who} in {shortage.place}. Use fewer workers of data loaders, host_offload=False or"
                " offload_activations=False, or a machine or container with more memory."
            )
        said = f"Out of memory on {who} in {shortage.place}: the plan was estimated to need {self._estimate()}, {shortage}."
        if self._problem is None:
            return f"{said} The plan was given; plan again under a lower memory_limit."
        self.safer = safer_plan(self._problem, self._plan, shortage.needed_bytes)
        return f"{said} {self._next(self._problem, self.safer)}"

    @property
    def _problem(self) -> Problem | None:
        """Read where it is needed: that takes longer than to send it."""
        if isinstance(self._found_for, str):
            self._found_for = validated(Problem, json.loads(self._found_for), lambda problem: OSDPError(f"Rank 0's problem: {problem}."))
        return self._found_for

    def _estimate(self) -> str:
        if self._plan.peak_bytes is None:
            return "an amount that it does not state"
        limit = "" if self._problem is None else f" of a limit of {format_bytes(self._problem.memory_limit_bytes)}"
        return f"{format_bytes(self._plan.peak_bytes)}{limit}"

    def _next(self, problem: Problem, safer: Safer) -> str:
        if safer.plan is None:
            return f"No plan needs as little as {format_bytes(safer.limit_bytes)}; use {'; or '.join(safer.remedies)}."
        step_s = problem.result(self._plan).time.step_s
        return (
            f"The next plan, for memory_limit={safer.limit_bytes}, needs {format_bytes(safer.plan.peak_bytes or 0)} and"
            f" {format_seconds(safer.plan.step_s or 0.0)} a step instead of {format_seconds(step_s)}."
        )

    def _allocated(self, text: str) -> int | None:
        """As torch says; else the highest that its allocator saw, what the device reserves with it."""
        reserved = 0 if self._problem is None else self._problem.hardware.outside_bytes(self._plan.communicators)
        allocated = _bytes_in(_ALLOCATED, text)
        if allocated is None and self._device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self._device)
        return None if allocated is None else allocated + reserved


def safer_plan(problem: Problem, plan: Plan, needed_bytes: int | None) -> Safer:
    """What to run after a plan that needed more than it was estimated to.

    The limit falls by what the plan needed above its estimate, by a twentieth at least, and so far that the plan itself fits no more:
    limit' = min(limit - max(needed - estimate, limit / 20), estimate - estimate / 20).

    Args:
        problem: what the plan was found for.
        plan: what ran.
        needed_bytes: what it needed; None if that is not known.
    """
    limit, estimate = problem.memory_limit_bytes, plan.peak_bytes or problem.memory_limit_bytes
    over = max((needed_bytes or 0) - estimate, int(limit * _LEAST_SHARE))
    lower = max(1, min(limit - over, int(estimate * (1 - _LEAST_SHARE))))
    try:
        return Safer(limit_bytes=lower, plan=replace(problem, memory_limit_bytes=lower).solve())
    except InfeasibleError as error:
        return Safer(limit_bytes=lower, remedies=error.remedies)


def shared_problem(problem: Problem | None) -> str | None:
    """Rank 0's problem as JSON, for the ranks that did not search. Collective."""
    return on_rank_zero(lambda: None if problem is None else json.dumps(plain(problem)))


# ------------------------------------------------------------------------------------------------------------ this process's


class _Process:
    """The training that this process is in."""

    watch: MemoryWatch | None = None
    excepthook: Callable[..., object] | None = None
    """The one before ours."""


def watch(
    model: nn.Module,
    plan: Plan,
    units: Sequence[UnitDescription],
    *,
    problem: Problem | str | None,
    on_oom: str,
    device: torch.device,
) -> None:
    """From now on an error of memory that nobody catches is explained; the latest model counts. Arguments as for `MemoryWatch`."""
    rest()
    _Process.watch = MemoryWatch(model, plan, units, problem=problem, on_oom=on_oom, device=device)
    if _Process.excepthook is None:
        _Process.excepthook, sys.excepthook = sys.excepthook, _excepthook


def rest() -> None:
    """Take the hooks off the model that is watched: its training is over, for now."""
    if _Process.watch is not None:
        _Process.watch.whereabouts.detach()


@contextmanager
def training() -> Iterator[None]:
    """`explained`, for the whole of a training: the hooks that tell a unit are on the model within alone."""
    if _Process.watch is not None:
        _Process.watch.whereabouts.attach()
    try:
        with explained():
            yield
    finally:
        rest()


@contextmanager
def explained() -> Iterator[None]:
    """Give an error of memory inside its explanation; where `on_oom="replan"`, all ranks start again instead, if they can.

    Raises:
        BaseException: the same that was raised inside; where memory ran out (`is_out_of_memory`), with another message.
    """
    try:
        yield
    except Exception as error:
        handle(error)
        raise


def handle(error: BaseException) -> None:
    """Explain an error of memory, once, in its own message; does not return where all ranks start again."""
    if _Process.watch is None or not is_out_of_memory(error) or hasattr(error, "explained_by_osdp"):
        return
    of_torch = " ".join(str(error).split())
    try:
        said = _Process.watch.explain(error)
    except Exception:  # the error itself is worth more than its explanation
        _log.warning("An error of memory could not be explained.", exc_info=True)
        return
    safer = _Process.watch.safer
    hindrance = None
    if _Process.watch.replans:
        hindrance = restart.hindrance() if safer is not None and safer.plan is not None else "there is no other plan"
        if hindrance is None and safer is not None:
            restart.restart(safer.limit_bytes, f"hf_osdp: {said}")
            said += " The launcher starts all ranks again, by that plan."
        else:
            said += f' on_oom="replan" cannot start again: {hindrance}.'
    elif safer is not None and safer.plan is not None and restart.hindrance() is None:
        said += ' With on_oom="replan" the run goes on by it.'
    error.explained_by_osdp = True  # type: ignore[attr-defined]
    error.args = (f"{said} ({of_torch})",)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    handle(error)
    assert _Process.excepthook is not None
    _Process.excepthook(kind, error, trace)


def _bytes_in(pattern: re.Pattern[str], text: str) -> int | None:
    """An amount that a message names."""
    found = pattern.search(text)
    if found is None:
        return None
    number, unit = found.groups()
    return int(float(number) * 1024 ** "BKMGT".index(unit[0].upper()))
