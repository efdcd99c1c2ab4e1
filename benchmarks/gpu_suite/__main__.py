"""Tests and measurements that need a GPU, the most informative first, for a machine with one GPU and no network.

    python -m benchmarks.gpu_suite --minutes 25 --out DIR              # all, the most informative first
    python -m benchmarks.gpu_suite --minutes 9 --out DIR --from NAME   # in parts: DIR keeps the results of earlier calls
    python -m benchmarks.gpu_suite --out DIR --merge DIR1 DIR2         # one page of the results in several folders
    python -m benchmarks.gpu_suite --rehearse --minutes 10 --out DIR   # on the CPU with gloo, small: checks the suite itself
    python -m benchmarks.gpu_suite --rehearse cuda --out DIR           # small, on a CUDA device: tests/cuda_software's
    python -m benchmarks.gpu_suite --list

Each step runs in its own process, with its own time limit. After each step, its record is appended to
DIR/results.jsonl, its output to DIR/output.txt, and the page DIR/results.md is rewritten. A step that fails or times
out does not stop the others. A step that does not fit into the remaining minutes, or is still running at their end, is
listed as not run. If a step ran more than once, its last run counts.

The exit code is 1 if a step of this call failed, timed out or missed an aim, and 77 without a CUDA device and without
--rehearse. It is 0 otherwise, also if steps were not run or need a GPU that a rehearsal does not have; the page lists
them.

The suite needs Python 3.12, torch, transformers, accelerate, numpy, pandas, psutil, rich, typer, PyYAML and pytest,
and the following packages (wheels of 32 MiB in total), which must be copied to a machine without a network:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \\
        --platform manylinux2014_x86_64 -d wheels ortools immutabledict "protobuf>=6.33.1,<6.34" pydantic \\
        pydantic-core annotated-types typing-inspection typing-extensions filelock
    pip install --no-index --no-deps --upgrade --target site wheels/*.whl && export PYTHONPATH=$PWD/site

datasets and evaluate are not needed, because steps generate their text and create their models from configurations.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

import torch

from . import catalogue  # noqa: F401
from .machine import machine
from .page import page, records_of
from .runner import keep, run_here, run_step
from .step import PARTS, STEPS, Status, Step

NOTHING_MEASURED = 77
_PAGE, _HEAD = "results.md", "machine.jsonl"
_LEAST_S = 5.0


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        show_list()
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    if options.as_step:
        name, folder, limit_s = options.as_step
        run_here(STEPS[name], Path(folder), options.out, rehearses=options.rehearse, limit_s=float(limit_s))
        return 0
    if options.merge:
        write_page(options.out, [options.out, *options.merge])
        return 0
    if not (options.rehearse == "cpu" or torch.cuda.is_available()):
        print(
            "gpu_suite: no CUDA device here, nothing was measured; --rehearse runs the steps on the CPU.",
            file=sys.stderr,
        )
        return NOTHING_MEASURED
    save_machine(options, arguments)
    found = run_all(options)
    bad = [step.name for step, status in found if status.is_bad]
    left = [f"{step.name} ({status.value})" for step, status in found if status in (Status.NEEDS_GPU, Status.NOT_RUN)]
    if left:
        print("Left out:", ", ".join(left))
    print(
        f"{len(bad)} steps went wrong: {', '.join(bad)}" if bad else "No step went wrong.",
        f"Page: {options.out / _PAGE}",
    )
    return 1 if bad else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="time limit of the call in minutes (default 25)")
    parser.add_argument("--out", type=Path, help="folder of the results; it keeps those of earlier calls")
    parser.add_argument(
        "--rehearse", nargs="?", const="cpu", default="", choices=("cpu", "cuda"),
        help="run in small sizes, on the CPU with gloo, or on a CUDA device",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=STEPS, help="run only these steps")
    parser.add_argument("--from", dest="first", metavar="NAME", choices=STEPS, help="run this step and those after it")
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="DIR", help="run nothing; write one page for these folders and --out"
    )
    parser.add_argument("--list", action="store_true", help="list the steps and their expected seconds")
    parser.add_argument("--as-step", nargs=3, metavar=("NAME", "FOLDER", "SECONDS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.out is None and not options.list:
        parser.error("give --out DIR, where the results go")
    if options.only and options.first:
        parser.error("give --only or --from, not both")
    if not 0 < options.minutes < float("inf"):
        parser.error(f"--minutes {options.minutes:g} must be above 0")
    for folder in options.merge or ():
        if not folder.is_dir():
            parser.error(f"--merge: {folder} is not a folder")
    return options


def run_all(options: argparse.Namespace) -> list[tuple[Step, Status]]:
    """Run the chosen steps one after the other until the time is used up."""
    ends = time.monotonic() + 60 * options.minutes
    found = []
    for step in chosen(options):
        left_s = ends - time.monotonic()
        if options.rehearse and step.rehearsal_s is None:
            record = keep(options.out, step, Status.NEEDS_GPU, rehearses=options.rehearse)
        elif left_s < max(_LEAST_S, step.expected(rehearses=bool(options.rehearse))):
            note = f"{left_s:.0f} s were left, {step.expected(rehearses=bool(options.rehearse)):.0f} s are expected"
            record = keep(options.out, step, Status.NOT_RUN, rehearses=options.rehearse, notes=[note])
        else:
            print(f"-- {step.name}: {step.proves}", flush=True)
            record = run_step(step, options.out, rehearses=options.rehearse, limit_s=left_s)
        status = Status(record["status"])
        print(f"   {step.name}: {status.value}, {record['seconds']:.0f} s", *record["misses"], sep="\n   ", flush=True)
        write_page(options.out, [options.out])
        found.append((step, status))
    return found


def chosen(options: argparse.Namespace) -> list[Step]:
    """Return the chosen steps, the most informative first."""
    names = list(STEPS)
    names = names[names.index(options.first) :] if options.first else names
    return [STEPS[name] for name in names if not options.only or name in options.only]


def save_machine(options: argparse.Namespace, arguments: list[str] | None) -> None:
    """Save the machine and the command of the results."""
    from benchmarks.shared import commit

    given = shlex.join(sys.argv[1:] if arguments is None else arguments)
    head = {
        **machine(on_cpu=options.rehearse == "cpu"),
        "commit": commit(),
        "command": f"python -m benchmarks.gpu_suite {given}",
    }
    with (options.out / _HEAD).open("a", encoding="utf-8") as file:
        file.write(json.dumps(head) + "\n")


def write_page(out: Path, folders: list[Path]) -> None:
    """Write the page of all results in the folders."""
    heads = [json.loads(line) for folder in folders for line in _lines(folder / _HEAD)]
    (out / _PAGE).write_text(page(records_of(folders), heads), encoding="utf-8")


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def show_list() -> None:
    for step in STEPS.values():
        rehearsal = "needs a GPU" if step.rehearsal_s is None else f"{step.rehearsal_s:.0f} s rehearsed"
        print(
            f"{step.part} {PARTS[step.part]:<24} {step.name:<18} {step.expected_s:>4.0f} s, {rehearsal}: {step.proves}"
        )


if __name__ == "__main__":
    sys.exit(main())
