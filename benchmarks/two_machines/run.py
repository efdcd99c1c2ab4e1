"""Train across two emulated machines, and measure bytes over the slow link, step times, and whether the planner chose
well.

    python benchmarks/two_machines/run.py [--quick] [--communication bf16|int8|int4] [--json FILE]

The two machines are network namespaces (`emulate.py`) with two gloo ranks each. At each rate of the link between them,
every strategy trains a GPT-2 under FSDP2: torch's own full shard, ours (gloo's reduce-scatter without its copy),
communication with groups (two stages), HSDP, DDP, ZeRO-2, and the planner's choice under each memory limit. A strategy
that does not fit a limit is marked and not ranked. Rounds are interleaved, one step of each, so that all run under the
same conditions; a step without communication is included as a load check. With `--communication`, the planner may send
fewer bits; its exact plan, and torch's full shard with gradients reduced in bf16, are added.

Machines may have links with different rates: `--nodes 3 --rates 50mbit/100mbit/200mbit` is one emulation of three. A
link between two machines has the lower of their rates. hf_osdp measures the links between machines as one link, so it
sees the slowest of a ring.

Bytes are those that the kernel counts on the interface between the machines; theoretical bytes are those of
`theory.py`. Estimates come from the measurements of `hf-osdp profile` in the emulated cluster: links once, before
planning, and blocks again in the rounds.

The aims: in every cell, the planner's choice is the fastest that fits, or within 5 % of it; at 100 Mbit/s it trains
twice as many tokens per second as torch's own full shard (bf16: 3 times, int8: 4, int4: 4.8); bytes are within 1.5 %
of theory, and estimates within 10 % on average. The exit code is 1 if an aim is missed, and 77 if namespaces are not
permitted (then nothing was measured).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # Python adds only the script's own folder

from rich.console import Console  # noqa: E402

from benchmarks.two_machines.emulate import NOT_PERMITTED, UNLIMITED, link_rate, rates_of  # noqa: E402
from benchmarks.two_machines.experiment import Experiment  # noqa: E402
from benchmarks.two_machines.tables import Cell, cell_table, cells_of, remarks, verdicts  # noqa: E402
from hf_osdp.planner.training_job import EXACT, FORMATS  # noqa: E402
from hf_osdp.quantities import parse_bytes  # noqa: E402

RATES = ("100mbit", "250mbit", UNLIMITED)
LIMITS = ("600MiB", "1GiB")
"""Memory limits; the model below needs 677 MiB replicated, 567 MiB under HSDP and 512 MiB fully sharded."""
ROUNDS, QUICK_ROUNDS = 5, 3
LINKS_S, PROFILE_S = 25.0, 3.0
LONGEST_S = 3600.0


class NotMeasured(Exception):
    """Raised if an emulation ended without results; the message says why, and `code` is its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def main() -> int:
    options = parse()
    experiment = Experiment(
        rate=RATES[0], limits=options.limits, rounds=options.rounds, links_s=LINKS_S, profile_s=PROFILE_S,
        layers=options.layers, width=options.width, heads=options.heads, vocabulary=options.vocabulary,
        sequence_length=options.sequence_length, micro_batch_size=options.micro_batch_size,
        communication=options.communication,
    )  # fmt: skip
    console, began = Console(width=100), time.monotonic()
    found: list[dict] = []
    cells: list[Cell] = []
    for rate in options.rates:
        try:
            found.append(emulated(replace(experiment, rate=rate), nodes=options.nodes, ranks=options.ranks))
        except NotMeasured as error:
            print(f"run: {error}", file=sys.stderr)
            return error.code
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        for cell in cells_of(found[-1]):
            cells.append(cell)
            console.print(cell_table(cell))
            print(remarks(cell), end="\n\n")
    print(f"{len(cells)} cells of {options.rounds} rounds in {(time.monotonic() - began) / 60:.1f} min")
    judged = verdicts(cells)
    for verdict in judged:
        print(f"{'met   ' if verdict.met else 'MISSED'} {verdict.text}")
    return 0 if all(verdict.met for verdict in judged) else 1


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"only {RATES[0]}, {QUICK_ROUNDS} rounds")
    parser.add_argument(
        "--rates", type=listed(link_rate), help=f"separated by commas; a/b/c for --nodes 3 (default {','.join(RATES)})"
    )
    parser.add_argument(
        "--limits",
        type=listed(limit),
        default=tuple(map(limit, LIMITS)),
        help=f"per rank (default {','.join(LIMITS)})",
    )
    parser.add_argument("--rounds", type=positive, help=f"steps of each strategy (default {ROUNDS})")
    parser.add_argument(
        "--communication",
        choices=FORMATS,
        default=EXACT,
        help="coarsest format that may be sent (default exact)",
    )
    parser.add_argument("--json", type=Path, help="also write all measurements to this file")
    parser.add_argument("--nodes", type=positive, default=2)
    parser.add_argument("--ranks", type=positive, default=2, help="ranks on each node (default 2)")
    defaults = {
        "layers": 8,
        "width": 256,
        "heads": 4,
        "vocabulary": 50257,
        "sequence-length": 128,
        "micro-batch-size": 4,
    }
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=positive, default=value, help=f"of the model (default {value})")
    options = parser.parse_args(arguments)
    if options.width % options.heads:
        parser.error(f"--width {options.width} does not divide by --heads {options.heads}")
    if options.nodes * options.ranks == 1:
        parser.error("one rank sends nothing; give --nodes 2")
    options.rates = options.rates or (RATES[:1] if options.quick else RATES)
    try:
        for rate in options.rates:
            rates_of(rate, options.nodes)
    except ValueError as error:
        parser.error(f"--rates: {error}")
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    return options


def listed(kind):
    """Return a parser for values separated by commas."""
    return lambda text: tuple(kind(part) for part in text.split(","))


def limit(text: str) -> int:
    try:
        return parse_bytes(text, name="--limits")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def emulated(experiment: Experiment, *, nodes: int, ranks: int) -> dict:
    """Return the measurements of the ranks in one emulation.

    Raises:
        NotMeasured: the emulation is not permitted here, or failed.
    """
    command = [
        sys.executable,
        str(ROOT / "benchmarks/two_machines/emulate.py"),
        f"--nodes={nodes}",
        f"--ranks={ranks}",
    ]
    command += [
        f"--rate={experiment.rate}",
        f"--timeout={LONGEST_S}",
        "--",
        "-m",
        "benchmarks.two_machines.worker",
        experiment.to_json(),
    ]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode == NOT_PERMITTED:
        raise NotMeasured(
            "nothing was measured: this machine does not permit the emulation (see above).", NOT_PERMITTED
        )
    if done.returncode or not done.stdout.strip():
        raise NotMeasured(
            f"the emulation at {experiment.rate} failed with exit code {done.returncode} (see above).",
            done.returncode or 1,
        )
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # the emulation ends by itself
