"""One rank of an emulation: profile, plan, then rounds with one step of every entrant. Rank 0 prints the results as
JSON.

    python benchmarks/two_machines/emulate.py --rate 100mbit -- -m benchmarks.two_machines.worker EXPERIMENT

EXPERIMENT is the text of `Experiment.to_json`. `run.py` starts this program.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from dataclasses import asdict, replace

import torch
import torch.distributed as dist

from benchmarks.two_machines.contender import Contender
from benchmarks.two_machines.emulate import GSO_BYTES, MTU
from benchmarks.two_machines.experiment import Experiment
from benchmarks.two_machines.lineup import Entrant, Lineup, Sends, layout, line_up
from benchmarks.two_machines.theory import bytes_sent, with_headers
from hf_osdp.distributed.consensus import on_rank_zero
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.measurement.block_times import TimedModel
from hf_osdp.measurement.links import measure_collectives
from hf_osdp.measurement.machine import measure_profile
from hf_osdp.planner.description import ModelDescription
from hf_osdp.planner.files import plain
from hf_osdp.planner.hardware import CollectiveTiming
from hf_osdp.planner.problem import PlanningProblem
from hf_osdp.planner.profile import Profile, with_block_times
from hf_osdp.planner.search.compare import compare_strategies
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.tracing.describe import describe

ROUNDS_A_PROFILE = 2
"""Rounds between timings of the blocks, which take as long as a step or two."""


def main() -> int:
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measure(Experiment.from_json(sys.argv[1]))
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def measure(experiment: Experiment) -> dict:
    """Return all results at one rate as plain values. Collective."""
    description = describe(experiment.config(), sequence_length=experiment.sequence_length)
    samples = experiment.micro_batch_size
    job = TrainingJob(
        global_batch_size=dist.get_world_size() * samples, micro_batch_size=samples,
        communication=experiment.communication,
    )  # fmt: skip
    began = time.monotonic()
    timings = measure_collectives(torch.device("cpu"), experiment.links_s, local=ranks_per_node())
    profile = with_timings(profiled(experiment), timings)
    say(experiment, f"profile in {time.monotonic() - began:.0f} s")
    lineup = on_rank_zero(lambda: planned(experiment, with_block_times(description, profile), profile, job))
    contenders = built(experiment, lineup, description, job)
    rows = {name: {**about(entrant, description), "rounds": []} for name, entrant in lineup.entrants.items()}
    for number in range(experiment.rounds):
        began = time.monotonic()
        if number % ROUNDS_A_PROFILE == 0:
            again = with_timings(profiled(experiment), timings)
            timed = with_block_times(description, again)
        for name, entrant in lineup.entrants.items():
            step = contenders[name].measure(ranks_per_node())
            rows[name]["rounds"].append({**asdict(step), **entrant.estimate(timed, job, again.hardware)})
        say(experiment, f"round {number + 1} of {experiment.rounds} in {time.monotonic() - began:.0f} s")
    return {
        "experiment": asdict(experiment), "rows": rows, "cells": list(lineup.cells), "profile": plain(profile),
        "machine": {"cores": os.cpu_count(), "nodes": dist.get_world_size() // ranks_per_node(),
                    "ranks_per_node": ranks_per_node()},
    }  # fmt: skip


def planned(experiment: Experiment, timed: ModelDescription, profile: Profile, job: TrainingJob) -> Lineup:
    """Return every strategy's best plan under every limit, from the profile."""
    rows = []
    for limit in experiment.limits:
        problem = PlanningProblem(description=timed, hardware=profile.hardware, job=job, memory_limit_bytes=limit)
        rows.append(compare_strategies(problem))
    return line_up(rows, experiment.limits)


def built(
    experiment: Experiment, lineup: Lineup, description: ModelDescription, job: TrainingJob
) -> dict[str, Contender]:
    """Return one model per entrant. Collective."""
    from transformers import GPT2LMHeadModel

    meshes, contenders = Meshes("cpu"), {}
    for name, entrant in lineup.entrants.items():
        torch.manual_seed(0)
        contenders[name] = Contender(GPT2LMHeadModel(experiment.config()).train(), entrant, description, job, meshes)
    return contenders


def about(entrant: Entrant, description: ModelDescription) -> dict:
    """Return what is known about an entrant before it takes steps."""
    sent = 0
    if entrant.sends is not Sends.NOTHING:
        itemsize = 2 if entrant.sends is Sends.STOCK_BF16 else 4
        sent = bytes_sent(entrant.plan, description, ranks_per_node(), reduced_itemsize=itemsize)
    return {
        "layout": layout(entrant.plan), "peak_bytes": entrant.plan.peak_bytes, "payload_bytes": sent,
        "theory_bytes": with_headers(sent, mtu=MTU, packet_bytes=GSO_BYTES),
    }  # fmt: skip


def profiled(experiment: Experiment) -> Profile:
    """Return a profile measured as by `hf-osdp profile`. Collective."""
    samples = experiment.micro_batch_size
    return measure_profile(
        device_type="cpu", seconds=experiment.profile_s,
        model=TimedModel(
            model_or_config=experiment.config(), sequence_length=experiment.sequence_length,
            micro_batch_sizes=(samples,)
        ),
    )  # fmt: skip


def with_timings(profile: Profile, timings: tuple[CollectiveTiming, ...]) -> Profile:
    """Return the profile with the link timings of a longer measurement."""
    return replace(profile, hardware=replace(profile.hardware, timings=timings))


def ranks_per_node() -> int:
    """Return the ranks per node, as set by torchrun."""
    return int(os.environ["LOCAL_WORLD_SIZE"])


def say(experiment: Experiment, text: str) -> None:
    if dist.get_rank() == 0:
        print(f"{experiment.rate}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
