"""Runs a row on both sides, each in fresh processes, and gives the verdict."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.distributed import RankFailure, run_ranks

from .row import ROWS, Figures, Oracle, Result, Row, Verdict, worst_difference

PRELOAD = "transformers.trainer,trl,sentence_transformers,peft,benchmarks.compatibility.catalogue"
"""What every row needs, for OSDP_TEST_PRELOAD."""
LIMIT_S = 150.0
"""Of one side of a row."""
_PATIENCE_S = 20.0
"""How long a rank that failed waits for the others to say what became of them."""
_ENV = {
    Oracle.FSDP2: {"ACCELERATE_USE_FSDP": "true"},
    Oracle.ALONE: {"LOCAL_RANK": "-1"},  # else Accelerate wraps one process in DDP
}
_LINE = 400
"""Characters of a refusal at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one rank has to say."""

    figures: Figures | None = None
    layouts: int = 0
    """How many layouts the plan that ran had; 0 without a plan."""
    error: str = ""
    error_type: str = ""
    is_refusal: bool = False
    """Raised on purpose, by the package that the row names, in one line, in time."""
    trace: str = ""
    at_s: float = field(default_factory=time.time)
    """When it was said: the ranks that lose the one that failed say so later."""


def run(row: Row) -> Result:
    """Both sides of a row, and what follows."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="compatibility_") as folder:
        ours, failure = _side(row, Path(folder, "osdp"), is_stock=False)
        stock, stock_failure = ([], "") if _is_refused(row, ours) else _side(row, Path(folder, "stock"), is_stock=True)
    verdict, detail = judged(row, stock, stock_failure, ours, failure)
    return Result(row=row, verdict=verdict, detail=detail, seconds=time.monotonic() - began)


def _side(row: Row, folder: Path, *, is_stock: bool) -> tuple[list[Outcome], str]:
    """What each rank said, and what went wrong with the processes, if anything did."""
    folder.mkdir()
    world, failure = (row.oracle.processes if is_stock else 2), ""
    env = _ENV.get(row.oracle, {}) if is_stock else {}
    try:
        run_ranks(train_row, world, row.label, str(folder), is_stock, init=False, timeout_s=LIMIT_S, env=env)
    except RankFailure as error:
        failure = "hung" if error.error_type == "timeout" else str(error)
    outcomes = [pickle.loads(path.read_bytes()) for rank in range(world) if (path := _path(folder, rank)).exists()]
    return (outcomes if len(outcomes) == world else []), failure


def train_row(label: str, folder: str, is_stock: bool) -> None:
    """One rank of one side. What becomes of it is written beside the folder's other files."""
    import warnings

    from transformers.utils import logging

    from . import catalogue  # noqa: F401
    from .side import Ours, Side

    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    row, rank = ROWS[label], int(os.environ["RANK"])
    work = Path(folder, "work")
    side = Side(folder=work, oracle=row.oracle) if is_stock else Ours(folder=work, shift=row.shift, changes=row.config)
    steps, layouts = _watched()
    try:
        with side.prepared():
            figures = row.train(side)
    except BaseException as error:
        _write(folder, rank, _failed(error, row, in_time=row.is_refused_late or not steps))
        _await_others(folder)
        raise
    _write(folder, rank, Outcome(figures=figures, layouts=len(set().union(*layouts)) if layouts else 0))


def _watched() -> tuple[list[int], list[set[Any]]]:
    """Lists that fill with optimizer steps, and with the layouts of plans that are applied."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from hf_osdp.sharding import apply

    steps: list[int] = []
    layouts: list[set[Any]] = []
    register_optimizer_step_post_hook(lambda *_: steps.append(1))
    stock = apply.apply_plan

    def apply_plan(model: Any, plan: Any, *args: Any, **kwargs: Any) -> Any:
        layouts.append({(unit.shard_size, unit.reshard_after_forward) for unit in plan.units})
        return stock(model, plan, *args, **kwargs)

    for module in [m for m in sys.modules.values() if getattr(m, "apply_plan", None) is stock]:
        module.apply_plan = apply_plan
    return steps, layouts


def _failed(error: BaseException, row: Row, *, in_time: bool) -> Outcome:
    """An outcome that tells a refusal from a crash."""
    from hf_osdp.errors import OSDPError

    frames = traceback.extract_tb(error.__traceback__)
    is_from = bool(frames) and row.refused_by in Path(frames[-1].filename).parts
    line = str(error)
    is_line = "\n" not in line and 0 < len(line) <= _LINE
    return Outcome(
        error=line,
        error_type=type(error).__name__,
        is_refusal=isinstance(error, (ValueError, OSDPError, NotImplementedError)) and is_from and is_line and in_time,
        trace="".join(traceback.format_exception(error)[-4:]),
    )


def judged(row: Row, stock: list[Outcome], stock_failure: str, ours: list[Outcome], failure: str) -> tuple[Verdict, str]:
    """The verdict and its detail.

    Args:
        row: what was run.
        stock, ours: what each rank said; empty where not all did.
        stock_failure, failure: what went wrong with the processes; empty where nothing did, `hung` for those without an end.
    """
    if _is_refused(row, ours):
        return Verdict.REFUSED, ours[0].error
    if stock_failure:
        error = _first_error(stock)
        what = f"{error.error_type}: {error.error}" if error else stock_failure
        verdict = row.expected if row.expected is Verdict.NOT_APPLICABLE else Verdict.CRASHED
        return verdict, f"the stock side: {one_line(what)}"
    if failure:
        error = _first_error(ours)
        if error is None:
            return (Verdict.HUNG, f"no end within {LIMIT_S:.0f} s") if failure == "hung" else (Verdict.CRASHED, failure.splitlines()[0])
        return Verdict.CRASHED, f"{error.error_type}: {one_line(error.error)}\n{error.trace}"
    if not all(outcome.layouts for outcome in ours):
        return Verdict.DIFFERENT, "no plan ran: the model was not sharded"
    part, text = worst_difference(ours[0].figures, stock[0].figures, row)
    if part > 1:
        return Verdict.DIFFERENT, text
    return Verdict.EQUAL, f"largest difference: {text}"


def _is_refused(row: Row, ours: list[Outcome]) -> bool:
    """Every rank has refused; what stock does is then of interest only where stock is expected to fail."""
    return bool(ours) and all(outcome.is_refusal for outcome in ours) and row.expected is not Verdict.NOT_APPLICABLE


def _first_error(outcomes: list[Outcome]) -> Outcome | None:
    return min((o for o in outcomes if o.error_type), key=lambda outcome: outcome.at_s, default=None)


def one_line(text: str) -> str:
    """The first 300 characters, without line breaks."""
    return " ".join(text.split())[:300]


def _path(folder: Path | str, rank: int) -> Path:
    return Path(folder, f"outcome{rank}")


def _write(folder: str, rank: int, outcome: Outcome) -> None:
    partial = Path(folder, f"partial{rank}")
    partial.write_bytes(pickle.dumps(outcome))
    partial.replace(_path(folder, rank))


def _await_others(folder: str) -> None:
    """The first rank to fail ends all of them soon; the others shall say first whether they failed alike."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline and not all(_path(folder, rank).exists() for rank in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.05)
