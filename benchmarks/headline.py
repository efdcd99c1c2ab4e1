"""The headline experiments: OSDP against full sharding, ZeRO-2 and DDP under a memory limit, each at one batch and at
its own best.

    python benchmarks/headline.py --plan-only                    # estimates for the real sizes; no device is needed
    python benchmarks/headline.py --device cuda --json FILE --markdown FILE
    python benchmarks/headline.py --device cpu [--quick]

1. GPT-2, 48 layers of 1536, 8 GiB on each of 8 devices connected by PCIe 3.0; 2. the first 8 layers of OPT-30B, 16
GiB; 3. a deep and narrow, a shallow and wide, and a mixed model; 4. one device, 6.7B parameters, some or all optimizer
states on the host.

`--device cuda` trains on one real GPU as rank 0 of 8. Torch's allocator enforces the memory limit, so a plan that does
not fit runs out of memory; compute, sharding and FSDP2's streams are real. The link is EMULATED: collectives send
nothing, and keep FSDP2's communication streams busy for as long as PCIe 3.0 would take (latency + bytes / bandwidth).
The tables say so.

`--device cpu` trains small versions of 1 to 3 on gloo ranks, whose link is real. The planner applies the limit, and
the peak of live tensors is compared with it. Steps are interleaved in rounds, one of every plan, and ratios (x) are
medians over rounds.

Single strategies recompute all blocks or none, whichever is faster. OSDP decides for each unit and, with `--splits`,
also how the model is split. The equal batch is the global batch with which full sharding is fastest (8 samples in
experiment 4). Aims: no plan needs more than its limit; OSDP is the fastest by estimate, and measured within 5 % of the
fastest. The exit code is 1 if an aim is missed, and 77 without a device to measure on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # Python adds only the script's own folder

from rich.console import Console  # noqa: E402

from benchmarks.headline_parts.cases import CASES, TWINS, Case, chosen  # noqa: E402
from benchmarks.headline_parts.lineup import line_up  # noqa: E402
from benchmarks.headline_parts.machines import NAMED, named_machine  # noqa: E402
from benchmarks.headline_parts.rows import Row, rows_of  # noqa: E402
from benchmarks.headline_parts.tables import WIDTH, groups, markdown, remarks, table_of, verdicts  # noqa: E402
from benchmarks.torchrun import start_ranks  # noqa: E402
from hf_osdp.versions import package_versions  # noqa: E402

NOTHING_MEASURED = 77
EXPERIMENTS = (1, 2, 3, 4)
TITLES = {"cuda": "one GPU as rank 0 of 8, its link emulated", "cpu": "small twins on gloo ranks", "plan": "planned"}
LINKS = {"cuda": "EMULATED link", "cpu": "gloo", "plan": "Estimated"}


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.as_rank:
        return run_rank(options)
    console = Console(width=WIDTH)
    if options.mode == "cuda" and (problem := no_device()):
        print(problem, file=sys.stderr)
        return NOTHING_MEASURED
    sections: list[tuple[Case, Sequence[Row]]] = []
    machine, notes = {"plan": estimate_real_sizes, "cuda": run_on_cuda, "cpu": run_on_cpu}[options.mode](
        options, sections, console
    )
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
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="train on a GPU (1 to 4), or small twins on the CPU (1 to 3)"
    )
    parser.add_argument("--plan-only", action="store_true", help=f"estimates for {NAMED} devices; nothing is trained")
    parser.add_argument("--experiments", type=numbers, help="with commas, for example 1,3 (default all)")
    parser.add_argument("--ranks", type=int, choices=(2, 4), help="ranks for --device cpu (default 2)")
    parser.add_argument("--quick", action="store_true", help="fewer steps; on the CPU fewer twins as well")
    parser.add_argument(
        "--splits", action="store_true", help="with --plan-only: OSDP may split models into operators and slices; slow"
    )
    parser.add_argument("--json", type=Path, help="also write every row to this file")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    parser.add_argument("--as-rank", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if (options.device is None) == (not options.plan_only):
        parser.error("give --device cuda, --device cpu or --plan-only")
    options.mode = "plan" if options.plan_only else options.device
    if options.ranks and options.mode != "cpu":
        parser.error("--ranks is for --device cpu; the real sizes have 8 devices")
    if options.splits and options.mode != "plan":
        parser.error("--splits is for --plan-only: blocks are timed whole")
    if options.quick and options.mode == "plan":
        parser.error("--quick is for measurements; leave it out with --plan-only")
    if options.mode == "cpu" and options.experiments and 4 in options.experiments:
        parser.error("experiment 4 moves states between a GPU and its host; give --device cuda or --plan-only")
    for path in filter(None, (options.json, options.markdown)):
        if not path.parent.is_dir():
            parser.error(f"the folder {path.parent} does not exist; make it first")
    available = EXPERIMENTS[:3] if options.mode == "cpu" else EXPERIMENTS
    options.experiments = options.experiments or (
        available[:1] if options.quick and options.mode == "cpu" else available
    )
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
    return "headline: no CUDA device here, nothing was measured; use --plan-only for estimates, --device cpu for small twins."  # noqa: E501


# ------------------------------------------------------------------------------------------------- the three ways to
# run


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
        compiled = partial(_compiled, described)
        finish(
            case,
            rows_of(line_up(case, description, hardware, split=split, compiled=compiled)),
            sections,
            console,
            "plan",
        )
    return machine, [f"Planned for {machine}: estimates, nothing was trained. Limits are those of torch's allocator."]


def _compiled(described: Callable[..., Any], micro_batch_size: int) -> Any:
    return described(compile=True, micro_batch_size=micro_batch_size)


def run_on_cuda(options: argparse.Namespace, sections: list, console: Console) -> tuple[str, list[str]]:
    """Measure the real sizes on this machine's GPU."""
    from benchmarks.headline_parts.gpu import QUICK, GpuEffort, measure_on_cuda

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


