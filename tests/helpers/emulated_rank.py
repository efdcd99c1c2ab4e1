"""A rank of emulated machines: a few layouts of a tiny GPT-2 take a step each; rank 0 prints bytes counted and in
theory.
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from benchmarks.two_machines.contender import Contender
from benchmarks.two_machines.emulate import GSO_BYTES, MTU
from benchmarks.two_machines.experiment import Experiment
from benchmarks.two_machines.lineup import Entrant, Sends
from benchmarks.two_machines.theory import bytes_sent, with_headers
from hf_osdp.distributed.consensus import on_rank_zero
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.tracing.describe import describe

SIZES = Experiment(
    rate="", limits=(), rounds=1, links_s=1.0, profile_s=1.0, layers=2, width=128, vocabulary=4096, sequence_length=16,
    micro_batch_size=1,
)  # fmt: skip
LAYOUTS = {
    "stock": (UnitLayout(shard_size=4, reshard_after_forward=True), Sends.STOCK),
    "two stages": (UnitLayout(shard_size=4, reshard_after_forward=True, stage_size=2), Sends.PLANNED),
    "hsdp": (UnitLayout(shard_size=2, reshard_after_forward=False), Sends.PLANNED),
}


def main() -> None:
    from transformers import GPT2LMHeadModel

    dist.init_process_group("gloo")
    description = on_rank_zero(lambda: describe(SIZES.config(), sequence_length=SIZES.sequence_length))
    torch.manual_seed(0)  # the same weights on every rank
    job, meshes, found = TrainingJob(global_batch_size=4), Meshes("cpu"), {}
    batch = Batch(micro_batch_size=1, accumulation_steps=1)
    for name, (choice, sends) in LAYOUTS.items():
        plan = Plan.of(description, [choice] * len(description.units), batch, world_size=4)
        contender = Contender(
            GPT2LMHeadModel(SIZES.config()).train(), Entrant(plan=plan, sends=sends), description, job, meshes
        )
        payload = bytes_sent(plan, description, 2, stock_reduce_scatter=sends is Sends.STOCK)
        theory = with_headers(payload, mtu=MTU, packet_bytes=GSO_BYTES)
        found[name] = {"sent": contender.measure(2).sent_bytes, "theory": theory}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
