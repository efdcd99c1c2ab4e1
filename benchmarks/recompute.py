"""Compare recomputation by operator with all-or-nothing recomputation, on two gloo ranks of this machine.

    python benchmarks/recompute.py [--quick] [--json FILE]

The program starts the ranks itself and profiles the machine and the blocks for each small model. The limits are those
at which an all-or-nothing plan recomputes a quarter to nearly all of the blocks. Under each limit, that plan, the plan
that may save single operators, and plans that recompute all blocks in one way are trained, one step of each in turn,
with AdamW. A limit's ratio is that of the median steps. The exit code is 1 if an aim is missed: the geometric mean of
the ratios is at most 0.95, none is above 1, and no other plan that fits is more than 5 % faster.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # Python adds only the script's own folder

from benchmarks.headline_parts.cases import Case
from benchmarks.headline_parts.twins import CPU, Contestant, TwinEffort, measured_machine, say
from benchmarks.torchrun import start_ranks
from hf_osdp.distributed.consensus import on_rank_zero
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.errors import InfeasibleError
from hf_osdp.modeling.batch import training_batch
from hf_osdp.modeling.build import build_on_meta
from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.hardware import Hardware
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.preparation.probe import Trial
from hf_osdp.quantities import format_bytes, format_seconds

AIM, NEAR = 0.95, 1.05
RANKS, SAMPLES = 2, 4
"""Number of processes, and samples of each in a step."""
_SIZES = {"vocab_size": 2048, "bos_token_id": 0, "eos_token_id": 0}
_COMMON = {"experiment": 1, "sequence_length": 128, "limit_bytes": None, "devices": RANKS}
CASES = (
    Case(
        name="GPT-2 6 x 512", config_class="GPT2Config", architecture="GPT2LMHeadModel", **_COMMON,
        sizes={**_SIZES, "n_layer": 6, "n_embd": 512, "n_head": 8, "n_positions": 128, "attn_pdrop": 0.0,
               "resid_pdrop": 0.0,
               "embd_pdrop": 0.0},
    ),
    Case(
        name="Llama 6 x 512", config_class="LlamaConfig", architecture="LlamaForCausalLM", **_COMMON,
        sizes={**_SIZES, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6,
               "num_attention_heads": 8,
               "num_key_value_heads": 4, "max_position_embeddings": 128},
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Amount of measurement."""

    limits: int
    rounds: int
    profile_s: float


