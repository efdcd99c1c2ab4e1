"""Plans that were tried before training: what each was expected to need, what it needed, what that changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from ..quantities import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One plan that was tried; bytes of tensors, seconds of an optimizer step."""

    fingerprint: str
    estimated_peak_bytes: int
    measured_peak_bytes: int | None
    """None where there was not enough memory."""
    estimated_step_s: float
    measured_step_s: float | None
    extra_bytes: int
    """What was added to later estimates of the peak."""
    compute_factor: float
    """What later estimates of compute were multiplied by."""
    fits: bool
    runs: bool
    """The plan that training runs."""


def trials_table(rows: Sequence[TrialRow]) -> Table:
    """A line a plan, in the order in which they were tried."""
    table = Table(
        title="Tried before training, estimated / measured", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for name in ("round", "plan"):
        table.add_column(name, no_wrap=True)
    for name in ("peak", "step", "correction"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    for number, row in enumerate(rows, start=1):
        peak = "out of memory" if row.measured_peak_bytes is None else format_bytes(row.measured_peak_bytes)
        step = "-" if row.measured_step_s is None else format_seconds(row.measured_step_s)
        sign = "-" if row.extra_bytes < 0 else "+"
        table.add_row(
            str(number),
            row.fingerprint,
            f"{format_bytes(row.estimated_peak_bytes)} / {peak}",
            f"{format_seconds(row.estimated_step_s)} / {step}",
            f"{sign}{format_bytes(abs(row.extra_bytes))}, x{row.compute_factor:.2f}",
            "runs" if row.runs else "fits" if row.fits else "over limit",
        )
    return table
