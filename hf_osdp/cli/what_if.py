"""`hf-osdp what-if`: the effect of a change of devices, memory, sequence length or width."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from ..errors import DescriptionError, InfeasibleError, ProfileError
from ..planner.problem import PlanningProblem
from ..planner.search.search import least_memory, search
from ..quantities import format_bytes, format_count
from ..report.content import answers_content
from ..report.tables import Answer, what_if_table
from .cases import Case
from .options import JsonFile, Request
from .output import Output

_LENGTH_STEP = 64
"""Sequence lengths are tried in multiples of this, for which kernels are fast."""
_LONGEST, _WIDEST = 2**20, 16
"""Limits of the questions: tokens per sample, and multiples of the model's width."""
_PRECISION = 16
"""The largest size that fits is found to within 1 part in `_PRECISION`, or one step."""
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")
_WIDTHS = (
    "intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "ffn_hidden_size", "encoder_ffn_dim",
    "decoder_ffn_dim",
    "embedding_size", "word_embed_proj_dim", "encoder_attention_heads", "decoder_attention_heads",
)  # fmt: skip
"""Sizes and numbers of heads that grow with the width, if a configuration has them."""


def what_if(request: Request, json_file: JsonFile = None) -> None:
    """Answer what-if questions: one more device, twice the memory, half the sequence, the longest sequence, the
    widest model.
    """
    screen = Output(json_file)
    with screen.working("Describing the model", steps=7) as next_step:
        case = Case(request).check()
        problem = case.found.problem
        models, twice = ChangedModels(case), 2 * problem.memory_limit_bytes
        questions: dict[str, Callable[[str], Answer]] = {
            "now": lambda name: answer(name, problem, f"limit {format_bytes(problem.memory_limit_bytes)}"),
            "one more device": lambda name: answer(name, *one_more_device(problem)),
            "twice the memory": lambda name: answer(
                name, replace(problem, memory_limit_bytes=twice), f"limit {format_bytes(twice)}"
            ),
            "half the sequence": models.half_the_sequence,
            "longest sequence": models.longest_sequence,
            "largest width": models.widest,
        }
        answers = []
        for name, question in questions.items():
            next_step(f"Searching: {name}")
            answers.append(question(name))
    screen.print(what_if_table(answers))
    screen.print(
        f"Estimated for {problem.hardware.summary} with strategy {problem.strategy.value}; the gain compares tokens/s"
        " with now."
    )
    screen.print(case.precision_line)
    screen.write(answers_content(answers))


def answer(question: str, problem: PlanningProblem, change: str) -> Answer:
    """Search a changed problem; `change` describes the change for the table."""
    unanswered = Answer(question=question, change=change, problem=problem)
    try:
        return replace(unanswered, plan=search(problem).plan)
    except InfeasibleError as error:
        return replace(unanswered, reason=f"needs {format_bytes(error.least_peak_bytes)}")
    except ValueError as error:  # hybrid sharding has no group size for this number of devices
        return replace(unanswered, reason=str(error))


def needed_bytes(problem: PlanningProblem) -> float:
    """Return the lowest limit that some plan meets; inf if none does."""
    try:
        return least_memory(problem)
    except (InfeasibleError, ValueError):
        return math.inf


