"""Measure what the host spends on a step, without a GPU: ours beside plain autocast, DDP and stock FSDP2.

    DIR/bin/python -m benchmarks.host_time [--models NAME...] [--rounds N]

DIR is the environment of `python -m tests.cuda_software build --into DIR`, torch's CUDA build on a device whose
kernels do nothing: a step takes what the host takes to issue it, CPU time of rank 0's main thread and autograd's.
Launches of the driver and NCCL itself are not in it; all variants have them in addition. All variants of a model are
alive at the same time and take a few steps in turn, of which the quickest counts, since other programs only slow a
step down; a ratio is the median over these rounds. Each indented row is
ours, beside the last row that is not. It ends with the highest ratio that is aimed at, and `!` marks ratios above it.
The last line is the headline; the exit code is 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

RANKS = 2
_Times = Mapping[str, Sequence[float]]
"""Seconds of each variant by its title, in the order of rounds."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", metavar="NAME", help='of "GPT-2 medium", "BERT large", "Llama 1B"')
    parser.add_argument("--micro-steps", nargs="+", type=int, default=[1, 4], metavar="N", help="of a step")
    parser.add_argument("--rounds", type=int, default=6, help="of some steps of each variant")
    options = parser.parse_args()
    if "LD_PRELOAD" in os.environ:
        return measure(options)
    if find_spec("cuda_software") is None:
        parser.error("no CUDA software here; run it in the environment that tests/cuda_software builds.")
    with tempfile.TemporaryDirectory(prefix="host_time_") as folder:
        library = f"{folder}/quiet.so"
        source = str(Path(__file__).with_name("quiet.c"))
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        environment = {
            **os.environ, "LD_PRELOAD": library, "OMP_NUM_THREADS": "1", "FAKE_CUDA_MEM": "80G",
            "FAKE_CUDA_COMPUTE_MAX": "0", "FAKE_CUDA_COPY": "0", "FAKE_CUDA_DEVICES": str(RANKS),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(RANKS))), "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        words = [sys.executable, "-m", "benchmarks.host_time", *sys.argv[1:]]
        return subprocess.run(words, env=environment).returncode


def measure(options: argparse.Namespace) -> int:
    """Measure with the device quiet."""
    import gc

    sys.modules["torchao"] = None  # type: ignore[assignment]  # its import initialises CUDA, which forks then cannot use
    from transformers.utils import logging

    from .variants import NAMES

    logging.set_verbosity_error()
    gc.collect()
    gc.freeze()  # forks share what is imported
    columns = {}
    for model in options.models or NAMES:
        for micro_steps, times in of_model(model, options.micro_steps, options.rounds).items():
            columns[model, micro_steps] = times
    return show(columns)


def of_model(model: str, micro_steps: Sequence[int], rounds: int) -> dict[int, _Times]:
    """Return the seconds of all variants of a model, by the number of micro-steps."""
    from .ranks import is_ready, start
    from .variants import VARIANTS

    started = [start(variant, model) for variant in VARIANTS]
    ready = [ranks for ranks in started if is_ready(ranks)]
    found: dict[int, dict[str, list[float]]] = {}
    for number in micro_steps:
        times = found[number] = {ranks.title: [] for ranks in ready}
        for _ in range(rounds):
            for ranks in ready:
                times[ranks.title].append(min(ranks.ask(number)[0]))
    for ranks in ready:
        ranks.end()
    return found


def show(columns: Mapping[tuple[str, int], _Times]) -> int:
    """Print the table and the headline; return the exit code."""
    from .variants import VARIANTS

    print("CPU ms, ratio" + " " * 15 + "".join(f"{model:<12}" for model, _ in columns).rstrip())
    print("micro-steps" + " " * 17 + "".join(f"{number:<12}" for _, number in columns).rstrip())
    missed, headline = False, []
    for variant in VARIANTS:
        name = f"  {variant.title:<20}{variant.aim or '':>4}" if variant.against else variant.title
        cells, ratios = [], []
        for times in columns.values():
            own, other = times.get(variant.title), times.get(variant.against)
            ratio = statistics.median(a / b for a, b in zip(own, other, strict=True)) if own and other else None
            over = variant.aim is not None and (ratio is None or ratio > variant.aim)
            missed |= over
            ratios.append("-" if ratio is None else f"{ratio:.2f}")
            ms = f"{1e3 * statistics.median(own):5.1f}" if own else "    -"
            cells.append(f"{ms} {ratios[-1] if variant.against else '':>4}{'!' if over else ' '} ")
        print(f"{name:<28}{''.join(cells)}".rstrip())
        if variant.against:
            aim = "" if variant.aim is None else f" (aim {variant.aim})"
            headline.append(f"{variant.title} / {variant.against} {' '.join(ratios)}{aim}")
    shown = ", ".join(f"{model} x {number}" for model, number in columns)
    print(f"host time, ratios for {shown}: {'; '.join(headline)}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