FULL, QUICK = Effort(limits=4, rounds=11, profile_s=6.0), Effort(limits=2, rounds=7, profile_s=3.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer limits and rounds")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        return run_rank(options.as_rank, QUICK if options.quick else FULL)
    rows = start_ranks(__file__, RANKS, *(("--quick",) if options.quick else ()))
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    ratios = [row["steps_s"]["by operator"] / row["steps_s"]["all or nothing"] for row in rows]
    behind = max(row["steps_s"]["by operator"] / min(row["steps_s"].values()) for row in rows)
    mean = statistics.geometric_mean(ratios)
    print(
        f"the fastest of all that fit is {behind:.2f} times as fast (aim: at most {NEAR}); worst ratio"
        f" {max(ratios):.3f} (aim: at most 1)"
    )
    print(
        f"step by operator / all or nothing: {mean:.3f}, geometric mean over {len(rows)} limits (aim: at most {AIM})"
    )
    return 0 if mean <= AIM and max(ratios) <= 1 and behind <= NEAR else 1


def run_rank(result: Path, effort: Effort) -> int:
    """Run one rank: every case."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [row for case in CASES for row in measure(case, effort)]
    if dist.get_rank() == 0:
        result.write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()
    return 0


def measure(case: Case, effort: Effort) -> list[dict]:
    """Return one row per limit. Collective."""
    description, hardware = measured_machine(case, TwinEffort(profile_s=effort.profile_s, samples=(1, 2, 4)))
    chosen = on_rank_zero(lambda: limits_of(description, hardware, effort.limits))
    return [measure_limit(case, description, hardware, limit, effort.rounds) for limit in chosen]


def job() -> TrainingJob:
    return TrainingJob(global_batch_size=RANKS * SAMPLES)


def all_or_nothing(description: ModelDescription) -> ModelDescription:
    """Return the description in which blocks are recomputed completely or not at all."""
    return replace(description, segments=tuple(replace(s, recomputed=s.recomputed[:1]) for s in description.segments))


def limits_of(description: ModelDescription, hardware: Hardware, number: int) -> list[int]:
    """Return limits at which the all-or-nothing plan recomputes different numbers of blocks, from a quarter to
    nearly all.
    """
    problem = PlanningProblem(
        description=all_or_nothing(description), hardware=hardware, job=job(), memory_limit_bytes=2**45
    )
    least, most = least_memory(problem), search(problem).peak_bytes
    found: dict[int, int] = {}
    for step in range(1, 24):
        limit = int(least + (most - least) * step / 24)
        plan = search(replace(problem, memory_limit_bytes=limit)).plan
        again = sum(unit.activations.recomputes for unit in plan.units)
        if len(description.recomputable) / 4 <= again <= 0.95 * len(description.recomputable):
            found.setdefault(again, limit)
    limits = sorted(found.values())
    return [limits[(2 * i + 1) * len(limits) // (2 * number)] for i in range(min(number, len(limits)))]


def plans_under(description: ModelDescription, hardware: Hardware, limit: int) -> dict[str, Plan]:
    """Return the plans to compare: by operator, all or nothing, and all blocks recomputed in one way if that fits."""
    problem = PlanningProblem(description=description, hardware=hardware, job=job(), memory_limit_bytes=limit)
    plans = {
        "by operator": search(problem).plan,
        "all or nothing": search(replace(problem, description=all_or_nothing(description))).plan,
    }
    ways = max(description.recomputations, key=len)
    for number, way in enumerate(ways):
        one = replace(
            description,
            segments=tuple(replace(s, recomputed=s.recomputed[number : number + 1]) for s in description.segments),
        )
        only = replace(problem, description=one, job=replace(job(), recompute=True))
        try:
            plan = search(only).plan
        except InfeasibleError:
            continue
        plans[f"all blocks: {way.describe()}"] = plan
    return plans


def measure_limit(case: Case, description: ModelDescription, hardware: Hardware, limit: int, rounds: int) -> dict:
    """Train the plans under a limit in turn. Collective."""
    plans = on_rank_zero(lambda: plans_under(description, hardware, limit))
    model, meshes = build_on_meta(case.config()), Meshes("cpu")
    trial = Trial(
        model=model, units=description.units, job=job(), device=CPU, inputs=training_batch(model, case.sequence_length)
    )
    runs = {name: Contestant(plan, trial, meshes) for name, plan in plans.items()}
    peaks = {name: run.peak_bytes() for name, run in runs.items()}
    steps: dict[str, list[float]] = {name: [] for name in plans}
    names = list(plans)
    for number in range(rounds):
        for name in (
            names[number % len(names) :] + names[: number % len(names)]
        ):  # a different plan is first in each round
            steps[name].append(runs[name].step_s())
    say(f"{case.name}: {format_bytes(limit)}")
    del runs
    gc.collect()
    return {
        "model": case.name,
        "limit_bytes": limit,
        "blocks": len(description.recomputable),
        "recomputed": {name: sum(unit.activations.recomputes for unit in plan.units) for name, plan in plans.items()},
        "ways": sorted({text for unit in plans["by operator"].units for text in unit.activations.describe()}),
        "micro_batch_sizes": {name: plan.micro_batch_size for name, plan in plans.items()},
        "peaks_bytes": peaks,
        "estimated_peaks_bytes": {name: plan.peak_bytes for name, plan in plans.items()},
        "estimated_s": {name: plan.step_s for name, plan in plans.items()},
        "steps_s": {name: statistics.median(taken) for name, taken in steps.items()},
    }


def show(rows: list[dict]) -> None:
    for row in rows:
        title = f"{row['model']}, limit {format_bytes(row['limit_bytes'])}; by operator: {'; '.join(row['ways']) or 'nothing recomputed'}"  # noqa: E501
        table = Table(title=title)
        for name in ("plan", "recomputed", "batch", "peak", "estimated", "step", "estimated", "ratio"):
            table.add_column(name, justify="left" if name == "plan" else "right", no_wrap=name != "plan")
        for name, step_s in row["steps_s"].items():
            table.add_row(
                name, f"{row['recomputed'][name]} of {row['blocks']}", str(row["micro_batch_sizes"][name]),
                format_bytes(row["peaks_bytes"][name]), format_bytes(row["estimated_peaks_bytes"][name]),
                format_seconds(step_s),
                format_seconds(row["estimated_s"][name]), f"{step_s / row['steps_s']['all or nothing']:.3f}",
            )  # fmt: skip
        Console(width=100).print(table)


if __name__ == "__main__":
    sys.exit(main())
