"""Compare estimates with published measurements of real GPUs: tokens a second, peak memory, whether a run fits.

    python -m benchmarks.published
    python -m benchmarks.published --data FOLDER   # other rows, in files of the same names
    python -m benchmarks.published --fit           # also fit the share of the peak that products reach

Each row's run is laid out as it was: strategy, micro-batch, accumulation, recomputation, attention kernel, dtypes,
LoRA. Rows whose settings or device are not known, or with compiled blocks, are listed with the reason. Of a file's
rows every second one, beginning with the first, may be used to fit constants; the others judge them. Sources are in
the files' first column. Nothing is measured here.

Descriptions of models are traced once and kept in the package's cache (`OSDP_CACHE`): about three minutes on an idle
core, then seconds. The last line is the headline; the exit code is 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .memory import memory_table, peak_ratio
from .own import own_table
from .rows import FOLDER, Row, read_rows
from .runs import Run, hardware_of

AIM_MEAN, AIM_WORST, AIM_MEDIAN = 0.10, 0.25, 0.05
AIMED = ("h100", "a100-80", "a100-40", "rtx-3090")
"""Devices whose rows must be met; of the others there are few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Estimated tokens a second of one row."""

    run: Run
    estimated: float
    by_data_sheet: float

    @property
    def row(self) -> Row:
        return self.run.row

    @property
    def ratio(self) -> float:
        return self.estimated / self.row.tokens_per_s

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)


def estimated(rows: Sequence[Row]) -> list[Result]:
    """Return the results of the rows that can be estimated."""
    results = []
    for number, row in enumerate(rows, 1):
        print(f"\r{number} of {len(rows)} rows", end="", file=sys.stderr, flush=True)
        run = Run.of(row)
        rates = [run.tokens_per_s(hardware_of(row, data_sheet=sheet)) for sheet in (False, True)]
        results.append(Result(run=run, estimated=rates[0], by_data_sheet=rates[1]))
    print(file=sys.stderr)
    return results


def row_table(results: Sequence[Result]) -> str:
    """Return a line for each row."""
    lines = ["| run | published, tokens/s | estimated | ratio | for |", "| --- | ---: | ---: | ---: | --- |"]
    for result in sorted(results, key=lambda one: (one.row.device, one.row.file, one.row.number)):
        row, use = result.row, "fit" if result.row.is_fitted else "judge"
        lines.append(
            f"| {row.label} | {row.tokens_per_s:,.0f} | {result.estimated:,.0f} | {result.ratio:.2f} | {use} |"
        )
    return "\n".join(lines)


def device_table(results: Sequence[Result]) -> tuple[str, bool]:
    """Return a line for each device, and whether the aims are met on rows that nothing was fitted on."""
    lines = [
        "| device | fitted rows, mean error | judging rows | mean error | worst | median ratio, all | by data sheet |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    met = True
    for device in dict.fromkeys(result.row.device for result in sorted(results, key=lambda one: one.row.device)):
        own = [result for result in results if result.row.device == device]
        fitted, judging = ([r.error for r in own if r.row.is_fitted is flag] for flag in (True, False))
        median, sheet = (
            statistics.median(values)
            for values in ([r.ratio for r in own], [r.by_data_sheet / r.row.tokens_per_s for r in own])
        )
        mean, worst = (statistics.fmean(judging), max(judging)) if judging else (0.0, 0.0)
        shown = f"{statistics.fmean(fitted):.1%} of {len(fitted)}" if fitted else "-"
        lines.append(
            f"| {device} | {shown} | {len(judging)} | {mean:.1%} | {worst:.0%} | {median:.2f} | {sheet:.2f} |"
        )
        missed = mean > AIM_MEAN or worst > AIM_WORST or abs(median - 1) > AIM_MEDIAN
        met = met and not (device in AIMED and missed)
    return "\n".join(lines), met


def kind_table(results: Sequence[Result]) -> str:
    """Return a line for each kind of training of the judging rows of fms_memory.csv: peaks of tensors and seconds."""
    lines = [
        "| kind | rows | memory, estimated / published | mean error | time, likewise | mean error | worst |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    own = [result for result in results if result.row.file == "fms_memory.csv" and not result.row.is_fitted]
    for kind in dict.fromkeys(result.row.kind for result in own):
        alike = [result for result in own if result.row.kind == kind]
        memory = [peak_ratio(result.run) for result in alike if result.row["peak_memory_gib"]]
        times = [1 / result.ratio for result in alike]
        shown, errors = zip(*(_shown(ratios) for ratios in (memory, times)), strict=True)
        worst = max((abs(ratio - 1) for ratio in times), default=0.0)
        lines.append(f"| {kind} | {len(alike)} | {shown[0]} | {errors[0]} | {shown[1]} | {errors[1]} | {worst:.0%} |")
    return "\n".join(lines)


def _shown(ratios: Sequence[float]) -> tuple[str, str]:
    if not ratios:
        return "-", "-"
    mean = statistics.fmean(abs(ratio - 1) for ratio in ratios)
    return ", ".join(f"{ratio:.3f}" for ratio in ratios), f"{mean:.1%}"


def fit_table(results: Sequence[Result]) -> str:
    """Return for each device the share of its peak in products that the fitted rows have, beside the preset's."""
    lines = ["| device | share fitted | share in the preset |", "| --- | ---: | ---: |"]
    for device in dict.fromkeys(result.row.device for result in results):
        own = [result for result in results if result.row.device == device and result.row.is_fitted]

        def loss(share: float) -> float:
            return sum(min(0.3, abs(math.log(_by_share(one, share) / one.row.tokens_per_s))) for one in own)  # noqa: B023

        best = min((0.3 + 0.005 * step for step in range(200)), key=loss) if own else 0.0
        dtype = results[0].run.description.compute_dtype
        reached, peak = (
            hardware_of(_first(results, device), data_sheet=flag).device.rate(dtype) for flag in (False, True)
        )
        lines.append(f"| {device} | {best:.3f} | {reached / peak:.3f} |")
    return "\n".join(lines)


