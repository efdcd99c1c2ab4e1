"""The headline experiments in their quickest form: real gloo ranks, the emulated link on the CPU, plans, tables.

No timing is judged.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from benchmarks.headline_parts.cases import Case
from benchmarks.headline_parts.emulated import hold_link
from benchmarks.headline_parts.gpu import GpuEffort, Runner
from benchmarks.headline_parts.lineup import CONTENDERS, OFFLOADERS, SAMPLES, BatchRule, job_of, line_up
from benchmarks.headline_parts.machines import named_machine
from benchmarks.headline_parts.rows import Row, rows_of
from benchmarks.headline_parts.tables import verdicts
from benchmarks.headline_parts.twins import TwinEffort, measure_twin
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
from tests.helpers.counted_memory import CountedMemory
from tests.helpers.descriptions import transformer
from tests.helpers.distributed import run_ranks

TINY = Case(
    experiment=1, name="tiny", config_class="GPT2Config", architecture="GPT2LMHeadModel", sequence_length=16,
    limit_bytes=None, devices=2,
    sizes={"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 301, "n_positions": 16, "bos_token_id": 0,
           "eos_token_id": 0,
           "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
)  # fmt: skip
LATE_BYTES = 4 * (12 * 64**2 + 13 * 64)
"""A gathered block: gloo's worker may let go of its buffer a moment after the collective has ended, and peaks vary
by so much.
"""
EFFORT = TwinEffort(rounds=2, profile_s=None, samples=(1, 2))


def test_every_contender_that_fits_has_a_measured_row_within_its_limit():
    """Of a tiny twin that really runs on two ranks."""
    rows = [Row(**row) for row in run_ranks(measure_twin, 2, TINY, EFFORT)[0]]
    assert [row.contender for row in rows] == 2 * [
        contender.name for contender in CONTENDERS if not contender.compiles
    ]
    for row in rows:
        if row.run is None:
            assert row.needs_bytes > row.limit_bytes
            continue
        assert row.estimated_peak_bytes <= row.limit_bytes
        assert (
            0.99 * row.estimated_peak_bytes <= row.measured_peak_bytes <= 1.01 * row.estimated_peak_bytes + LATE_BYTES
        )
        assert row.fastest_step_s <= row.measured_step_s <= row.slowest_step_s
        assert row.measured_gain is not None
    assert {row.contender for row in rows if row.run} >= {"full shard", "OSDP"}
    assert "DDP" in {row.contender for row in rows if row.run is None}, "the limit leaves no room for replicas"
    assert len({row.global_batch_size for row in rows if row.rule == "equal batch" and row.run}) == 1
    by_estimate = verdicts(rows)[0]
    assert by_estimate.met, by_estimate.text


MODEL = transformer(layers=6, hidden=256)
FOUR = replace(TINY, devices=4, limit_bytes=246 * 2**20)  # 113 MiB beside the margin


def planned(case: Case = FOUR):
    return line_up(case, MODEL, named_machine(case), samples=(1, 2, 4))


@pytest.mark.parametrize("devices", [1, 4])
def test_entries_are_at_one_batch_or_at_their_own_best(devices):
    case = replace(FOUR, devices=devices)
    lineup = planned(case)
    plain = [
        c for c in CONTENDERS if not c.compiles and not c.fixed.get("recompute")
    ]  # the model has nothing to recompute
    names = [contender.name for contender in (plain if devices > 1 else OFFLOADERS)]
    assert [(e.rule, e.contender.name) for e in lineup.entries] == [
        (rule, name) for rule in BatchRule for name in names
    ]
    own = {e.contender.name: e for e in lineup.entries if e.rule is BatchRule.OWN}
    base = next(e for e in own.values() if e.contender.baseline)
    equal = [e for e in lineup.entries if e.rule is BatchRule.EQUAL and e.plan is not None]
    assert {e.plan.global_batch_size for e in equal} == {base.plan.global_batch_size}
    assert all(e.plan.accumulation_steps == 1 and e.plan.micro_batch_size in SAMPLES for e in own.values() if e.plan)
    assert all(e.plan.peak_bytes <= lineup.limit_bytes for e in lineup.entries if e.plan)
    for rule in BatchRule:
        best = {e.contender.name: e.plan.samples_per_s for e in lineup.entries if e.rule is rule and e.plan}
        assert best["OSDP"] >= max(best.values()) * (1 - 1e-9)


def mixed(description, world: int) -> Plan:
    """Every kind of layout of one node in turn."""
    kinds = [(world, False), (1, True), (world // 2, False), (world, True), (world // 2, True), (1, False)]
    choices = [
        UnitLayout(shard_size=g, reshard_after_forward=not (keep or unit.span.value == "step"),
                   reduce_every_micro_step=index % 4 != 3)
        for index, (unit, (g, keep)) in enumerate(zip(description.units, kinds * 3, strict=False))
    ]  # fmt: skip
    return Plan.of(description, choices, Batch(micro_batch_size=1, accumulation_steps=2), world_size=world)


class RecordingHold:
    """Keeps account of holds and holds nothing."""

    def __init__(self) -> None:
        self.seconds, self.calls, self.settled = Counter(), Counter(), 0

    def __call__(self, collective, seconds):
        self.seconds[collective] += seconds
        self.calls[collective] += 1

    def settle(self):
        self.settled += 1


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_the_emulated_link_holds_streams_for_as_long_as_the_planner_says(precision):
    case = replace(TINY, devices=4, precision=precision, sizes={**TINY.sizes, "n_layer": 5})
    hardware, config = named_machine(case), case.config()
    description = describe(config, sequence_length=16, compute_dtype=case.compute.compute)
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
    expected = {
        kind: seconds
        for kind, seconds in estimate_plan(plan, description, job, hardware).collectives.items()
        if seconds
    }
    assert dict(hold.seconds) == pytest.approx(expected, rel=1e-6)
    assert min(hold.calls.values()) >= 4
    assert finite


@pytest.mark.slow
def test_plans_run_on_a_device_under_a_limit_and_one_that_does_not_fit_runs_out_of_memory():
    case = replace(TINY, devices=4)
    description, hardware = describe(case.config(), sequence_length=16), named_machine(case)
    hardware = replace(hardware, device=replace(hardware.device, reserved_bytes=0))
    lineup = line_up(case, description, hardware, samples=(1, 2))
    with fake_process_group(case.devices):
        plans, hold, memory = lineup.distinct_plans(), RecordingHold(), CountedMemory()
        runner = Runner(lineup, description, hardware, memory, hold, GpuEffort(steps=2))
        found = {name: runner.run(plan) for name, plan in plans.items()}
        halved = replace(lineup, limit_bytes=min(plan.peak_bytes for plan in plans.values()) // 2)
        tight = Runner(halved, description, hardware, memory, hold, GpuEffort(steps=1))
        assert tight.run(next(iter(plans.values()))).out_of_memory
    assert memory.attempts == len(plans) + 1
    assert hold.calls
    assert hold.settled == len(plans), "once a plan that fits"
    for name, plan in plans.items():
        assert len(found[name].steps_s) == 2
        assert found[name].peak_bytes == pytest.approx(plan.peak_bytes, rel=0.02)
    assert verdicts(rows_of(lineup, found))[1].met
