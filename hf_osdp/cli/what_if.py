"""`hf-osdp what-if`: the effect of a change of devices, memory or sequence length."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import cache
from typing import Any

from ..errors import InfeasibleError, OSDPError, ProfileError
from ..planner.hardware import Hardware
from ..planner.problem import PlanningProblem
from ..planner.search.search import frugal_memory, search
from ..quantities import format_bytes
from ..report.content import answers_content
from ..report.tables import Answer, what_if_table
from .cases import Case
from .options import JsonFile, Request
from .output import Output
from .processes import searching_processes

_LENGTH_STEP = 64
"""Sequence lengths are tried in multiples of this, for which kernels are fast."""
_LONGEST = 2**20
"""The most tokens per sample."""
_PRECISION = 16
"""The largest size that fits is found to within 1 part in `_PRECISION`, or one step."""


def what_if(request: Request, json_file: JsonFile = None) -> None:
    """Answer what-if questions: one more device, twice the memory, half the sequence, the longest sequence."""
    screen = Output(json_file)
    with screen.working("Describing the model and searching"):
        case = Case(request).check()
        problem = case.found.problem
        with searching_processes() as processes:
            answers = screen.growing(what_if_table, _answers(case, processes))
    screen.print(
        f"Estimated for {problem.hardware.summary} with strategy {problem.strategy.value}; the gain compares tokens/s"
        " with now."
    )
    screen.print(case.precision_line)
    screen.write(answers_content(answers))


def _answers(case: Case, processes: Executor) -> Iterator[Answer]:
    """Yield answers in order, each as soon as it is known; models are described here while processes search."""
    problem, outcome = case.found.problem, case.found.outcome
    now = Answer(question="now", change=f"limit {format_bytes(problem.memory_limit_bytes)}", problem=problem)
    yield _without_plan(now, outcome) if isinstance(outcome, InfeasibleError) else replace(now, plan=outcome)
    lengths, pending = OtherLengths(case), list[Future[Answer]]()
    for ask in (one_more_device, twice_the_memory, lengths.half_the_sequence, lengths.longest_sequence):
        pending.append(processes.submit(answered, _asked(ask, problem)))
        while pending and pending[0].done():
            yield pending.pop(0).result()
    yield from (future.result() for future in pending)


def _asked(ask: Callable[[PlanningProblem], Answer], problem: PlanningProblem) -> Answer:
    """Return a question; with the reason if it cannot be asked, such as of a machine that was measured alone."""
    try:
        return ask(problem)
    except (OSDPError, ValueError) as error:
        return Answer(question=ask.__name__.replace("_", " "), change="", reason=str(error))


def answered(question: Answer) -> Answer:
    """Search the problem of a question, if it has one."""
    if question.problem is None or question.reason:
        return question
    try:
        return replace(question, plan=search(question.problem).plan)
    except InfeasibleError as error:
        return _without_plan(question, error)
    except (OSDPError, ValueError) as error:  # such as hybrid sharding without a group size for this many devices
        return replace(question, reason=str(error))


def _without_plan(question: Answer, error: InfeasibleError) -> Answer:
    return replace(question, reason=f"needs {format_bytes(error.least_peak_bytes)}")


def needed_bytes(problem: PlanningProblem) -> float:
    """Return a limit that some plan meets, nearly the lowest; inf if none is found."""
    try:
        return frugal_memory(problem)
    except (OSDPError, ValueError):
        return math.inf


def twice_the_memory(problem: PlanningProblem) -> Answer:
    twice = 2 * problem.memory_limit_bytes
    changed = replace(problem, memory_limit_bytes=twice)
    return Answer(question="twice the memory", change=f"limit {format_bytes(twice)}", problem=changed)


def one_more_device(problem: PlanningProblem) -> Answer:
    """Ask for one more device per node, and one more node if there are several."""
    before = problem.hardware
    after = before.scaled(nodes=before.nodes + (before.nodes > 1), devices_per_node=before.devices_per_node + 1)
    changed, change = on_devices(problem, after)
    return Answer(question="one more device", change=change, problem=changed)


def on_devices(problem: PlanningProblem, hardware: Hardware) -> tuple[PlanningProblem, str]:
    """Return the problem on another number of devices, and the change as text.

    The global batch stays if it fills whole micro-steps of the new world size; else it is raised to the next one that
    does.
    """
    job, nodes = problem.job, f"{hardware.nodes} nodes x " if hardware.nodes > 1 else ""
    unit = hardware.world_size * (job.micro_batch_size or 1)
    batch = -(-job.global_batch_size // unit) * unit
    change = f"{nodes}{hardware.devices_per_node} devices"
    if batch != job.global_batch_size:
        change += f", global batch raised from {job.global_batch_size} to {batch}"
    if problem.hardware.timings:
        change += ", links' rates in place of measured collectives"
    return replace(problem, hardware=hardware, job=replace(job, global_batch_size=batch)), change


def largest(
    needed: Callable[[int], float], limit: float, start: int, *, step: int, most: int, beside: int = 0
) -> int | None:
    """Return the largest size that fits, to within one step or one part in 16, whichever is more; None if not even one
    step fits.

    Every evaluation may take seconds, so the next size is where a line through the two sizes nearest to the limit
    crosses it, less half of that precision; the search ends when the line allows no larger size. If there is no such
    line, sizes are doubled, halved or bisected. Sizes begin with `start`; all are multiples of `step` and at most
    `most`. The bytes `needed` grow with the size.
    """
    most = most // step * step
    known = {beside: needed(beside)} if beside else {}
    low, high, size = 0, most + step, min(start, most)
    while low < size < high:
        known[size] = needed(size)
        low, high = (size, high) if known[size] <= limit else (low, size)
        end = _intersection(known, limit)
        if low and min(high, end or high) - low <= max(step, low // _PRECISION):
            break
        size = int(end - max(step, end // _PRECISION) / 2) // step * step if end else 0
        if not low < size < high:
            size = (low + high if high <= most else 4 * low) // 2 // step * step
            size = min(max(size, low + step), most)
    return low or None


def _intersection(known: Mapping[int, float], limit: float) -> float | None:
    """Return the size at which a line through the two sizes nearest to the limit crosses it; None if there is no
    such line.
    """
    points = sorted((abs(nbytes - limit), size, nbytes) for size, nbytes in known.items() if nbytes < math.inf)[:2]
    if len(points) < 2:
        return None
    (_, one, its), (_, other, others) = points
    return one + (limit - its) * (other - one) / (others - its) if (others - its) * (other - one) > 0 else None


class OtherLengths:
    """Ask for other sequence lengths; each is described only once."""

    def __init__(self, case: Case) -> None:
        self._case, self._config = case, case.model_config
        self._at = cache(self._described)

    def half_the_sequence(self, problem: PlanningProblem) -> Answer:
        question, length = "half the sequence", problem.description.sequence_length // 2
        if length < 1:
            return Answer(question=question, change="", reason="a sample of one token has no half")
        return self._timed(Answer(question=question, change=f"{length} tokens", problem=self._at(problem, length)))

    def longest_sequence(self, problem: PlanningProblem) -> Answer:
        """Ask for the longest sample that fits; tables of positions are enlarged if necessary."""
        question, now = "longest sequence", problem.description.sequence_length
        half = max(1, now // 2)
        if self._at(problem, half).description.input_bytes == problem.description.input_bytes:
            return Answer(question=question, change="", reason="the model's inputs do not depend on it")
        length = largest(
            lambda size: needed_bytes(self._at(problem, size)), problem.memory_limit_bytes,
            max(_LENGTH_STEP, now // _LENGTH_STEP * _LENGTH_STEP), step=_LENGTH_STEP, most=_LONGEST, beside=half,
        )  # fmt: skip
        if length is None:
            return Answer(question=question, change="", reason=f"not even {_LENGTH_STEP} tokens fit")
        change = f"{length} tokens{' or more' if length == _LONGEST else ''}"
        if raised := self._too_few_positions(length):
            change += f", {' and '.join(raised)} raised to it"
        return self._timed(Answer(question=question, change=change, problem=self._at(problem, length)))

    def _timed(self, question: Answer) -> Answer:
        """Return the question with the profile's times; if it has none for this length, with that reason."""
        problem = question.problem
        assert problem is not None
        try:
            return replace(question, problem=replace(problem, description=self._case.timed(problem.description)))
        except ProfileError:
            return replace(question, reason="the profile has no times for it")

    def _described(self, problem: PlanningProblem, length: int) -> PlanningProblem:
        """Return the problem at a length, with the same split of the model."""
        if length == problem.description.sequence_length:
            return problem
        config = with_positions(self._config, length) if self._too_few_positions(length) else self._config
        job, split = self._case.found.builder.job.asking(sequence_length=length), problem.description.split
        try:
            description = self._case.describer(config, job).describe(split)
        except ValueError:  # RoBERTa and others number positions from after the padding index
            if (padding := getattr(self._config, "pad_token_id", None)) is None:
                raise
            enlarged = with_positions(self._config, length + padding + 1)
            description = self._case.describer(enlarged, job).describe(split)
        return replace(problem, description=description)

    def _too_few_positions(self, length: int) -> tuple[str, ...]:
        return tuple(name for name in position_names(self._config) if getattr(self._config, name) < length)


def position_names(config: Any) -> tuple[str, ...]:  # noqa: ANN401  (a transformers configuration, as below)
    """Return the fields of a configuration that limit its positions."""
    from ..modeling.batch import POSITION_LIMITS  # imports torch

    return tuple(name for name in POSITION_LIMITS if _own_size(config, name) is not None)


def with_positions(config: Any, positions: int) -> Any:  # noqa: ANN401
    """Return a copy whose tables hold at least `positions` positions."""
    changed = copy.deepcopy(config)
    for name in position_names(config):
        setattr(changed, name, max(positions, getattr(config, name)))
    return changed


def _own_size(config: Any, name: str) -> int | None:  # noqa: ANN401
    """Return a size that the configuration stores under this name; None if the name is an alias of another."""
    size = getattr(config, name, None)
    return size if isinstance(size, int) and name not in getattr(config, "attribute_map", {}) else None
