"""Run a row on both sides, each in new processes, and return the verdict."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.distributed import RankFailure, run_ranks

from .row import Figures, Oracle, Result, Row, Verdict, read_rows, worst_difference

PRELOAD = ",".join(
    ("transformers.trainer", *(f"{__package__}.{name}" for name in ("trainer", "packages", "loops", "after")))
)
"""Modules that every row needs, for OSDP_TEST_PRELOAD."""
LIMIT_S = 150.0
"""Time limit of one side of a row."""
_PATIENCE_S = 20.0
"""Seconds that a failed rank waits for the outcomes of the others."""
_ENV = {
    Oracle.DDP: {}, Oracle.FSDP2: {"ACCELERATE_USE_FSDP": "true"},
    Oracle.ALONE: {"LOCAL_RANK": "-1"},  # otherwise Accelerate uses DDP in one process
}  # fmt: skip
_LINE = 400
"""Largest number of characters of a refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    figures: Figures | None = None
    layouts: int = 0
    """Number of layouts of the plan that ran; 0 without a plan."""
    error: str = ""
    error_type: str = ""
    is_refusal: bool = False
    """Whether the error is a refusal: raised by the row's package, in one line, before training."""
    trace: str = ""
    at_s: float = field(default_factory=time.time)
    """Time of the outcome; ranks that only lost the failed one report later."""


def run(row: Row) -> Result:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="compatibility_") as folder:
        ours, failure = _side(row, Path(folder, "osdp"), is_stock=False)
        stock, stock_failure = ([], "") if _is_refused(row, ours) else _side(row, Path(folder, "stock"), is_stock=True)
    verdict, detail = judged(row, stock, stock_failure, ours, failure)
    return Result(row=row, verdict=verdict, detail=detail, seconds=time.monotonic() - began)


def _side(row: Row, folder: Path, *, is_stock: bool) -> tuple[list[Outcome], str]:
    """Return the outcome of each rank, and the failure of the processes, if any."""
    folder.mkdir()
    world, failure = (row.oracle.processes if is_stock else 2), ""
    env = _ENV[row.oracle] if is_stock else {}
    try:
        run_ranks(train_row, world, row.label, str(folder), is_stock, init=False, timeout_s=LIMIT_S, env=env)
    except RankFailure as error:
        failure = "hung" if error.error_type == "timeout" else str(error)
    written = [path for rank in range(world) if (path := _path(folder, rank)).exists()]
    outcomes = [Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in written]
    return (outcomes if len(outcomes) == world else []), failure


def train_row(label: str, folder: str, is_stock: bool) -> None:
    """Run one rank of one side, and write its outcome to the folder."""
    import warnings

    from transformers.utils import logging

    from .side import Ours, Side

    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    row, rank = read_rows()[label], int(os.environ["RANK"])
    work = Path(folder, "work")
    side = Side(folder=work, oracle=row.oracle) if is_stock else Ours(folder=work, shift=row.shift, changes=row.config)
    steps, layouts = _record_plans_and_steps()
    try:
        with side.prepared():
            figures = row.train(side)
    except BaseException as error:
        _write(folder, rank, _failed(error, row, in_time=row.is_refused_late or not steps))
        _wait_for_others(folder)
        raise
    _write(folder, rank, Outcome(figures=figures, layouts=len(set().union(*layouts)) if layouts else 0))


def _record_plans_and_steps() -> tuple[list[int], list[set[Any]]]:
    """Return two lists that receive the optimizer steps and the layouts of applied plans."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from hf_osdp.sharding import apply

    steps: list[int] = []
    layouts: list[set[Any]] = []
    register_optimizer_step_post_hook(lambda *_: steps.append(1))
    stock = apply.apply_plan

    def apply_plan(model: Any, plan: Any, *args: Any, **kwargs: Any) -> Any:
        layouts.append({(unit.shard_size, unit.reshard_after_forward) for unit in plan.units})
        return stock(model, plan, *args, **kwargs)

    for module in [m for m in [*sys.modules.values()] if getattr(m, "apply_plan", None) is stock]:
        module.apply_plan = apply_plan
    return steps, layouts


def _failed(error: BaseException, row: Row, *, in_time: bool) -> Outcome:
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


def judged(
    row: Row, stock: list[Outcome], stock_failure: str, ours: list[Outcome], failure: str
) -> tuple[Verdict, str]:
    if _is_refused(row, ours):
        return Verdict.REFUSED, ours[0].error
    if stock_failure:
        error = _first_error(stock)
        what = f"{error.error_type}: {error.error}" if error else stock_failure
        verdict = row.expected if row.expected is Verdict.NOT_APPLICABLE else Verdict.CRASHED
        return verdict, f"the stock side: {one_line(what)}"
    if failure:
        error = _first_error(ours)
        if error is None and failure == "hung":
            return Verdict.HUNG, f"no end within {LIMIT_S:.0f} s"
        if error is None:
            return Verdict.CRASHED, failure.splitlines()[0]
        return Verdict.CRASHED, f"{error.error_type}: {one_line(error.error)}\n{error.trace}"
    if not all(outcome.layouts for outcome in ours):
        return Verdict.DIFFERENT, "no plan ran: the model was not sharded"
    part, text = worst_difference(ours[0].figures, stock[0].figures, row)
    return (Verdict.DIFFERENT, text) if part > 1 else (Verdict.EQUAL, f"largest difference: {text}")


def _is_refused(row: Row, ours: list[Outcome]) -> bool:
    """Return whether every rank refused; the stock side then counts only if it is expected to fail."""
    return bool(ours) and all(outcome.is_refusal for outcome in ours) and row.expected is not Verdict.NOT_APPLICABLE


def _first_error(outcomes: list[Outcome]) -> Outcome | None:
    return min((o for o in outcomes if o.error_type), key=lambda outcome: outcome.at_s, default=None)


def one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _path(folder: Path | str, rank: int) -> Path:
    return Path(folder, f"outcome{rank}")


def _write(folder: str, rank: int, outcome: Outcome) -> None:
    partial = Path(folder, f"partial{rank}")
    partial.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    partial.replace(_path(folder, rank))


def _wait_for_others(folder: str) -> None:
    """Wait for the other ranks to write whether they failed too, because the first failed rank soon ends all."""
    deadline = time.monotonic() + _PATIENCE_S
    outcomes = [_path(folder, rank) for rank in range(int(os.environ["WORLD_SIZE"]))]
    while time.monotonic() < deadline and not all(path.exists() for path in outcomes):
        time.sleep(0.05)
