"""Compare the fastest plan with the simplest plan near it: different layouts, groups, use of the host, and step time.

    python -m benchmarks.simplicity [search] [limits] [--simplicity 0.01]

Searches are those of benchmarks/search.py (48) and benchmarks/limits.py (33). Nothing is measured but the seconds of
CPU time that both searches take.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from benchmarks import limits as figure
from benchmarks import search as proofs
from hf_osdp import InfeasibleError, PlanningProblem, search
from hf_osdp.planner.cost.units import shape_ids
from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.search.search import SearchResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One search, for the fastest and for the simplest plan."""

    model: ModelDescription
    fastest: SearchResult
    simplest: SearchResult
    seconds: tuple[float, float]
    """CPU time of the search for the fastest plan, and of that for both."""


def problems(kinds: list[str]) -> Iterator[tuple[str, PlanningProblem]]:
    """Yield each search with the name of its case."""
    if "search" in kinds:
        for case in proofs.CASES:
            description, job = proofs.described(case), proofs.job_of(case)
            for limit in proofs.limits(description, case.hardware, job).values():
                yield (
                    case.name,
                    PlanningProblem(
                        description=description, hardware=case.hardware, job=job, memory_limit_bytes=limit
                    ),
                )
    if "limits" in kinds:
        for panel in figure.CASES:
            asked = panel.problem()
            for limit in panel.limits_gib:
                yield panel.title.split(" on ")[0], replace(asked, memory_limit_bytes=limit * figure.GIB)


def measure(problem: PlanningProblem, simplicity: float) -> Row:
    """Search the fastest plan, then the simplest plan near it."""
    times, found = [time.process_time()], []
    for share in (0.0, simplicity):
        found.append(search(replace(problem, simplicity=share)))
        times.append(time.process_time())  # different searches, which share nothing
    return Row(
        model=problem.description, fastest=found[0], simplest=found[1],
        seconds=(times[1] - times[0], times[2] - times[1]),
    )  # fmt: skip


def layouts(plan: Plan, model: ModelDescription) -> int:
    """Return the number of different layouts among units of equal structure, summed over structures."""
    return len({(shape, unit.layout) for shape, unit in zip(shape_ids(model.units), plan.units, strict=True)})


def show(rows: dict[str, list[Row]], simplicity: float) -> None:
    """Print one line per case: means over its searches."""
    table = Table(title=f"Fastest plan and simplest plan within {simplicity:.1%}")
    for name in (
        "case",
        "searches",
        "simpler",
        "layouts",
        "host",
        "groups",
        "slower, mean",
        "proven",
        "fastest",
        "both",
    ):
        table.add_column(name, justify="left" if name == "case" else "right", no_wrap=True)
    for name, own in [*rows.items(), ("all", list(itertools.chain(*rows.values())))]:
        pairs = [(row.fastest.plan, row.simplest.plan) for row in own]
        counts = [sum(layouts(pair[k], row.model) for row, pair in zip(own, pairs, strict=True)) for k in (0, 1)]
        hosts = [sum(any(unit.uses_host for unit in pair[k].units) for pair in pairs) for k in (0, 1)]
        groups = [sum(pair[k].communicators > 1 for pair in pairs) for k in (0, 1)]
        slower = [row.simplest.time.step_s / row.fastest.time.step_s - 1 for row in own]
        seconds = [sum(row.seconds[k] for row in own) / len(own) for k in (0, 1)]
        table.add_row(
            name, str(len(own)), str(sum(row.simplest.fastest is not None for row in own)),
            " -> ".join(f"{count / len(own):.1f}" for count in counts), " -> ".join(map(str, hosts)),
            " -> ".join(map(str, groups)), f"{sum(slower) / len(own):.2%}",
            str(sum(row.simplest.plan.proven_simplest is True for row in own)), f"{seconds[0]:.2f} s",
            f"{seconds[1]:.2f} s",
        )  # fmt: skip
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=["search", "limits"], help="search, limits or both")
    parser.add_argument("--simplicity", type=float, default=0.01, metavar="SHARE")
    options = parser.parse_args()
    logging.set_verbosity_error()
    rows: dict[str, list[Row]] = defaultdict(list)
    for name, problem in problems(options.kinds):
        try:
            row = measure(problem, options.simplicity)
        except InfeasibleError:
            continue
        rows[name].append(row)
        print(
            f"{name}, {problem.memory_limit_bytes / 2**30:.2f} GiB: {row.simplest.plan.simplified or 'the same'}",
            flush=True,
        )
    show(rows, options.simplicity)


if __name__ == "__main__":
    main()
