"""Run a step in a separate process, within its time limit, and save its findings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from .step import Bench, Status, Step

ROOT = Path(__file__).resolve().parents[2]
RESULTS, OUTPUT = "results.jsonl", "output.txt"
_TAIL_LINES = 40
_KEPT_CHARACTERS = 60_000
"""Number of characters of a step's output in `output.txt`."""
_STACKS_S = 3.0
"""Seconds before its time limit at which a step prints its stack."""


def run_step(step: Step, out: Path, *, rehearses: str, limit_s: float | None = None) -> dict[str, Any]:
    """Run one step and append its record to the results.

    Args:
        step: a value of `STEPS`.
        out: folder of the results.
        rehearses: `cpu` or `cuda` to run there in small sizes; otherwise empty.
        limit_s: remaining seconds of the suite; None for no limit. A step that this ends counts as not run, with any
            findings; a step that its own limit ends has timed out.

    Returns:
        The record: `step`, `status`, `seconds`, `rows`, `notes`, `misses`, `tail`, `date`.
    """
    own_s = step.limit(rehearses=bool(rehearses))
    limit = own_s if limit_s is None else min(limit_s, own_s)
    with tempfile.TemporaryDirectory(prefix="gpu_suite_") as folder:
        began = time.monotonic()
        code, output = _child(step.name, Path(folder), out, rehearses=rehearses, limit_s=limit)
        found = _findings(Path(folder) / "found.jsonl")
    late = Status.NOT_RUN if limit < own_s else Status.TIMED_OUT
    status = late if code is None else Status.FAILED if code else Status.MISSED if found["misses"] else Status.DONE
    if status is Status.NOT_RUN:
        found["notes"].append(f"the minutes ended after {limit:.0f} s of it")
    with (out / OUTPUT).open("a", encoding="utf-8") as file:
        file.write(f"\n==== {step.name}: {status.value}\n{output[-_KEPT_CHARACTERS:]}\n")
    return keep(
        out, step, status, rehearses=rehearses, seconds=round(time.monotonic() - began, 1), limit_s=round(limit),
        tail=output.splitlines()[-_TAIL_LINES:] if status in (Status.FAILED, Status.TIMED_OUT) else [], **found,
    )  # fmt: skip


def keep(out: Path, step: Step, status: Status, *, rehearses: str, **found: Any) -> dict[str, Any]:
    """Append a step's record to the results."""
    record = {
        "step": step.name, "part": step.part, "status": status.value, "rehearsal": rehearses,
        "seconds": 0.0, "rows": [], "notes": [], "misses": [], "tail": [],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), **found,
    }  # fmt: skip
    with (out / RESULTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    return record


def run_here(step: Step, folder: Path, out: Path, *, rehearses: str, limit_s: float) -> None:
    """Run the step's function in this process."""
    import faulthandler
    import warnings

    from transformers.utils import logging

    faulthandler.dump_traceback_later(max(1.0, limit_s - _STACKS_S))
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    device = torch.device("cpu") if rehearses == "cpu" else torch.device("cuda", 0)
    if rehearses:
        torch.set_num_threads(1)
    work = folder / "work"
    work.mkdir()
    step.run(
        Bench(
            device=device,
            rehearses=bool(rehearses),
            folder=work,
            out=out,
            found=folder / "found.jsonl",
            limit_s=limit_s,
        )
    )


def _child(name: str, folder: Path, out: Path, *, rehearses: str, limit_s: float) -> tuple[int | None, str]:
    """Return the exit code (None if time ran out) and the output."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_suite",
        "--out",
        str(out),
        "--as-step",
        name,
        str(folder),
        str(limit_s),
    ]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
    }  # fmt: skip
    if rehearses:
        command += ["--rehearse", rehearses]
        environment |= {"OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if rehearses == "cpu" else {})
    log = folder / "output.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    return code, log.read_text(encoding="utf-8", errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the remaining processes of the step's session; ranks in other sessions end with their parent."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _findings(path: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {"rows": [], "notes": [], "misses": []}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        for kind, content in json.loads(line).items():
            found[{"row": "rows", "note": "notes", "miss": "misses"}[kind]].append(content)
    return found