def run_on_cpu(options: argparse.Namespace, sections: list, console: Console) -> tuple[str, list[str]]:
    """Measure the small versions on gloo ranks, started by torchrun."""
    ranks = options.ranks or 2
    for number, case in enumerate(TWINS):
        if case.experiment in options.experiments:
            quick = ("--quick",) if options.quick else ()
            rows = [
                Row(**row)
                for row in start_ranks(__file__, ranks, *quick, as_rank=("--device", "cpu", "--as-rank", str(number)))
            ]
            finish(replace(case, devices=ranks), rows, sections, console, "cpu")
    cores = os.cpu_count() or 1
    shared = f"; {ranks} ranks share {cores} cores" if ranks > cores else ""
    return f"CPU with {cores} cores", [
        f"Small twins on {ranks} gloo ranks of {cores} cores{shared}: ratios count, not rates."
    ]


def run_rank(options: argparse.Namespace) -> int:
    """Run one rank of one small version."""
    import torch
    import torch.distributed as dist

    from benchmarks.headline_parts.twins import QUICK, TwinEffort, measure_twin

    _quiet()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = replace(TWINS[int(options.as_rank[0])], devices=dist.get_world_size())
    rows = measure_twin(case, QUICK if options.quick else TwinEffort())
    if dist.get_rank() == 0:
        Path(options.as_rank[1]).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


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
        "command": f"python benchmarks/headline.py {given}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(), "versions": package_versions(), "hardware": machine, "remarks": notes,
    }  # fmt: skip


def commit() -> str:
    """Return the commit of the checkout, marked if files differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    except OSError:  # git is not installed
        return "unknown"
    if found.returncode:
        return "unknown"
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True
    ).stdout.strip()
    return found.stdout.strip() + (" with changes" if changed else "")


def _quiet() -> None:
    import warnings

    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")


if __name__ == "__main__":
    sys.exit(main())
