"""The headline experiments of `benchmarks/headline`, one per step."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

from .runner import ROOT
from .step import Bench, step

TITLES = {
    1: "GPT-2 48 x 1536 under 8 GiB, as rank 0 of 8, the link emulated",
    2: "8 layers of OPT-30B under 16 GiB, as rank 0 of 8, the link emulated",
    3: "deep and narrow, shallow and wide, a mix, as rank 0 of 8, the link emulated",
    4: "OPT-6.7B on one device, states on the host",
}
EXPECTED_S = {1: 150.0, 2: 120.0, 3: 300.0, 4: 180.0}


def experiment(bench: Bench, number: int) -> None:
    """Run an experiment on the GPU; a rehearsal only plans it."""
    result = bench.folder / "headline.json"
    how = ["--plan-only"] if bench.rehearses else ["--device", "cuda", "--quick"]
    command = [sys.executable, "-m", "benchmarks.headline", *how, "--experiments", str(number), "--json", str(result)]
    done = subprocess.run(command, cwd=ROOT)
    found = json.loads(result.read_text(encoding="utf-8"))
    for row in found["rows"]:
        bench.row(
            case=row["case"], rule=row["rule"], plan=row["contender"], batch=row["global_batch_size"] or "-",
            estimated=_ms(row["estimated_step_s"]), measured=_ms(row["measured_step_s"]),
            gain="-" if row["measured_gain"] is None else f"{row['measured_gain']:.2f}",
            memory="OUT OF MEMORY" if row["out_of_memory"] else _gib(row["measured_peak_bytes"] or row["estimated_peak_bytes"]),  # noqa: E501
        )  # fmt: skip
    for remark in found["remarks"]:
        bench.note(remark)
    for verdict in found["verdicts"]:
        (bench.note if verdict["met"] else bench.miss)(verdict["text"])
    bench.aim(done.returncode in (0, 1), f"benchmarks.headline ended with code {done.returncode}")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f} ms"


def _gib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**30:.2f} GiB"


for _number, _title in TITLES.items():
    step(
        part=6, name=f"headline-{_number}", proves=_title, expected_s=EXPECTED_S[_number],
        limit_s=2.5 * EXPECTED_S[_number],
        rehearsal_s=25.0 if _number == 1 else None,
    )(partial(experiment, number=_number))  # fmt: skip
