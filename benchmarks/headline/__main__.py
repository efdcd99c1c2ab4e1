"""The headline experiments: OSDP against full sharding, ZeRO-2 and DDP under a memory limit, each at one batch and at
its own best.

    python -m benchmarks.headline --plan-only                    # estimates for the real sizes; no device is needed
    python -m benchmarks.headline --device cuda --json FILE --markdown FILE

1. GPT-2, 48 layers of 1536, 8 GiB on each of 8 devices connected by PCIe 3.0; 2. the first 8 layers of OPT-30B, 16
GiB; 3. a deep and narrow, a shallow and wide, and a mixed model; 4. one device, 6.7B parameters, some or all optimizer
states on the host.

`--device cuda` trains on one real GPU as rank 0 of 8. Torch's allocator enforces the memory limit, so a plan that does
not fit runs out of memory; compute, sharding and FSDP2's streams are real. The link is EMULATED: collectives send
nothing, and keep FSDP2's communication streams busy for as long as PCIe 3.0 would take (latency + bytes / bandwidth).
The tables say so.

Single strategies recompute all blocks or none, whichever is faster. OSDP decides for each unit and, with `--splits`,
also how the model is split. The equal batch is the global batch with which full sharding is fastest (8 samples in
experiment 4). Aims: no plan needs more than its limit; OSDP is the fastest by estimate, and measured within 5 % of the
fastest. The exit code is 1 if an aim is missed, and 77 without a device to measure on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
import textwrap
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.shared import commit
from hf_osdp.versions import package_versions

from .cases import CASES, NAMED, Case, chosen, named_machine
from .lineup import line_up
from .rows import Row, rows_of
from .tables import WIDTH, groups, markdown, remarks, table_of, verdicts

NOTHING_MEASURED = 77
EXPERIMENTS = (1, 2, 3, 4)
TITLES = {"cuda": "one GPU as rank 0 of 8, its link emulated", "plan": "planned"}
LINKS = {"cuda": "EMULATED link", "plan": "Estimated"}


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(width=WIDTH)
    if options.mode == "cuda" and (problem := no_device()):
        print(problem, file=sys.stderr)
        return NOTHING_MEASURED
    sections: list[tuple[Case, Sequence[Row]]] = []
    machine, notes = {"plan": estimate_real_sizes, "cuda": run_on_cuda}[options.mode](options, sections, console)
    rows = [row for _, members in sections for row in members]
    for note in notes:
        print(textwrap.fill(note, WIDTH - 1))
    judged = verdicts(rows)
    for verdict in judged:
        print(f"{'met   ' if verdict.met else 'MISSED'} {verdict.text}")
    head = {"title": TITLES[options.mode], **metadata_of(arguments, machine, notes)}
    if options.json:
        content = {
            **head,
            "mode": options.mode,
            "rows": [asdict(row) for row in rows],
            "verdicts": [asdict(one) for one in judged],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(markdown(sections, head, LINKS[options.mode]), encoding="utf-8")
    return 0 if all(verdict.met for verdict in judged) else 1


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda",), help="train on a GPU")
    parser.add_argument("--plan-only", action="store_true", help=f"estimates for {NAMED} devices; nothing is trained")
    parser.add_argument("--experiments", type=numbers, help="with commas, for example 1,3 (default all)")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument(
        "--splits", action="store_true", help="with --plan-only: OSDP may split models into operators and slices; slow"
    )
    parser.add_argument("--json", type=Path, help="also write every row to this file")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    options = parser.parse_args(arguments)
    if (options.device is None) == (not options.plan_only):
        parser.error("give --device cuda or --plan-only")
    options.mode = "plan" if options.plan_only else options.device
    if options.splits and options.mode != "plan":
        parser.error("--splits is for --plan-only: blocks are timed whole")
    if options.quick and options.mode == "plan":
        parser.error("--quick is for measurements; leave it out with --plan-only")
    for path in filter(None, (options.json, options.markdown)):
        if not path.parent.is_dir():
            parser.error(f"the folder {path.parent} does not exist; make it first")
    options.experiments = options.experiments or EXPERIMENTS
    return options


def numbers(text: str) -> tuple[int, ...]:
    """Parse experiment numbers separated by commas."""
    found = tuple(int(part) if part.isdigit() else 0 for part in text.split(","))
    if wrong := [part for part, number in zip(text.split(","), found, strict=True) if number not in EXPERIMENTS]:
        raise argparse.ArgumentTypeError(
            f"{wrong[0]!r} is not an experiment; use one of {', '.join(map(str, EXPERIMENTS))}"
        )
    return tuple(sorted(set(found)))


def no_device() -> str:
    """Return why nothing can be measured on a GPU; empty if it can."""
    import torch

    if torch.cuda.is_available():
        return ""
    return "headline: no CUDA device here, nothing was measured; use --plan-only for estimates."


# --------------------------------------------------------------------------------------------- the two ways to run


def estimate_real_sizes(options: argparse.Namespace, sections: list, console: Console) -> tuple[str, list[str]]:
    """Estimate the real sizes."""
    from hf_osdp.modeling.build import build_on_meta
    from hf_osdp.modeling.split.candidates import possible_splits
    from hf_osdp.tracing.describe import describe

    _quiet()
    machine = ""
    for case in chosen(CASES, options.experiments):
        hardware = named_machine(case)
        machine = f"{hardware.device.name} with {hardware.intra_node.source}"
        model = build_on_meta(case.config())
        described = partial(
            describe, model, sequence_length=case.sequence_length, compute_dtype=case.compute.compute,
            device_type="cuda",
            block_classes=case.block_classes,
        )  # fmt: skip
        description = described()
        split = [described(split=one) for one in possible_splits(model, description)] if options.splits else []
        finish(
            case,
            rows_of(line_up(case, description, hardware, split=split)),
            sections,
            console,
            "plan",
        )
    return machine, [f"Planned for {machine}: estimates, nothing was trained. Limits are those of torch's allocator."]


def run_on_cuda(options: argparse.Namespace, sections: list, console: Console) -> tuple[str, list[str]]:
    """Measure the real sizes on this machine's GPU."""
    from .gpu import QUICK, GpuEffort, measure_on_cuda

    machine, error = "", 0.0
    for case in chosen(CASES, options.experiments):
        # One process for each, because a failed step leaves memory in the allocator.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(measure_on_cuda, case, QUICK if options.quick else GpuEffort()).result()
        machine, error = found.machine, max(error, found.worst_hold_error, key=abs)
        finish(case, found.rows, sections, console, "cuda")
    return machine, [
        f"One {machine} trains as rank 0 of 8. The link is emulated: streams are held for as long as PCIe 3.0 takes,"
        " nothing is sent;"
        f" holds were off by {error:+.1%} at worst."
    ]


# ------------------------------------------------------------------------------------------------------------- pieces


def finish(case: Case, rows: Sequence[Row], sections: list, console: Console, mode: str) -> None:
    """Print a case when it is finished."""
    sections.append((case, rows))
    for _, rule, members in groups(rows):
        console.print(table_of(case, rule, members, LINKS[mode]))
        for line in remarks(members):
            print(textwrap.fill(line, WIDTH - 1, initial_indent=" ", subsequent_indent="   "))
        print()
    if case.remark:
        print(textwrap.fill(case.remark, WIDTH - 1, initial_indent=" ", subsequent_indent="   "), end="\n\n")
    sys.stdout.flush()


def metadata_of(arguments: list[str] | None, machine: str, notes: list[str]) -> dict[str, Any]:
    """Return the command, commit, versions and hardware that are saved with the results."""
    given = shlex.join(sys.argv[1:] if arguments is None else arguments)
    return {
        "command": f"python -m {__package__} {given}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(), "versions": package_versions(), "hardware": machine, "remarks": notes,
    }  # fmt: skip


def _quiet() -> None:
    import warnings

    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")


if __name__ == "__main__":
    sys.exit(main())
