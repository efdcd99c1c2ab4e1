"""What a search says beside the plan: bounds, rows of a comparison, why nothing fits."""

import re
from dataclasses import replace

import pytest

import hf_osdp.planner.search.solver as solver_module
from hf_osdp.errors import InfeasibleError, OSDPError
from hf_osdp.planner.hardware import Hardware
from hf_osdp.planner.problem import Strategy
from hf_osdp.planner.search.compare import StrategyResult, as_scripts_run, compare_strategies
from hf_osdp.planner.search.search import _searched, fastest_without_limit, least_memory, search, search_or_floor
from hf_osdp.planner.training_job import Precision, TrainingJob
from hf_osdp.quantities import format_bytes
from tests.helpers.descriptions import at_random, transformer, ways
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

MODEL = transformer(layers=2)
JOB = TrainingJob(global_batch_size=16)
AMPLE = 2**40


def machine(nodes: int, devices: int, *, reserved: int = 0) -> Hardware:
    hardware = bare_preset("v100-16", nodes=nodes, devices_per_node=devices)
    return replace(hardware, device=replace(hardware.device, reserved_bytes=reserved))


WORLDS = [(1, 1, False), (1, 4, False), (4, 1, False), (2, 4, True), (4, 2, True)]


@pytest.mark.parametrize(("nodes", "devices", "there"), WORLDS)
def test_compare_has_two_stages_where_nodes_have_several_devices(nodes, devices, there):
    rows = list(compare_strategies(problem(MODEL, machine(nodes, devices), JOB, AMPLE)))
    strategies = [row.strategy for row in rows]
    assert strategies == [one for one in Strategy if there or one is not Strategy.TWO_STAGE]
    hsdp = rows[strategies.index(Strategy.HSDP)]
    assert hsdp.reason == ("" if nodes * devices > 1 else "no group size between 1 and all")
    assert all(row.result.plan.strategy == row.strategy.value if row.result else row is hsdp for row in rows)


def test_compare_gives_least_memory_of_strategy_that_does_not_fit():
    hardware = machine(1, 4, reserved=1000)
    least = least_memory(problem(MODEL, hardware, JOB, strategy=Strategy.DDP))
    found = [list(compare_strategies(problem(MODEL, hardware, JOB, limit))) for limit in (least - 1, least)]
    below, at = (next(row for row in rows if row.strategy is Strategy.DDP) for rows in found)
    reason = f"needs {format_bytes(least)}"
    assert below == StrategyResult(strategy=Strategy.DDP, result=None, reason=reason, least_peak_bytes=least)
    assert at.result.plan.peak_bytes == least and not at.reason


AGAIN = replace(MODEL, segments=tuple(replace(s, recomputed=ways(s)) if s.unit > 1 else s for s in MODEL.segments))


def test_compare_has_rows_for_fsdp_with_and_without_recomputation():
    def rows(**options: bool) -> dict[str, StrategyResult]:
        found = compare_strategies(problem(AGAIN, machine(1, 4), replace(JOB, **options), AMPLE))
        return {row.label: row for row in found if row.strategy is Strategy.FSDP}

    assert list(rows()) == ["fsdp", "fsdp, as it comes", "fsdp, all recomputed"]
    assert list(rows(recompute=True)) == list(rows(recompute=False)) == ["fsdp"]
    for label, recomputed in (("fsdp, as it comes", False), ("fsdp, all recomputed", True)):
        units = rows()[label].result.plan.units
        assert {unit.activations.recomputes for unit in units if unit.fqn.startswith("layers.")} == {recomputed}


def test_compare_has_rows_with_eager_blocks_where_the_problem_compiles():
    compiled = replace(AGAIN, compiled_classes=("Block",))
    rows = compare_strategies(problem(compiled, machine(1, 4), JOB, AMPLE), eager=AGAIN)
    found = {r.label: r.result.plan.compiled_classes for r in rows if r.strategy in (Strategy.OSDP, Strategy.FSDP)}
    eager = ("osdp, eager", "fsdp, eager, as it comes", "fsdp, eager, all recomputed")
    others = ("osdp", "fsdp", "fsdp, as it comes", "fsdp, all recomputed")
    assert found == dict.fromkeys(eager, ()) | dict.fromkeys(others, ("Block",))


def test_fsdp_as_it_comes_has_accelerates_reduction_and_jobs_host():
    job = replace(JOB, precision=Precision.named("bf16"))
    asked = problem(MODEL, machine(1, 4), job, AMPLE)
    plain, recomputed = (as_scripts_run(asked, recompute=recompute).job for recompute in (False, True))
    off = dict.fromkeys(("recompute", "host_offload", "offload_optimizer", "offload_activations"), False)
    assert plain == replace(job, **off, precision=replace(job.precision, reduce=None))
    assert recomputed == replace(plain, recompute=True, precision=job.precision)
    assert as_scripts_run(replace(asked, job=replace(job, host_offload=True)), recompute=True).job.host_offload


def test_compare_takes_the_split_model_for_osdp_alone():
    other = transformer(layers=1)
    rows = compare_strategies(problem(MODEL, machine(1, 4), JOB, AMPLE), split=other)
    units = {row.strategy: len(row.result.plan.units) for row in rows if row.result}
    assert units.pop(Strategy.OSDP) == len(other.units) and set(units.values()) == {len(MODEL.units)}


