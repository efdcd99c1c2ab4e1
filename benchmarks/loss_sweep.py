"""Train every class of transformers that takes labels by a plan with smaller micro-batches, and compare with the stock Trainer.

    python -m benchmarks.loss_sweep [--only NAME ...] [--part I/N] [--out FILE]
    python -m benchmarks.loss_sweep --markdown docs/loss_sweep.md FILE ...

A scan finds the classes, which are tried in the order of a hash of their names, so that those tried in a part of the time are a fair
sample. Each is built with a small configuration (`small_models`) and trains two steps of 8 samples in float64, in one process: under the
stock Trainer, and under a plan. If the planner may choose the micro-batch, the memory limit is between what micro-batches of 4 and of 8
samples need at least. Losses and gradient norms must agree within 1e-9. The exit code is 1 if a class trains unequal.
"""  # noqa: E501

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import math
import re
import signal
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainingArguments

import hf_osdp
from benchmarks.small_models import SAMPLES, STEPS, InDouble, built, classes, collated, rows_of
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import SearchResult, least_memory
from hf_osdp.preparation import find_plan as finding
from hf_osdp.versions import package_versions

TOLERANCE = 1e-9
SECONDS = 40
"""CPU time limit of a class."""
LIMIT, FIXED, KEPT, UNEQUAL, REFUSED, NOT_BUILT = OUTCOMES = (
    "equal (under a limit)", f"equal ({SAMPLES // 2} samples fixed)", "kept", "unequal", "refused", "not built",
)  # fmt: skip
_OSDP = {"hardware": "cpu", "compare": False, "operator_splitting": False, "recompute": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one class."""

    name: str
    outcome: str
    """One of OUTCOMES."""
    detail: str = ""
    """The reason that the run gave, or the error."""
    micro_batch_size: int = 0
    worst: float = 0.0
    """Largest relative difference of a loss or gradient norm."""


class Recorded:
    """Mixin that records the losses of micro-steps."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.__dict__.setdefault("losses", defaultdict(float))[self.state.global_step] += float(loss)  # type: ignore[attr-defined]
        return loss


class Stock(Recorded, transformers.Trainer):
    """The stock Trainer."""


class Ours(Recorded, hf_osdp.Trainer):
    """The Trainer under a plan."""


def trainer_of(cls: type, name: str, rows: Any, folder: str, **given: Any) -> Any:
    options: dict[str, Any] = {
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "remove_unused_columns": False,
    }
    args = TrainingArguments(
        folder, max_steps=STEPS, logging_steps=1, optim="sgd", learning_rate=0.01, use_cpu=True, per_device_train_batch_size=SAMPLES,  # noqa: E501
        bf16=False, logging_nan_inf_filter=False, seed=5, **options,
    )  # fmt: skip
    return cls(model=built(name), args=args, train_dataset=rows, data_collator=collated, **given)


def figures(trainer: Any) -> list[float]:
    """Train, and return losses and gradient norms."""
    torch.manual_seed(7)
    with InDouble():
        trainer.train()
    return [
        *trainer.losses.values(),
        *(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry),
    ]


class _Watch(logging.Handler):
    """What a run under a plan did about micro-batches: the outcome if it trains equal, and its reason to keep them."""

    outcome, reason = KEPT, "no reason given"

    def emit(self, record: logging.LogRecord) -> None:
        kept = re.match(r"(.*), so micro-batches stay", record.getMessage())
        self.reason = kept[1] if kept else self.reason

    @contextmanager
    def halving(self) -> Iterator[None]:
        """Search under a limit that needs micro-batches of half the samples, if the planner may choose them."""
        stock, logger = finding.search, logging.getLogger("hf_osdp")

        def search(problem: PlanningProblem) -> SearchResult:
            if problem.job.micro_batch_size is not None:
                return stock(problem)
            jobs = [replace(problem.job, micro_batch_size=size) for size in (SAMPLES // 2, SAMPLES)]
            half, whole = (least_memory(replace(problem, job=job)) for job in jobs)
            self.outcome = LIMIT if half < whole else FIXED
            if half < whole:
                return stock(replace(problem, memory_limit_bytes=(half + whole) // 2))
            # in the smallest models accumulated gradients need more than the activations of the other samples
            return stock(replace(problem, job=jobs[0]))

        finding.search = search
        logger.addHandler(self)
        try:
            yield
        finally:
            finding.search = stock
            logger.removeHandler(self)


def tried(name: str, folder: str) -> Result:
    """Try one class."""
    stage, watch = "model", _Watch()
    try:
        model = built(name)
        stage = "batch"
        rows = rows_of(model)
        stage = "stock Trainer"
        expected = figures(trainer_of(Stock, name, rows, folder))
        if not all(map(math.isfinite, expected)):
            raise ValueError("losses or gradients are not finite")
        stage = "plan"
        with watch.halving():
            trainer = trainer_of(Ours, name, rows, folder, osdp=_OSDP)
        found = figures(trainer)
        if (worst := worst_of(found, expected)) > TOLERANCE:
            stage = "stock Trainer"
            if worst_of(figures(trainer_of(Stock, name, rows, folder)), expected) > TOLERANCE:
                raise ValueError("results differ from run to run")
    except TimeoutError:
        raise
    except Exception as error:  # a model can raise any exception
        line = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        return Result(
            name=name,
            outcome=REFUSED if stage == "plan" else NOT_BUILT,
            detail=line if stage == "plan" else f"{stage}: {line}",
        )
    size = trainer.plan.micro_batch_size
    assert (size == SAMPLES) == (watch.outcome == KEPT)
    outcome = watch.outcome if worst <= TOLERANCE else UNEQUAL
    detail = (
        watch.reason
        if watch.outcome == KEPT
        else f"losses and norms {found}, stock {expected}"
        if outcome == UNEQUAL
        else ""
    )
    return Result(name=name, outcome=outcome, detail=detail, micro_batch_size=size, worst=worst)


def worst_of(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference; infinity if figures are missing or not finite."""
    if len(found) != len(expected) or not all(map(math.isfinite, found + expected)):
        return float("inf")
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, expected, strict=True))


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after some seconds of CPU time."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def sweep(names: list[str], report: Callable[[Result], None]) -> None:
    """Try the classes one by one."""
    torch.set_default_dtype(torch.float64)
    gc.freeze()  # a Trainer collects garbage, which takes half a second with all of transformers loaded
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                with limited(SECONDS):
                    result = tried(name, folder)
            except TimeoutError as error:
                result = Result(name=name, outcome=NOT_BUILT, detail=f"time: {error}")
            report(result)


def shuffled(names: list[str]) -> list[str]:
    """Return names in an order that depends on nothing but the names."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())


# ---------------------------------------------------------------------------------------------------------- the page


def markdown(results: list[Result]) -> str:
    """Return the page of the documentation."""
    found, versions = classes(), package_versions()
    outcomes = {outcome: [result for result in results if result.outcome == outcome] for outcome in OUTCOMES}
    equal = outcomes[LIMIT] + outcomes[FIXED]
    known = {result.name for result in results}
    first = next((number for number, name in enumerate(shuffled(found)) if name not in known), len(found))
    return PAGE.format(
        samples=SAMPLES // 2, tried=len(results), found=len(found), first=first,
        outcomes="\n".join(f"| {outcome} | {len(those)} |" for outcome, those in outcomes.items()),
        worst=f"{max((result.worst for result in equal + outcomes[KEPT]), default=0.0):.0e}",
        limit=_listed(outcomes[LIMIT]), fixed=_listed(outcomes[FIXED]),
        kept=_listed(outcomes[KEPT]), reasons=_counted(re.sub(rf"\b{re.escape(r.name)}\b", "the class", r.detail) for r in outcomes[KEPT]),  # noqa: E501
        other="\n".join(f"- {r.name}: {r.outcome}: {r.detail}" for r in outcomes[UNEQUAL] + outcomes[REFUSED]) or "None.",  # noqa: E501
        kinds=_counted(_kind(result.detail) for result in outcomes[NOT_BUILT]),
        not_built="\n".join(f"- {r.name}: {_short(r.detail)}" for r in outcomes[NOT_BUILT]),
        versions=", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "accelerate")),
    )  # fmt: skip


def _counted(values: Iterator[str]) -> str:
    return "\n".join(f"| {value} | {number} |" for value, number in Counter(values).most_common())


def _listed(results: list[Result]) -> str:
    """Return the classes by the ending of their names."""
    groups: dict[str, list[str]] = defaultdict(list)
    for result in results:
        parts = re.fullmatch(r"(.+?)(For[A-Z]\w*)", result.name)
        groups[parts[2] if parts else "others"].append(parts[1] if parts else result.name)
    return (
        "\n".join(f"- {head} ({len(names)}): {', '.join(names)}" for head, names in sorted(groups.items())) or "None."
    )


_KINDS = {
    r"ImportError": "not applicable: needs a library that is not installed (timm, detectron2, natten)",
    r"(?i)not (implemented|supported) yet|not trainable|not support training|training is not|do not pass `labels`": (
        "not applicable: the class refuses to train"
    ),
    r"time:": f"takes longer than the {SECONDS} s of CPU time",
    r"parameters with small": "large even with small sizes",
    r"batch: .*(no loss|attribute 'loss')": "no finite loss with any of the labels tried",
    r"model:": "no model with the small configuration",
    r"batch:": "no batch that suits the class",
    r"stock Trainer:": "the stock Trainer's results are not finite, differ from run to run, or it fails",
}
"""Patterns of details → kinds of reasons, the first that is found counts."""


def _kind(detail: str) -> str:
    return next(kind for pattern, kind in _KINDS.items() if re.search(pattern, detail))


def _short(detail: str) -> str:
    """Return the first words of a reason, safe in Markdown."""
    return re.sub(r"[<>|*_`]", " ", detail.replace("ValueError: ", "", 1))[:110].strip()


PAGE = """# Losses under smaller micro-batches

A comparison with the stock Trainer for classes of transformers whose forward takes `labels`: two steps of 8 samples in float64, one
process, under a memory limit that micro-batches of 8 do not meet. Which micro-batches may change is
[found in a trace](losses.md). Losses and gradient norms agree within 1e-9 (the largest relative difference is {worst}).

| outcome | classes |
| --- | --- |
{outcomes}

- `equal (under a limit)`: the memory limit made the planner halve the micro-batch.
- `equal ({samples} samples fixed)`: micro-batches of {samples} need no less memory in so small a model, so the run fixes them instead.
- `kept`: the micro-batch stayed as the arguments have it, for the reason that the run gave.
- `refused`: an error in one line, before training.
- `not built`: no small model or batch was made by the generic rules, or the stock Trainer failed on it.

{tried} of the {found} classes that the scan finds were tried, in the order of a hash of their names (the first {first} of that order
without a gap). Written by `python -m benchmarks.loss_sweep --out FILE` (`--part I/N` divides the classes; a further run with the same
file goes on), then `python -m benchmarks.loss_sweep --markdown docs/loss_sweep.md FILE ...`; two CPU cores, {versions}, 26 November 2026.

## Equal under a limit
{limit}

## Equal with {samples} samples fixed
{fixed}

## Kept
| reason | classes |
| --- | --- |
{reasons}

{kept}

## Unequal or refused
{other}

## Not built
| reason | classes |
| --- | --- |
{kinds}

{not_built}
"""  # noqa: E501


def main(arguments: list[str] | None = None) -> int:
    """Try classes, or write the page from the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="classes to try; default: all that the scan finds")
    parser.add_argument("--part", metavar="I/N", default="1/1", help="try only the I-th of N parts of the classes")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="append a line of JSON for each class; classes already there are left out",
    )
    parser.add_argument("--markdown", nargs="+", type=Path, metavar="FILE", help="write a page from files of results")
    options = parser.parse_args(arguments)
    if options.markdown:
        page, *files = options.markdown
        page.write_text(markdown(read(files)), encoding="utf-8")
        return 0
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    part, parts = map(int, options.part.split("/"))
    done = {result.name for result in read([options.out])} if options.out and options.out.exists() else set()
    outcomes: Counter[str] = Counter()

    def report(result: Result) -> None:
        outcomes[result.outcome] += 1
        print(
            f"{result.name}: {result.outcome} {result.micro_batch_size} {result.worst:.1e} {result.detail}",
            file=sys.stderr,
            flush=True,
        )
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")

    sweep([name for name in shuffled(options.only or classes())[part - 1 :: parts] if name not in done], report)
    print(dict(outcomes))
    return int(UNEQUAL in outcomes)


def read(files: list[Path]) -> list[Result]:
    """Return the results in files, in the order of names."""
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted((Result(**json.loads(line)) for line in lines), key=lambda result: result.name)


if __name__ == "__main__":
    sys.exit(main())
