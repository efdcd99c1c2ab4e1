"""The emulated link of the headline experiments holds streams for as long as the planner says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from benchmarks.headline_parts.cases import Case
from benchmarks.headline_parts.emulated import hold_link
from benchmarks.headline_parts.lineup import job_of
from benchmarks.headline_parts.machines import named_machine
from hf_osdp.distributed.mesh import Meshes
from hf_osdp.modeling.batch import training_batch
from hf_osdp.modeling.build import build_on_meta
from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.plan import Plan
from hf_osdp.preparation.probe import Trial, sharded_copy
from hf_osdp.preparation.simulate import fake_process_group
from hf_osdp.sharding.steps import batch_on, make_optimizer, train_step
from hf_osdp.tracing.describe import describe
from tests.helpers.sampling import slow_but

SIZES = {"n_layer": 5, "n_embd": 64, "n_head": 2, "vocab_size": 301, "n_positions": 16, "bos_token_id": 0}
DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
CASE = Case(
    experiment=1, name="tiny", config_class="GPT2Config", architecture="GPT2LMHeadModel", sequence_length=16,
    limit_bytes=None, devices=4, sizes={**SIZES, **DROPOUT, "eos_token_id": 0},
)  # fmt: skip


def mixed(description, world: int) -> Plan:
    kinds = [(world, False), (1, True), (world // 2, False), (world, True), (world // 2, True), (1, False)]
    choices = [
        UnitLayout(shard_size=g, reshard_after_forward=not (keep or unit.span.value == "step"),
                   reduce_every_micro_step=index % 4 != 3)
        for index, (unit, (g, keep)) in enumerate(zip(description.units, kinds * 3, strict=False))
    ]  # fmt: skip
    return Plan.of(description, choices, Batch(micro_batch_size=1, accumulation_steps=2), world_size=world)


class RecordingHold:
    def __init__(self) -> None:
        self.seconds, self.calls, self.settled = Counter(), Counter(), 0

    def __call__(self, collective, seconds):
        self.seconds[collective] += seconds
        self.calls[collective] += 1

    def settle(self):
        self.settled += 1


@pytest.mark.parametrize("precision", slow_but(["no", "fp16"], daily=("fp16",)))
def test_emulated_link_holds_streams_as_long_as_planned(precision):
    case = replace(CASE, precision=precision)
    hardware, config = named_machine(case), case.config()
    description = describe(config, sequence_length=16, compute_dtype=case.compute.compute, recomputation=False)
    plan, hold = mixed(description, 4), RecordingHold()
    with fake_process_group(4):
        model = build_on_meta(config)
        job = job_of(case, 8)
        inputs = training_batch(model, 16)
        trial = Trial(model=model, units=description.units, job=job, inputs=inputs, device=torch.device("cpu"))
        copy = sharded_copy(plan, trial, Meshes("cpu"))
        hold_link(copy, plan, hardware, hold)
        optimizer = make_optimizer(copy, job.optimizer, plan, description.units)
        train_step(copy, optimizer, batch_on(inputs, 1, torch.device("cpu")), plan, job)
        finite = all(parameter.to_local().isfinite().all() for parameter in copy.parameters())
    collectives = estimate_plan(plan, description, job, hardware).collectives
    expected = {kind: seconds for kind, seconds in collectives.items() if seconds}
    assert dict(hold.seconds) == pytest.approx(expected, rel=1e-6)
    assert min(hold.calls.values()) >= 4
    assert finite
