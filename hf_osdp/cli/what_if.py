"""`hf-osdp what-if`: what a change of devices, memory, sequence or width would bring."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..errors import DescriptionError, ProfileError
from ..planner.problem import PlanningProblem
from ..planner.search.what_if import Answer, answer, fits, largest, one_more_device, twice_the_memory
from ..quantities import format_bytes, format_count
from .cases import case_of, describer, timed
from .options import JsonFile, Request
from .output import Output

_LENGTH_STEP = 64
"""Sequence lengths are tried in multiples of this, as kernels like them."""
_LONGEST, _WIDEST = 2**20, 16
"""Where the questions end: tokens of a sample, and times the model's width."""
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")
_WIDTHS = (
    "intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim",
    "embedding_size", "word_embed_proj_dim", "encoder_attention_heads", "decoder_attention_heads",
)  # fmt: skip
"""Sizes and numbers of heads that grow with the width, where a configuration has them."""


def what_if(request: Request, json_file: JsonFile = None) -> None:
    """Answer what-if questions: one more device, twice the memory, half the sequence, the longest sequence, the widest model."""
    screen = Output(json_file)
    with screen.working("Describing the model"):
        problem, config, request = case_of(request)
    with _progress(screen) as step:
        models = ChangedModels(request, problem, config, step)
        questions: list[Callable[[], Answer]] = [
            lambda: answer("now", problem, f"limit {format_bytes(problem.memory_limit_bytes)}"),
            lambda: answer("one more device", *one_more_device(problem)),
            lambda: answer("twice the memory", *twice_the_memory(problem)),
            models.half_the_sequence,
            models.longest_sequence,
            models.widest,
        ]
        answers = []
        for question in questions:
            answers.append(question())
            step()
    from ..report.content import answers_content
    from ..report.tables import what_if_table

    screen.print(what_if_table(answers))
    screen.print(f"Estimated for {problem.hardware.summary} with strategy {problem.strategy.value}; the gain is in tokens/s over now.")
    screen.write(answers_content(answers))


@contextmanager
def _progress(screen: Output) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal; how many steps a bisection takes is not known beforehand, so it pulses."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.completed} searches"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=screen.progress, transient=True, disable=not screen.progress.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda: progress.advance(task)