@pytest.mark.parametrize("limit", [float("nan"), float("inf"), None, "8GiB", -1, 0, True, 2**60])
def test_problem_refuses_limit_that_is_no_number_of_bytes(limit):
    message = f"memory_limit_bytes={limit!r} must be a number of bytes from 1 to 2**60; give one"
    with pytest.raises(ValueError, match=re.escape(message)):
        problem(MODEL, machine(1, 4), JOB, limit)


def test_infeasible_error_gives_missing_bytes_where_texts_are_equal():
    least = least_memory(problem(MODEL, machine(1, 4), JOB))
    for limit, more in ((least - 1, r" \(1 byte more\)"), (least // 2, "")):
        with pytest.raises(InfeasibleError, match=rf"is {re.escape(format_bytes(least))}{more}, at micro-batch"):
            search(problem(MODEL, machine(1, 4), JOB, limit))


@pytest.mark.parametrize("strategy", ["osdp", "ddp"])
@pytest.mark.parametrize("world", [(1, 4), (2, 2)])
def test_fastest_without_limit_is_met_where_memory_is_ample(world, strategy):
    asked = problem(MODEL, machine(*world), JOB, AMPLE, strategy=strategy)
    assert fastest_without_limit(asked) == pytest.approx(search(asked).time.step_s, rel=2e-7)


@pytest.mark.parametrize("reserved", [0, 12345])
def test_search_or_floor_gives_a_bound_where_nothing_fits(reserved):
    hardware = machine(1, 4, reserved=reserved)
    least = least_memory(problem(MODEL, hardware, JOB))
    floor = search_or_floor(problem(MODEL, hardware, JOB, least - 1))
    assert least_memory(problem(MODEL, machine(1, 4), JOB)) == least - reserved
    assert isinstance(floor, int) and reserved < floor <= least
    assert floor - reserved == search_or_floor(problem(MODEL, machine(1, 4), JOB, 1))
    assert search_or_floor(problem(MODEL, hardware, JOB, least)) == search(problem(MODEL, hardware, JOB, least))


@pytest.mark.parametrize("world", [(1, 4), (2, 2)])
def test_cutoff_leaves_out_slower_plans_and_is_not_cached(world):
    asked = problem(MODEL, machine(*world), JOB, 2**33)
    step_s = search(asked).time.step_s
    _searched.cache_clear()
    assert isinstance(search_or_floor(asked, cutoff_s=0.99 * step_s), int)
    assert search_or_floor(asked, cutoff_s=1.01 * step_s).time.step_s == step_s
    assert isinstance(search_or_floor(asked, cutoff_s=0.99 * step_s), int), "what was found is not faster"
    assert search(asked).time.step_s == step_s


def test_plan_states_what_it_was_made_for():
    hardware = machine(2, 2, reserved=77)
    found = search(problem(MODEL, hardware, JOB, 2**33))
    plan = found.plan
    facts = (plan.memory_limit_bytes, plan.hardware, plan.devices_per_node, plan.strategy)
    assert facts == (2**33, hardware.summary, 2, "osdp")
    assert plan.peak_bytes == found.peak_bytes == found.memory.peak_bytes + 77
    assert plan.step_s == found.time.step_s and plan.proven_optimal and plan.global_batch_size == JOB.global_batch_size
    plan.check(MODEL, 4)


def test_search_refuses_a_freed_unit_that_runs_twice():
    model = at_random(1, kinds=1, blocks=2)
    block = next(s for s in model.segments if model.units[s.unit].fqn == "b0")
    for run in (search, search_or_floor, least_memory):
        with pytest.raises(OSDPError, match="Unit 'b0' runs more than once in a forward pass"):
            run(problem(replace(model, segments=(*model.segments, block)), machine(1, 2), JOB))


@pytest.mark.parametrize("share", [1, 0.9])
def test_gap_of_a_plan_is_that_of_its_solution(share, monkeypatch):
    hardware, job = machine(1, 4), TrainingJob(global_batch_size=64)
    least = least_memory(problem(MODEL, hardware, job))
    ample = search(problem(MODEL, hardware, job, AMPLE)).plan.peak_bytes
    run = solver_module.BranchAndBound.run

    def told(*args):
        found = run(*args)
        return found and replace(found, bound=found.objective * share)

    monkeypatch.setattr(solver_module.BranchAndBound, "run", told)
    plan = search(problem(MODEL, hardware, job, least + (ample - least) // 5)).plan
    assert plan.proven_optimal is (share == 1) and plan.gap == pytest.approx(1 - share)


def test_gap_bounds_what_a_longer_search_gains(monkeypatch):
    """Without a node of branch and bound, any plan that fits is taken, and bounded by the relaxation."""
    hardware, job = machine(1, 4), TrainingJob(global_batch_size=64)
    wide = transformer(layers=12, hidden=256, vocabulary=500, sequence_length=64)
    limit = int(1.2 * least_memory(problem(wide, hardware, job)))
    best_s = search(problem(wide, hardware, job, limit)).time.step_s
    monkeypatch.setattr(solver_module, "_MOST_NODES", 0)
    _searched.cache_clear()
    found = search(problem(wide, hardware, job, limit))
    _searched.cache_clear()
    assert not found.plan.proven_optimal and 0 < found.plan.gap < 1
    assert (1 - found.plan.gap) * found.time.step_s <= best_s * (1 + 1e-6)
