"""`hf-osdp what-if`: what a change of devices, memory, sequence or width would bring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..errors import DescriptionError, ProfileError
from ..planner.description import ModelDescription
from ..planner.problem import PlanningProblem
from ..planner.search.what_if import Answer, Changed, answer, fits, largest, one_more_device, twice_the_memory
from ..quantities import format_bytes, format_count
from .cases import case_of, describer, timed
from .options import JsonFile, Request
from .output import Output
from .resize import head_step, position_names, with_heads, with_positions

_LENGTH_STEP = 64
"""Sequence lengths are tried in multiples of this, as kernels like them."""
_LONGEST, _WIDEST = 2**20, 16
"""Where the questions end: tokens of a sample, and times the model's width."""


def what_if(request: Request, json_file: JsonFile = None) -> None:
    """Answer what-if questions: one more device, twice the memory, half the sequence, the longest sequence, the widest model."""
    screen = Output(json_file)
    with screen.working("Describing the model"):
        case, config, request = case_of(request)
    models = _Models(request, case, config)
    with _progress(screen) as step:
        questions: list[Callable[[], Answer]] = [
            lambda: answer("now", Changed(problem=case, change=f"limit {format_bytes(case.memory_limit_bytes)}")),
            lambda: answer("one more device", one_more_device(case)),
            lambda: answer("twice the memory", twice_the_memory(case)),
            models.half_the_sequence,
            lambda: models.longest_sequence(step),
            lambda: models.widest(step),
        ]
        answers = []
        for question in questions:
            answers.append(question())
            step()
    from ..report.content import answers_content
    from ..report.tables import what_if_table

    screen.print(what_if_table(answers))
    screen.print(f"Estimated for {case.hardware.summary} with strategy {case.strategy.value}; the gain is in tokens/s over now.")
    screen.write(answers_content(answers))


@contextmanager
def _progress(screen: Output) -> Iterator[Callable[[], None]]:
    """A bar on a terminal; how many steps a bisection takes is not known beforehand, so it pulses."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.completed} searches"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=screen.progress, transient=True, disable=not screen.progress.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda: progress.advance(task)


class _Models:
    """Questions for which the model is described anew."""

    def __init__(self, request: Request, case: PlanningProblem, config: Any):
        self.request, self.case, self.config, self.describe = request, case, config, describer(request, case.hardware)
        self.cases: dict[tuple[str, int], PlanningProblem] = {
            ("length", case.description.sequence_length): case,
            ("heads", getattr(config, "num_attention_heads", 0)): case,
        }

    def half_the_sequence(self) -> Answer:
        """The same batch in half as many tokens."""
        length = self.case.description.sequence_length // 2
        if length < 1:
            return Answer(question="half the sequence", change="", reason="a sample of one token has no half")
        return self._answer("half the sequence", self._at_length(length), f"{length} tokens")

    def longest_sequence(self, tried: Callable[[], None]) -> Answer:
        """The most tokens of a sample that fit; tables of positions are raised where they must be."""
        question, now = "longest sequence", self.case.description.sequence_length
        if self._at_length(max(1, now // 2)).description.input_bytes == self.case.description.input_bytes:
            return Answer(question=question, change="", reason="the model's inputs do not depend on it")
        start = max(_LENGTH_STEP, now // _LENGTH_STEP * _LENGTH_STEP)
        length = largest(lambda size: fits(self._at_length(size)), start, step=_LENGTH_STEP, most=_LONGEST, tried=tried)
        if length is None:
            return Answer(question=question, change="", reason=f"not even {_LENGTH_STEP} tokens fit")
        raised = self._raised(length)
        note = f", {' and '.join(raised)} raised to it" if raised else ""
        bound = " or more" if length == _LONGEST else ""
        return self._answer(question, self._at_length(length), f"{length} tokens{bound}{note}")

    def widest(self, tried: Callable[[], None]) -> Answer:
        """The widest model of the same depth and head size that fits."""
        question = "largest width"
        try:
            step, heads = head_step(self.config), self.config.num_attention_heads
            width = largest(lambda size: fits(self._with_heads(size)), heads, step=step, most=int(_WIDEST * heads), tried=tried)
        except (DescriptionError, ValueError) as error:
            return Answer(question=question, change="", reason=str(error))
        if width is None:
            return Answer(question=question, change="", reason=f"not even {step} heads fit")
        case = self._with_heads(width)
        hidden = self.config.hidden_size // heads * width
        bound = " or more" if width == int(_WIDEST * heads) else ""
        change = f"{hidden}{bound} instead of {self.config.hidden_size}: {width} heads, {format_count(case.description.numel)} parameters"
        return self._answer(question, case, change)

    def _answer(self, question: str, case: PlanningProblem, change: str) -> Answer:
        """Search a case that was described anew; a profile that has no times for it leaves it without seconds."""
        try:
            case = replace(case, description=timed(self.request, case.description))
        except ProfileError:
            return Answer(question=question, change=change, problem=case, reason="the profile has no times for it")
        return answer(question, Changed(problem=case, change=change))

    def _at_length(self, length: int) -> PlanningProblem:
        return self._once(("length", length), lambda: replace(self.case, description=self._described(length)))

    def _described(self, length: int) -> ModelDescription:
        """At a length; RoBERTa and its kin number positions from after the padding index, so that they need some more."""
        config = with_positions(self.config, length) if self._raised(length) else self.config
        try:
            return self.describe(config, length)
        except ValueError:
            padding = getattr(self.config, "pad_token_id", None)
            if padding is None:
                raise
            return self.describe(with_positions(self.config, length + padding + 1), length)

    def _with_heads(self, heads: int) -> PlanningProblem:
        def build() -> PlanningProblem:
            config = with_heads(self.config, heads)
            return replace(self.case, description=self.describe(config, self.case.description.sequence_length))

        return self._once(("heads", heads), build)

    def _raised(self, length: int) -> tuple[str, ...]:
        """Fields of the configuration that are too small for a length."""
        return tuple(name for name in position_names(self.config) if getattr(self.config, name) < length)

    def _once(self, key: tuple[str, int], build: Callable[[], PlanningProblem]) -> PlanningProblem:
        """Describe each variant once only."""
        if key not in self.cases:
            self.cases[key] = build()
        return self.cases[key]
