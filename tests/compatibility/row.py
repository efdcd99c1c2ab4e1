"""A row of the table: a training that is written once and run by both sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from .side import Side

FOLDER = Path(__file__).parent
Figures = list[dict[str, float]]
"""Figures that a training logged, in order: loss, gradient norm, learning rate, metrics."""


class Verdict(Enum):
    """Result of a row."""

    EQUAL = "equal to stock"
    REFUSED = "refused"
    NOT_APPLICABLE = "not applicable"
    DIFFERENT = "SILENTLY DIFFERENT"
    CRASHED = "CRASHED"
    HUNG = "HUNG"

    @property
    def may_stand(self) -> bool:
        return self in (Verdict.EQUAL, Verdict.REFUSED, Verdict.NOT_APPLICABLE)


class Oracle(Enum):
    """Stock run that gives the reference figures."""

    DDP = "DDP, 2 processes"
    ALONE = "1 process"
    FSDP2 = "FSDP2, 2 processes"

    @property
    def processes(self) -> int:
        return 1 if self is Oracle.ALONE else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A training and its expected verdict.

    Attributes:
        train: function that both sides run; its `Side` supplies trainer, arguments and accelerator.
        expected: expected verdict; any other one is a failure, also a refusal instead of equal figures.
        loss_tolerance, norm_tolerance: relative tolerances of losses and metrics, and of gradient norms.
        shift: index of the first unit's layout in the mixed plan.
        is_refused_late: the refusal may come after training.
        refused_by: package that raises the refusal.
        config: options of OSDP that the row needs.
        daily: whether the daily tests run the row; other tests train with much of the rest every day.
    """

    name: str
    group: str
    train: Callable[[Side], Figures]
    expected: Verdict = Verdict.EQUAL
    oracle: Oracle = Oracle.DDP
    loss_tolerance: float = 1e-4
    norm_tolerance: float = 1e-3
    shift: int = 0
    is_refused_late: bool = False
    refused_by: str = "hf_osdp"
    config: Mapping[str, object] = field(default_factory=dict)
    daily: bool = False

    @property
    def label(self) -> str:
        """Return a label that is unique among all rows, unlike the name."""
        return f"{self.group}: {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    row: Row
    verdict: Verdict
    detail: str
    """Largest difference, message of the refusal, or error of the stock side."""
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.verdict.may_stand and self.verdict is self.row.expected


def read_rows() -> dict[str, Row]:
    """Return all rows of rows.yaml by label, in the table's order.

    In the file, what is no field of `Row` is an argument of the group's or the row's training, and `with` holds the
    options of its trainer or accelerator.
    """
    about = {field.name for field in fields(Row)}
    rows: dict[str, Row] = {}
    for group in yaml.safe_load((FOLDER / "rows.yaml").read_text(encoding="utf-8"))["groups"]:
        for entry in group["rows"]:
            arguments = {name: value for name, value in entry.items() if name not in about and name != "with"}
            own = {name: entry[name] for name in entry if name in about and name != "train"}
            kinds = {"expected": Verdict, "oracle": Oracle.__getitem__}
            own |= {name: kind(own[name]) for name, kind in kinds.items() if name in own}
            train = _training(entry.get("train", group["train"]), {**arguments, **entry.get("with", {})})
            made = Row(**own, group=group["group"], train=train)
            if made.label in rows:
                raise ValueError(f"There are two rows {made.label!r}; rename one.")
            rows[made.label] = made
    return rows


def _training(path: str, arguments: dict[str, Any]) -> Callable[[Side], Figures]:
    """Return the function `module.name` with arguments; modules are imported when a row trains."""

    def train(side: Side) -> Figures:
        module, name = path.split(".")
        own = {}
        if "then" in arguments and module != "loops":
            own["then"] = getattr(import_module(f"{__package__}.after"), arguments["then"])
        return getattr(import_module(f"{__package__}.{module}"), name)(side, **{**arguments, **own})

    return train


def worst_difference(got: Figures, want: Figures, row: Row) -> tuple[float, str]:
    """Return the differences that are largest relative to their tolerances.

    Returns:
        The largest difference as a fraction of its tolerance, above 1 if figures are not equal, and a text with both
        figures and up to two further names that differ.
    """
    if len(got) != len(want):
        return float("inf"), f"{len(got)} entries logged, stock logs {len(want)}"
    worst: dict[str, tuple[float, str]] = {}
    for number, (mine, theirs) in enumerate(zip(got, want, strict=True), start=1):
        if mine.keys() != theirs.keys():
            return float("inf"), f"entry {number} has {_keys(mine, theirs)}"
        for name, figure in theirs.items():
            part = _fraction_of_tolerance(name, mine[name], figure, row)
            if part > worst.get(name, (-1.0, ""))[0]:
                worst[name] = part, f"{name} {mine[name]:.6g}, stock {figure:.6g} (entry {number})"
    if not worst:
        return float("inf"), "nothing was logged"
    first, *others = sorted(worst.values(), reverse=True)[:3]
    return first[0], "; ".join([first[1], *(text for part, text in others if part > 1)])


def _keys(mine: Mapping[str, float], theirs: Mapping[str, float]) -> str:
    less, more = sorted(theirs.keys() - mine.keys()), sorted(mine.keys() - theirs.keys())
    parts = [f"no {', '.join(less)}"] * bool(less) + [f"{', '.join(more)}, which stock has not"] * bool(more)
    return " and ".join(parts)


def _fraction_of_tolerance(name: str, mine: float, theirs: float, row: Row) -> float:
    if mine == theirs or (mine != mine and theirs != theirs):
        return 0.0
    tolerance = row.norm_tolerance if "norm" in name else 1e-9 if name == "learning_rate" else row.loss_tolerance
    part = abs(mine - theirs) / (tolerance * max(abs(theirs), 1e-3))
    return part if part == part else float("inf")
