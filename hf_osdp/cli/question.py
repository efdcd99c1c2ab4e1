"""Questions to the planner on the web page, and their answers, without the page itself."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import re
import shlex
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import typer

from ..planner.cost.evaluate import PlanEstimate
from ..planner.plan import Plan
from ..planner.problem import PlanningProblem
from ..planner.search.compare import StrategyResult
from ..quantities import parse_limit
from ..report.plan_file import PlanInputs
from ..report.tables import Answer
from .cases import Case
from .machine_commands import FILE, launch_file
from .options import Request, flag_of, with_flags
from .what_if import answered, on_devices

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_LONGEST_LINK = 30_000
"""Characters that browsers and servers accept."""
_MOST_PLANS = 64


@dataclass(frozen=True, kw_only=True)
class Question:
    """The values of the page's form.

    Each field except `config` is an argument of `hf-osdp plan`; empty ones are left out.
    """

    model: str = "meta-llama/Meta-Llama-3-8B"
    config: str = ""
    """Text of a config.json, in place of the model."""
    device: str = "a100-80"
    devices_per_node: int | None = 8
    num_nodes: int | None = 1
    memory_limit: str = ""
    sequence_length: int | None = 4096
    global_batch_size: int | None = 64
    precision: str = ""
    compile: bool = False

    @classmethod
    def of_link(cls, parameters: Mapping[str, str]) -> Question:
        """Parse a link's query; raise ValueError if it is wrong.

        Names that begin with two underscores belong to the host.
        """
        asked: dict[str, Any] = {name: text for name, text in parameters.items() if not name.startswith("__")}
        known = {field.name: field.default for field in fields(cls)}
        for name, text in asked.items():
            if name not in known:
                raise ValueError(f"The link has {name!r}, which is not a field of a question; use {', '.join(known)}.")
            if isinstance(known[name], int):
                if not re.fullmatch("[0-9]{0,9}", text):
                    raise ValueError(f"The link has {name}={text!r}, which is not a whole number; compile is 0 or 1.")
                asked[name] = int(text) if text else None
        return cls(**{**asked, "compile": bool(asked.get("compile"))})

    @property
    def link(self) -> str:
        """The query for this question; empty if a config.json makes it too long for a link."""
        values = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.default or getattr(self, field.name)
        }
        query = "?" + urlencode({name: int(value) if value is True else value or "" for name, value in values.items()})
        return query if len(query) <= _LONGEST_LINK else ""

    @property
    def options(self) -> list[str]:
        values = {field.name: getattr(self, field.name) for field in fields(self)[2:-1]}
        words = [[flag_of(name), str(value)] for name, value in values.items() if value not in (None, "")]
        return [*itertools.chain(*words), *["--compile"] * self.compile]

    @property
    def command(self) -> str:
        return shlex.join(["hf-osdp", "plan", "config.json" if self.config else self.model, *self.options])


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A question's plan and its inputs."""

    question: Question
    case: Case
    plan: Plan
    problem: PlanningProblem
    estimate: PlanEstimate
    warnings: tuple[str, ...]

    @cached_property
    def compared(self) -> tuple[StrategyResult, ...]:
        return tuple(self.case.found.compared())

    @property
    def options(self) -> dict[str, object]:
        """The options for OSDPConfig, or next to `osdp: true`, that give a run the same plan."""
        stated = {"memory_limit": self.question.memory_limit, "compile": self.question.compile}
        return {name: value for name, value in stated.items() if value}

    @property
    def script(self) -> str:
        """The lines that change in a Trainer script, with the arguments to set."""
        plan, precision = self.plan, self.case.precision
        sizes = f"per_device_train_batch_size={plan.micro_batch_size}, gradient_accumulation_steps={plan.accumulation_steps}"  # noqa: E501
        osdp = (
            f"OSDPConfig({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"
            if self.options
            else "True"
        )
        return (
            f"from hf_osdp import {'OSDPConfig, ' if self.options else ''}Trainer\n\n"
            f"# args: {sizes}{'' if precision == 'no' else f', {precision}=True'}\n"
            f"osdp = {osdp}\n"
            "trainer = Trainer(model=model, args=args, train_dataset=dataset, osdp=osdp)\n"
        )

    @property
    def launch_file(self) -> str:
        nodes, devices, case = self.problem.hardware.nodes, self.problem.hardware.devices_per_node, self.case
        address = "FIRST_MACHINE" if nodes > 1 else None
        return launch_file(
            case.device_type, nodes, devices, case.precision, self.options, path=FILE, main_address=address
        )[0]


class Planner:
    """Answer questions; recent plans are cached. Errors are those of `hf-osdp plan`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hf_osdp")
        self.plan = lru_cache(maxsize=_MOST_PLANS)(self._plan)

    def _plan(self, question: Question) -> Planned:
        from ..preparation.cache import warnings_of_package

        case = Case(self._request(question)).check()
        with redirect_stderr(io.StringIO()) as stderr:  # the line about a built-in shape
            try:
                _ = case.model_config
            except ValueError as error:
                shown = str(error).replace(case.request.model, "config.json") if question.config else str(error)
                raise ValueError(shown) from None
        with warnings_of_package() as warnings:
            plan, problem = case.found.plan, case.found.problem
        estimate = PlanInputs.of(problem).estimate(plan)
        warned = tuple(
            dict.fromkeys([line.removeprefix("hf-osdp: ") for line in stderr.getvalue().splitlines()] + warnings)
        )
        return Planned(question=question, case=case, plan=plan, problem=problem, estimate=estimate, warnings=warned)

    def what_if(self, question: Question, memory_limit: str, devices_per_node: int) -> list[Answer]:
        """Return the answer now, and with another limit and other devices, for which the global batch is raised
        until it fills them.
        """
        now = self.plan(question)
        changed, change = on_devices(now.problem, now.problem.hardware.scaled(devices_per_node=devices_per_node))
        changed = replace(changed, memory_limit_bytes=parse_limit(memory_limit, name="--memory-limit"))
        asked = Answer(question="what if", change=f"{change}, {memory_limit} each", problem=changed)
        return [Answer(question="as asked", change="", problem=now.problem, plan=now.plan), answered(asked)]

    def _request(self, question: Question) -> Request:
        if question.config and question.model:
            raise ValueError(f"Both MODEL {question.model!r} and a config.json were given; clear one of them.")
        for field in fields(question):
            if isinstance(field.default, int) and not isinstance(value := getattr(question, field.name), int):
                given = "is empty" if value is None else f"{value:g} is not a whole number"
                raise ValueError(f"{flag_of(field.name)} {given}; enter a whole number.")
        if question.model and (not _HUB_ID.fullmatch(question.model) or Path(question.model).exists()):
            raise ValueError(f"MODEL {question.model!r} is not a hub id; upload its config.json to the page instead.")
        model = self._saved(question.config) if question.config else question.model
        requests: list[Request] = []
        command = typer.Typer(add_completion=False)
        command.command()(with_flags(requests.append, make=Request.of))
        typer.main.get_command(command).main(
            [*question.options, *(["--", model] if model else [])], standalone_mode=False
        )
        return requests[0]

    def _saved(self, text: str) -> str:
        """Write a configuration to a file for transformers, whose name is the model's name in tables."""
        try:
            name = re.sub(r"[^\w.-]", "_", str(json.loads(text)["model_type"]))[:40]
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                "The config.json is not a transformers configuration: it is not a JSON object with a model_type."
            ) from None
        path = Path(self._folder.name) / hashlib.sha256(text.encode()).hexdigest() / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)
