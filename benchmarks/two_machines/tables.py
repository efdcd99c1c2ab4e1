"""Rows, verdicts and tables of the emulations."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.two_machines.lineup import ALONE, EXACT_PLAN, STOCK, STOCK_BF16
from hf_osdp.quantities import format_bytes
from hf_osdp.report.tables import make_table

NAMES = {
    STOCK: "torch's full shard",
    STOCK_BF16: "full shard, bf16 reduced",
    "fsdp": "full shard",
    "two_stage": "two stages",
    "hsdp": "HSDP",
    "ddp": "DDP-like",
    "zero2": "ZeRO-2",
    EXACT_PLAN: "planner's exact plan",
    "osdp": "planner's choice",
    ALONE: "(no communication)",
}
"""Names of the strategies in tables, in order."""
BYTES_AIM, TIME_AIM = 0.015, 0.10
NEAR_FASTEST = 1.05
"""Largest allowed ratio of the step of the planner's choice to the fastest strategy's."""
GAINS, GAIN_RATE = {"exact": 2.0, "bf16": 3.0, "int8": 4.0, "int4": 4.8}, "100mbit"
"""Required gain of the planner's choice over torch's own full shard in tokens per second at this rate, by
communication format.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One strategy in one cell."""

    strategy: str
    entrant: str
    """Entrant that took the steps; another strategy's if the plans are equal."""
    layout: str
    sent_bytes: float
    """Bytes per step of the node that sends most, including headers; mean of the rounds."""
    theory_bytes: float
    step_s: float
    """Median over the rounds, as are `estimated_s` and `gain`."""
    fastest_s: float
    slowest_s: float
    estimated_s: float
    gain: float
    """Tokens per second divided by those of torch's own full shard in the same round."""
    gain_range: tuple[float, float]

    @property
    def bytes_error(self) -> float:
        return self.sent_bytes / self.theory_bytes - 1 if self.theory_bytes else 0.0

    @property
    def time_error(self) -> float:
        return self.estimated_s / self.step_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """All strategies at one rate under one limit."""

    rate: str
    limit_bytes: int
    rows: tuple[Row, ...]
    """Rows of the strategies that fit, without the plain model."""
    alone: Row
    communication: str
    needs: Mapping[str, int | None]
    """Bytes needed by strategies that do not fit; None if they cannot run here at all."""

    def row(self, strategy: str) -> Row | None:
        return next((row for row in self.rows if row.strategy == strategy), None)

    @property
    def behind(self) -> float | None:
        """Step of the planner's choice divided by the fastest; None if nothing was planned."""
        choice = self.row("osdp")
        return None if choice is None else choice.step_s / min(row.step_s for row in self.rows)

    @property
    def time_error(self) -> float:
        return statistics.fmean(abs(row.time_error) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An aim, and whether it was met."""

    text: str
    met: bool


def cells_of(found: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield the cells of one emulation, from the result of `worker.measure`."""
    experiment, rows = found["experiment"], found["rows"]
    for limit, cell in zip(experiment["limits"], found["cells"], strict=True):
        fits = [name for name in NAMES if "entrant" in cell.get(name, {})]
        yield Cell(
            rate=experiment["rate"],
            limit_bytes=limit,
            rows=tuple(_row(strategy, cell[strategy]["entrant"], rows) for strategy in fits),
            alone=_row(ALONE, ALONE, rows),
            communication=experiment.get("communication", "exact"),
            needs={name: cell[name]["needs"] for name in NAMES if "needs" in cell.get(name, {})},
        )


def _row(strategy: str, entrant: str, rows: Mapping[str, Any]) -> Row:
    own, rounds = rows[entrant], rows[entrant]["rounds"]
    steps = [one["step_s"] for one in rounds]
    gains = [stock["step_s"] / step for stock, step in zip(rows[STOCK]["rounds"], steps, strict=True)]
    return Row(
        strategy=strategy, entrant=entrant, layout=own["layout"],
        sent_bytes=statistics.fmean(max(one["sent_bytes"]) for one in rounds), theory_bytes=own["theory_bytes"],
        step_s=statistics.median(steps), fastest_s=min(steps), slowest_s=max(steps),
        estimated_s=statistics.median(one["estimated_s"] for one in rounds),
        gain=statistics.median(gains), gain_range=(min(gains), max(gains)),
    )  # fmt: skip


def verdicts(cells: Sequence[Cell]) -> list[Verdict]:
    """Return a verdict on every aim over all cells."""
    rows = [row for cell in cells for row in cell.rows]
    behind = [(cell.behind or 1.0, cell) for cell in cells]
    worst, where = max(behind, key=lambda pair: pair[0])
    bytes_error = max(abs(row.bytes_error) for row in rows)
    time_error = statistics.fmean(abs(row.time_error) for row in rows)
    off = max(cells, key=lambda cell: cell.time_error)
    found = [
        Verdict(
            text=f"planner's choice: at most {worst:.2f} times the fastest that fits ({title(where)}); aim {NEAR_FASTEST}",  # noqa: E501
            met=worst <= NEAR_FASTEST,
        ),
        Verdict(
            text=f"bytes between machines: at most {bytes_error:.2%} from theory; aim {BYTES_AIM:.1%}",
            met=bytes_error <= BYTES_AIM,
        ),
        Verdict(
            text=f"step times: {time_error:.1%} from estimates on average, {off.time_error:.1%} in {title(off)}; aim {TIME_AIM:.0%}",  # noqa: E501
            met=time_error <= TIME_AIM,
        ),
    ]
    choices = [(cell, choice) for cell in cells if cell.rate == GAIN_RATE and (choice := cell.row("osdp"))]
    if choices:
        least, aim = min(choice.gain for _, choice in choices), GAINS[choices[0][0].communication]
        text = f"at {rate_name(GAIN_RATE)}: {least:.2f} times torch's own full shard; aim {aim:g}"
        halves = [half.step_s / choice.step_s for cell, choice in choices if (half := cell.row(STOCK_BF16))]
        found.append(
            Verdict(
                text=text + (f" ({min(halves):.2f} times that with bf16 reduction)" if halves else ""),
                met=least >= aim,
            )
        )
    return found


def cell_table(cell: Cell) -> Table:
    """Return a table with one line per strategy; bytes in millions, times in seconds."""
    table = make_table(f"{title(cell)}. A step: MB from one machine, seconds, speed over torch's full shard")
    table.add_column("strategy", no_wrap=True)
    for name in ("MB", "theory", "off", "step", "min", "max", "tokens/s", "estimate", "off"):
        table.add_column(name, justify="right", no_wrap=True)
    for strategy, name in NAMES.items():
        row = cell.alone if strategy == ALONE else cell.row(strategy)
        if row is not None:
            table.add_row(name, *_figures(row))
        elif strategy in cell.needs:
            needs = cell.needs[strategy]
            table.add_row(f"{name}: {f'needs {format_bytes(needs)}' if needs else 'cannot run here'}")
    return table


def _figures(row: Row) -> list[str]:
    sends = row.strategy != ALONE
    sent = (
        [f"{row.sent_bytes / 1e6:.2f}", f"{row.theory_bytes / 1e6:.2f}", f"{row.bytes_error:+.2%}"]
        if sends
        else [""] * 3
    )
    times = [f"{seconds:.2f}" for seconds in (row.step_s, row.fastest_s, row.slowest_s)]
    return [*sent, *times, f"x {row.gain:.2f}" if sends else "", f"{row.estimated_s:.2f}", f"{row.time_error:+.1%}"]


def remarks(cell: Cell) -> str:
    """Return the planner's choice, and whether the machine was idle."""
    lines = []
    if choice := cell.row("osdp"):
        same = f" (= {NAMES[choice.entrant]})" if choice.entrant in NAMES and choice.entrant != "osdp" else ""
        low, high = choice.gain_range
        lines.append(f"planner's choice{same}: {choice.layout}; x {low:.2f} to {high:.2f} in the rounds")
    lines.append(
        f"load check: without communication a step took up to {cell.alone.slowest_s / cell.alone.fastest_s:.2f} times"
        " its best"
    )
    return "\n".join(lines)


def title(cell: Cell) -> str:
    return f"{rate_name(cell.rate)}, {format_bytes(cell.limit_bytes)} a rank"


def rate_name(rate: str) -> str:
    """Return the rate for people: `100mbit` → `100 Mbit/s`, `50mbit/1gbit` → `50 Mbit/s, 1 Gbit/s`."""
    return ", ".join(f"{one[:-4]} {one[-4].upper()}bit/s" if one.endswith("bit") else one for one in rate.split("/"))