def _first(results: Sequence[Result], device: str) -> Row:
    return next(result.row for result in results if result.row.device == device)


def _by_share(result: Result, share: float) -> float:
    hardware, sheet = (hardware_of(result.row, data_sheet=flag) for flag in (False, True))
    rates = {dtype: share * rate for dtype, rate in sheet.device.flops_per_s.items()}
    return result.run.tokens_per_s(replace(hardware, device=replace(hardware.device, flops_per_s=rates)))


def left_out_table(rows: Sequence[Row]) -> str:
    """Return the reasons for which rows are not estimated, with their numbers."""
    reasons = Counter(row.why_not for row in rows if row.why_not)
    lines = ["| rows | not estimated, because |", "| ---: | --- |"]
    return "\n".join([*lines, *(f"| {count} | {reason} |" for reason, count in reasons.most_common())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=FOLDER, help="folder of the three files of rows")
    parser.add_argument("--fit", action="store_true", help="fit the share of the peak that products reach")
    options = parser.parse_args()
    rows = read_rows(options.data)
    results = estimated([row for row in rows if not row.why_not])
    devices, met = device_table(results)
    parts = [
        "## Rows", row_table(results), "## Not estimated", left_out_table(rows), "## Memory", memory_table(
            [result.run for result in results]
        ), "## This project's H100", own_table(), "## Devices", devices, "## Kinds", kind_table(results),
    ]  # fmt: skip
    parts += ["## Fit", fit_table(results)] if options.fit else []
    print("\n\n".join(parts))
    judged = [result for result in results if not result.row.is_fitted and result.row.device in AIMED]
    mean, worst = statistics.fmean(r.error for r in judged), max(r.error for r in judged)
    print(
        f"\n{len(results)} of {len(rows)} rows estimated; on the {len(judged)} judging rows of {', '.join(AIMED)} the"
        f" mean error is {mean:.1%} (aim {AIM_MEAN:.0%}), {worst:.0%} at worst (aim {AIM_WORST:.0%})"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