def one_more_device(problem: PlanningProblem) -> tuple[PlanningProblem, str]:
    """Return the problem with one more device per node, and one more node if there are several, and the change as
    text.

    The global batch stays if it fills whole micro-steps of the new world size; else it is raised to the next one that
    does.
    """
    before, job = problem.hardware, problem.job
    after = before.scaled(nodes=before.nodes + (before.nodes > 1), devices_per_node=before.devices_per_node + 1)
    unit = after.world_size * (job.micro_batch_size or 1)
    batch = -(-job.global_batch_size // unit) * unit
    nodes = f"{after.nodes} nodes x " if after.nodes > 1 else ""
    change = f"{nodes}{after.devices_per_node} devices"
    if batch != job.global_batch_size:
        change += f", global batch raised from {job.global_batch_size} to {batch}"
    if before.timings:
        change += ", links' rates in place of measured collectives"
    return replace(problem, hardware=after, job=replace(job, global_batch_size=batch)), change


def largest(needed: Callable[[int], float], limit: float, start: int, *, step: int, most: int) -> int | None:
    """Return the largest size that fits, to within one step or one part in 16, whichever is more; None if not even one
    step fits.

    Every evaluation may take seconds, so the next size is where a line through the two sizes nearest to the limit
    crosses it, less half of that precision; the search ends when the line allows no larger size. If there is no such
    line, sizes are doubled, halved or bisected. Sizes begin with `start`; all are multiples of `step` and at most
    `most`. The bytes `needed` grow with the size.
    """
    most = most // step * step
    known: dict[int, float] = {}
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


class ChangedModels:
    """Answer questions that need a description of a changed model; each variant is described only once."""

    def __init__(self, case: Case) -> None:
        self._case, self._problem, self._config = case, case.found.problem, case.model_config
        self._at_length, self._with_heads = cache(self._describe_at_length), cache(self._describe_with_heads)

    def half_the_sequence(self, question: str) -> Answer:
        length = self._problem.description.sequence_length // 2
        if length < 1:
            return Answer(question=question, change="", reason="a sample of one token has no half")
        return self._answer(question, self._at_length(length), f"{length} tokens")

    def longest_sequence(self, question: str) -> Answer:
        """Answer for the longest sample that fits; tables of positions are enlarged if necessary."""
        now = self._problem.description.sequence_length
        if self._at_length(max(1, now // 2)).description.input_bytes == self._problem.description.input_bytes:
            return Answer(question=question, change="", reason="the model's inputs do not depend on it")
        start = max(_LENGTH_STEP, now // _LENGTH_STEP * _LENGTH_STEP)
        limit = self._problem.memory_limit_bytes
        length = largest(
            lambda size: needed_bytes(self._at_length(size, True)), limit, start, step=_LENGTH_STEP, most=_LONGEST
        )
        if length is None:
            return Answer(question=question, change="", reason=f"not even {_LENGTH_STEP} tokens fit")
        change = f"{length} tokens{' or more' if length == _LONGEST else ''}"
        if raised := self._too_few_positions(length):
            change += f", {' and '.join(raised)} raised to it"
        return self._answer(question, self._at_length(length), change)

    def widest(self, question: str) -> Answer:
        """Answer for the widest model of the same depth and head size that fits."""
        config = self._config
        try:
            step, heads = head_step(config), config.num_attention_heads
            limit = self._problem.memory_limit_bytes
            width = largest(
                lambda size: needed_bytes(self._with_heads(size, True)),
                limit,
                heads,
                step=step,
                most=int(_WIDEST * heads),
            )
        except (DescriptionError, ValueError) as error:
            return Answer(question=question, change="", reason=str(error))
        if width is None:
            return Answer(question=question, change="", reason=f"not even {step} heads fit")
        problem, hidden = self._with_heads(width), config.hidden_size // heads * width
        bound = " or more" if width == int(_WIDEST * heads) else ""
        numel = format_count(problem.description.numel)
        change = f"{hidden}{bound} instead of {config.hidden_size}: {width} heads, {numel} parameters"
        return self._answer(question, problem, change)

    def _answer(self, question: str, problem: PlanningProblem, change: str) -> Answer:
        """Search; if the profile has no times for the changed model, the answer has only a reason."""
        try:
            problem = replace(problem, description=self._case.timed(problem.description))
        except ProfileError:
            return Answer(question=question, change=change, problem=problem, reason="the profile has no times for it")
        return answer(question, problem, change)

    def _describe_at_length(self, length: int, least_memory: bool = False) -> PlanningProblem:
        """Describe the model at a length, optionally only for its least memory."""
        if length == self._problem.description.sequence_length:
            return self._problem
        config = with_positions(self._config, length) if self._too_few_positions(length) else self._config
        try:
            return self._described(config, length, least_memory)
        except ValueError:  # RoBERTa and others number positions from after the padding index
            if (padding := getattr(self._config, "pad_token_id", None)) is None:
                raise
            return self._described(with_positions(self._config, length + padding + 1), length, least_memory)

    def _describe_with_heads(self, heads: int, least_memory: bool = False) -> PlanningProblem:
        if heads == self._config.num_attention_heads:
            return self._problem
        return self._described(
            with_heads(self._config, heads), self._problem.description.sequence_length, least_memory
        )

    def _described(self, config: object, length: int, least_memory: bool) -> PlanningProblem:
        job = self._case.found.builder.job.asking(sequence_length=length)
        describer = self._case.describer(config, job)
        description = describer.describe(least_memory=least_memory)
        return replace(self._problem, description=description)

    def _too_few_positions(self, length: int) -> tuple[str, ...]:
        return tuple(name for name in position_names(self._config) if getattr(self._config, name) < length)


def position_names(config: Any) -> tuple[str, ...]:  # noqa: ANN401  (a transformers configuration, as below)
    """Return the fields of a configuration that limit its positions."""
    return tuple(name for name in _POSITIONS if _own_size(config, name) is not None)


def with_positions(config: Any, positions: int) -> Any:  # noqa: ANN401
    """Return a copy whose tables hold at least `positions` positions."""
    changed = copy.deepcopy(config)
    for name in position_names(config):
        setattr(changed, name, max(positions, getattr(config, name)))
    return changed


def head_step(config: Any) -> int:  # noqa: ANN401
    """Return the step of the number of heads: the heads that share one key-value head; raise ValueError if there is
    no usable width.
    """
    width, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if not isinstance(width, int) or not isinstance(heads, int) or width % heads:
        raise ValueError(f"{type(config).__name__} has no hidden_size that is a multiple of its num_attention_heads.")
    pairs: int = getattr(config, "num_key_value_heads", None) or heads
    return heads // pairs if heads % pairs == 0 else heads


def with_heads(config: Any, heads: int) -> Any:  # noqa: ANN401
    """Return a copy with `heads` heads, a multiple of `head_step`, of the same size; width, inner width and
    key-value heads grow too.
    """
    changed, before = copy.deepcopy(config), config.num_attention_heads
    for name in _WIDTHS:
        if (size := _own_size(config, name)) is not None:
            setattr(changed, name, size * heads // before)
    if isinstance(pairs := getattr(config, "num_key_value_heads", None), int):
        changed.num_key_value_heads = pairs * heads // before
    changed.hidden_size = config.hidden_size // before * heads
    changed.num_attention_heads = heads
    return changed


def _own_size(config: Any, name: str) -> int | None:  # noqa: ANN401
    """Return a size that the configuration stores under this name; None if the name is an alias of another."""
    size = getattr(config, name, None)
    return size if isinstance(size, int) and name not in getattr(config, "attribute_map", {}) else None
