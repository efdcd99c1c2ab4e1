"""Local steps between machines, planned: bytes and seconds by hand, what pays, and what a plan says of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_osdp.errors import PlanError
from hf_osdp.planner.cost.evaluate import estimate_plan
from hf_osdp.planner.cost.local_steps import fastest_wire
from hf_osdp.planner.cost.units import unit_bytes, unit_seconds
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.job import Precision, TrainingJob
from hf_osdp.planner.local_steps import LocalSteps
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.search.search import search
from hf_osdp.planner.wire import PIECE_ELEMENTS, WireFormat
from hf_osdp.planning.config import OSDPConfig
from hf_osdp.planning.facts import check_communication, check_local_steps, of_one_machine
from hf_osdp.report.tables import plan_caption
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import toy_hardware
from tests.helpers.problems import problem

MODEL = transformer()
H, RATE, LATENCY = 20, 1e6, 1e-4
BOTH = toy_hardware(2, 2, inter=(LATENCY, RATE))
CONFIG = OSDPConfig(local_steps=H)
TOGETHER = TrainingJob(global_batch_size=8)
MACHINE, JOB = of_one_machine(BOTH, TOGETHER, CONFIG)
LAYOUTS = [UnitLayout(shard_size=size, reshard_after_forward=True) for size in (1, 2)]
BATCH = Batch(micro_batch_size=2, accumulation_steps=1)


def test_the_search_sees_one_machine_and_its_share_of_the_batch():
    assert (MACHINE.nodes, MACHINE.devices_per_node, MACHINE.inter_node) == (1, 2, BOTH.inter_node)
    assert JOB.local_steps == LocalSteps(steps=H, machines=2) and JOB.micro_batch_sizes(2) == (2, 1)
    plan = search(problem(MODEL, MACHINE, JOB)).plan
    assert (plan.world_size, plan.machines, plan.local_steps, plan.global_batch_size) == (2, 2, JOB.local_steps, 8)
    with pytest.raises(ValueError, match="does not divide by 4 processes; use 4 or 8"):
        replace(JOB, global_batch_size=6).micro_batch_sizes(2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_outer_state_is_two_float32_shares_of_the_parameters(layout, precision):
    job, without = (replace(job, precision=Precision.named(precision)) for job in (JOB, TOGETHER))
    for unit in MODEL.units:
        with_outer, plain = (unit_bytes(unit, layout, 2, one, BATCH) for one in (job, without))
        assert with_outer.optimizer - plain.optimizer == pytest.approx(2 * 4 * unit.numel / 2, abs=16 * len(unit.parameters))
        assert replace(with_outer, optimizer=0) == replace(plain, optimizer=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_has_its_share_of_a_synchronisation(layout):
    """Two machines send each element once; two ranks of a machine share its link."""
    unit = MODEL.units[2]
    added = unit_seconds(unit, layout, MACHINE, JOB).optimizer - unit_seconds(unit, layout, MACHINE, TOGETHER).optimizer
    link_s = 4 * unit.numel / RATE + 2 * unit.numel / 2 / PIECE_ELEMENTS * LATENCY
    assert link_s / H < added == pytest.approx(link_s / H, rel=0.02)
    rare = replace(JOB, local_steps=replace(JOB.local_steps, steps=10 * H))
    fewer = unit_seconds(unit, layout, MACHINE, rare).optimizer - unit_seconds(unit, layout, MACHINE, TOGETHER).optimizer
    assert fewer == pytest.approx(added / 10)


def test_a_slow_link_makes_local_steps_pay_and_a_fast_one_does_not():
    slow = search(problem(MODEL, BOTH, TOGETHER)).time.step_s
    assert search(problem(MODEL, MACHINE, JOB)).time.step_s < 0.2 * slow
    fast = toy_hardware(2, 2, inter=(0.0, 1e13))
    machine, job = of_one_machine(fast, TOGETHER, OSDPConfig(local_steps=1))
    assert search(problem(MODEL, machine, job)).time.step_s > 0.9 * search(problem(MODEL, fast, TOGETHER)).time.step_s


def test_differences_take_the_fastest_format_that_is_allowed():
    for allowed in (None, *WireFormat):
        assert fastest_wire(MACHINE, JOB.local_steps, allowed) is allowed
    fast = replace(MACHINE, inter_node=replace(MACHINE.inter_node, bytes_per_s=1e15, latency_s=0.0))
    assert fastest_wire(fast, JOB.local_steps, WireFormat.INT4) is None
    _, job = of_one_machine(BOTH, TOGETHER, replace(CONFIG, communication="int8"))
    assert job.local_steps.wire is WireFormat.INT8
    exact, coded = (search(problem(MODEL, MACHINE, one)).time.step_s for one in (JOB, replace(job, communication=None)))
    assert coded < exact


def test_a_plan_holds_its_algorithm():
    plan = search(problem(MODEL, MACHINE, JOB)).plan
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.fingerprint != replace(plan, local_steps=None).fingerprint
    assert plan.diff(replace(plan, local_steps=None))[0].startswith("local_steps: 2 machines synchronise every 20 steps -> None")
    caption = plan_caption(plan, estimate_plan(plan, MODEL, JOB, MACHINE), MACHINE)
    assert "Local steps (DiLoCo, not the same algorithm as data parallel training): 2 machines synchronise every 20 steps." in caption
    with pytest.raises(PlanError, match="machines take local steps"):
        plan.to_fsdp_plan()
    assert plan.ranks_of_machine(4) == 2
    with pytest.raises(PlanError, match=r"2 machines of 2 processes that take local steps, but 2 processes are running. Start 4"):
        plan.ranks_of_machine(2)


def test_a_given_plan_trains_as_asked_or_not_at_all():
    plan = search(problem(MODEL, MACHINE, JOB)).plan
    together = replace(plan, local_steps=None)
    check_local_steps(plan, CONFIG.outer())
    check_local_steps(together, None)
    for one, asked, text in (
        (plan, None, "local_steps=20, but local_steps=None"),
        (plan, OSDPConfig(local_steps=21).outer(), "local_steps=20, but local_steps=21"),
        (together, CONFIG.outer(), "local_steps=None, but local_steps=20"),
        (plan, OSDPConfig(local_steps=H, outer_momentum=0).outer(), "outer_momentum=0.9, but outer_momentum=0"),
    ):
        with pytest.raises(PlanError, match=f"The plan trains with {text} is asked for; make them agree, or plan again."):
            check_local_steps(one, asked)
    coded = replace(plan, local_steps=replace(plan.local_steps, wire=WireFormat.INT8))
    with pytest.raises(PlanError, match="in int8, but communication='bf16'"):
        check_communication(coded, WireFormat.BF16)
    check_communication(coded, WireFormat.INT4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"local_steps": 0}, "local_steps=0 must be a whole number of at least 1"),
        ({"outer_momentum": 0.5}, "outer_momentum have no effect without local_steps"),
        ({"local_steps": 5, "outer_momentum": 1.0}, "outer_momentum=1.0 at least 0 and below 1"),
        ({"local_steps": 5, "outer_learning_rate": "0.7"}, "outer_learning_rate='0.7' must be above 0"),
        ({"local_steps": 5, "recalibrate": True}, "local_steps=5 cannot run with recalibrate=True"),
        ({"local_steps": 5, "on_oom": "replan"}, "local_steps=5 cannot run with on_oom='replan'"),
        ({"local_steps": 5, "host_offload": True}, "local_steps=5 cannot run with host_offload=True"),
        ({"local_steps": 5, "offload_optimizer": True}, "local_steps=5 cannot run with offload_optimizer=True"),
    ],
)
def test_what_does_not_go_together_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        OSDPConfig(**options)


def test_one_machine_is_refused():
    with pytest.raises(ValueError, match="local_steps=20 is for several machines, and the processes are on one; leave it out"):
        of_one_machine(toy_hardware(1, 4), TOGETHER, CONFIG)