class ChangedModels:
    """Questions for which the model is described again, with a changed configuration.

    Args:
        request: what the command line states.
        problem: the problem that it describes.
        config: the model's configuration.
        tried: called after each size that was tried.
    """

    def __init__(self, request: Request, problem: PlanningProblem, config: Any, tried: Callable[[], None] = lambda: None) -> None:  # noqa: ANN401
        self.request, self.problem, self.config, self.tried = request, problem, config, tried
        self._describe = describer(request, problem.hardware)
        self._problems: dict[tuple[str, int], PlanningProblem] = {
            ("length", problem.description.sequence_length): problem,
            ("heads", getattr(config, "num_attention_heads", 0)): problem,
        }

    def half_the_sequence(self) -> Answer:
        """Answer for the same batch in half as many tokens."""
        length = self.problem.description.sequence_length // 2
        if length < 1:
            return Answer(question="half the sequence", change="", reason="a sample of one token has no half")
        return self._answer("half the sequence", self._at_length(length), f"{length} tokens")

    def longest_sequence(self) -> Answer:
        """Answer for the most tokens of a sample that fit; tables of positions are raised where they must be."""
        question, now = "longest sequence", self.problem.description.sequence_length
        if self._at_length(max(1, now // 2)).description.input_bytes == self.problem.description.input_bytes:
            return Answer(question=question, change="", reason="the model's inputs do not depend on it")
        start = max(_LENGTH_STEP, now // _LENGTH_STEP * _LENGTH_STEP)
        length = largest(lambda size: self._fits(self._at_length(size)), start, step=_LENGTH_STEP, most=_LONGEST)
        if length is None:
            return Answer(question=question, change="", reason=f"not even {_LENGTH_STEP} tokens fit")
        raised = self._too_few_positions(length)
        note = f", {' and '.join(raised)} raised to it" if raised else ""
        bound = " or more" if length == _LONGEST else ""
        return self._answer(question, self._at_length(length), f"{length} tokens{bound}{note}")

    def widest(self) -> Answer:
        """Answer for the widest model of the same depth and head size that fits."""
        question = "largest width"
        try:
            step, heads = head_step(self.config), self.config.num_attention_heads
            width = largest(lambda size: self._fits(self._with_heads(size)), heads, step=step, most=int(_WIDEST * heads))
        except (DescriptionError, ValueError) as error:
            return Answer(question=question, change="", reason=str(error))
        if width is None:
            return Answer(question=question, change="", reason=f"not even {step} heads fit")
        problem = self._with_heads(width)
        hidden = self.config.hidden_size // heads * width
        bound = " or more" if width == int(_WIDEST * heads) else ""
        numel = format_count(problem.description.numel)
        change = f"{hidden}{bound} instead of {self.config.hidden_size}: {width} heads, {numel} parameters"
        return self._answer(question, problem, change)

    def _fits(self, problem: PlanningProblem) -> bool:
        self.tried()
        return fits(problem)

    def _answer(self, question: str, problem: PlanningProblem, change: str) -> Answer:
        """Search; a profile that has no times for the changed model leaves it without seconds."""
        try:
            problem = replace(problem, description=timed(self.request, problem.description))
        except ProfileError:
            return Answer(question=question, change=change, problem=problem, reason="the profile has no times for it")
        return answer(question, problem, change)

    def _at_length(self, length: int) -> PlanningProblem:
        """Describe the model at a length; RoBERTa and others number positions from after the padding index, so they need some more."""
        config = with_positions(self.config, length) if self._too_few_positions(length) else self.config
        try:
            return self._described("length", length, config, length)
        except ValueError:
            padding = getattr(self.config, "pad_token_id", None)
            if padding is None:
                raise
            return self._described("length", length, with_positions(self.config, length + padding + 1), length)

    def _with_heads(self, heads: int) -> PlanningProblem:
        return self._described("heads", heads, with_heads(self.config, heads), self.problem.description.sequence_length)

    def _described(self, kind: str, size: int, config: object, length: int) -> PlanningProblem:
        """Describe each variant only once."""
        if (kind, size) not in self._problems:
            self._problems[kind, size] = replace(self.problem, description=self._describe(config, length))
        return self._problems[kind, size]

    def _too_few_positions(self, length: int) -> tuple[str, ...]:
        return tuple(name for name in position_names(self.config) if getattr(self.config, name) < length)


def position_names(config: Any) -> tuple[str, ...]:  # noqa: ANN401  (a transformers configuration, as below)
    """Return the fields of a configuration that bound its positions."""
    return tuple(name for name in _POSITIONS if _own_size(config, name) is not None)


def with_positions(config: Any, positions: int) -> Any:  # noqa: ANN401
    """Return a copy whose tables of positions hold at least so many."""
    changed = copy.deepcopy(config)
    for name in position_names(config):
        setattr(changed, name, max(positions, getattr(config, name)))
    return changed


def head_step(config: Any) -> int:  # noqa: ANN401
    """Return the number that heads come in multiples of: as many as share one key-value head.

    Raises:
        ValueError: the configuration has no width and heads that can be changed.
    """
    width, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if not isinstance(width, int) or not isinstance(heads, int) or width % heads:
        raise ValueError(f"{type(config).__name__} has no hidden_size that is a multiple of its num_attention_heads.")
    pairs: int = getattr(config, "num_key_value_heads", None) or heads
    return heads // pairs if heads % pairs == 0 else heads


def with_heads(config: Any, heads: int) -> Any:  # noqa: ANN401
    """Return a copy with so many heads of the same size, a multiple of `head_step`; width, inner width and key-value heads grow along."""
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
    """Return a size that the configuration holds by this name and not by another."""
    size = getattr(config, name, None)
    return size if isinstance(size, int) and name not in getattr(config, "attribute_map", {}) else None
