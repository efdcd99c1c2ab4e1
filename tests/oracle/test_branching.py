"""The branch and bound finds what CP-SAT proves of the whole program, and leaves out nothing that is better."""

import itertools
import random
from dataclasses import replace
from functools import cache

import pytest

from hf_osdp.errors import HardwareError
from hf_osdp.planner.affine import Affine
from hf_osdp.planner.description import Segment
from hf_osdp.planner.hardware import Backend
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import Strategy
from hf_osdp.planner.search import solver
from hf_osdp.planner.search.candidates import Candidate
from hf_osdp.planner.search.integer_model import IntegerModel
from hf_osdp.planner.search.pattern import Pattern
from hf_osdp.planner.search.program import Program
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.search.strategies import batches, search_spaces
from hf_osdp.planner.search.timeline import BatchCosts, build_timeline
from hf_osdp.planner.training_job import TrainingJob
from tests.helpers.descriptions import at_random, transformer, ways
from tests.helpers.problems import problem
from tests.helpers.sampling import slow_but
from tests.oracle.test_brute_force import small_hardware, small_host


def instance(seed: int):
    dice = random.Random(seed)
    hardware, backend = small_hardware(dice), dice.choice(list(Backend))
    hardware = replace(hardware, backend=backend, host=replace(small_host(dice), memory_bytes=10**9))
    description = at_random(seed, kinds=1, blocks=dice.choice([4, 12]), recomputable=True)
    return description, hardware, TrainingJob(global_batch_size=4 * hardware.world_size)


def slower_again(segment: Segment) -> Segment:
    """The segment with a recomputed form that saves nothing and takes one more forward."""
    backward = replace(segment.backward, matmul_flops=segment.backward.matmul_flops.plus(segment.forward.matmul_flops))
    return replace(segment, recomputed=ways(replace(segment, saved_bytes=Affine(), backward=backward, recomputed=())))


@cache
def question(seed: int):
    """A candidate with a long row for most seeds, and a limit at which memory binds."""
    description, hardware, job = instance(seed)
    batch = next(batches(job, hardware.world_size))
    *_, space = search_spaces(problem(description, hardware, job), batch)
    asked = problem(description, hardware, job)
    candidate = Candidate(problem=asked, batch=batch, costs=BatchCosts(asked, batch), space=space)
    limits = (int(1.1**n * least_memory(asked)) for n in itertools.count(1))
    return candidate, int(1.1 * next(limit for limit in limits if candidate.any_within(limit) is not None))


def steps(timeline) -> float:
    return 2**32 / sum(len(g.units) * max(o.seconds for o in g.options) for g in timeline.groups)


def rows(timeline):
    return {group.units: group for group in timeline.groups if len(group.units) > 1}


def gives_up(*_, **options):
    return None


BREAKS = {
    "few options": lambda patch: patch.setattr(solver, "_FEW", 1),
    "nothing missed": lambda patch: patch.setattr(solver, "missed", gives_up),  # CP-SAT finds what is not kept
    "no relaxation": lambda patch: patch.setattr(IntegerModel, "relax", gives_up),
    "nothing": lambda patch: None,
}


@pytest.mark.parametrize("broken", BREAKS)
@pytest.mark.parametrize("seed", slow_but(range(8), daily=(0, 5)))
def test_fastest_is_the_optimum_of_the_whole_program(monkeypatch, seed, broken):
    candidate, limit = question(seed)
    scale = steps(candidate.timeline)
    whole = Program(candidate.timeline, candidate.problem.job, limit)
    whole.minimize_seconds(scale)
    assert whole.solve() and whole.optimal
    best = whole.bound
    BREAKS[broken](monkeypatch)
    found = candidate.solver(limit).run()
    assert found.bound >= found.objective and found.objective == pytest.approx(best / scale, rel=2e-7)
    assert candidate.solver(limit).run(found.objective * (1 - 1e-6)) is None


@pytest.mark.parametrize("seed", slow_but(range(8), daily=(0, 5)))
def test_pattern_of_a_plan_refuses_no_plan_with_it(seed):
    """With a plan's counts of classes required, exactly and as bounds, the relaxation is no dearer than the plan."""
    candidate, limit = question(seed)
    timeline, job, found = candidate.timeline, candidate.problem.job, candidate.solver(limit).run()
    for exactly, cap in itertools.product((True, False), (1, 2)):
        patterns = {}
        for units, group in rows(timeline).items():
            pattern = Pattern.undecided(group)
            taken = [pattern.classes[o] for unit in units for o in group.options if o.layout == found.layouts[unit]]
            counts = {n: taken.count(n) for n in set(pattern.classes.values())}
            bounds = {n: (count, count) if exactly else (min(cap, count), len(units)) for n, count in counts.items()}
            patterns[units] = replace(pattern, counts=bounds)
        for linear in (True, False):
            program = Program(timeline, job, limit, linear=linear, patterns=patterns)
            program.minimize_seconds(steps(timeline))
            assert program.relax() if linear else program.solve()
            cost = program.relax().bound if linear else program.bound
            assert cost <= found.objective * steps(timeline) * (1 + 1e-6)


@pytest.mark.parametrize("times_the_least", [1.3, 2.0])
def test_no_plan_costs_less_than_bound_and_its_options(times_the_least):
    """Groups of equal units share options, but not what these add."""
    plain = transformer(layers=24, hidden=512, vocabulary=1000, sequence_length=128)
    segments = (slower_again(s) if "layers" in plain.units[s.unit].fqn else s for s in plain.segments)
    description = replace(plain, segments=tuple(segments))
    hardware, job = preset("h100", devices_per_node=8), TrainingJob(global_batch_size=32)
    asked = problem(description, hardware, job)
    limit = int(times_the_least * (least_memory(asked) - hardware.device.reserved_bytes))
    for batch in batches(job, hardware.world_size):
        *_, space = search_spaces(asked, batch)
        candidate = Candidate(problem=asked, batch=batch, costs=BatchCosts(asked, batch), space=space)
        if (found := candidate.solver(limit).run()) is None:
            continue  # nothing fits at this batch
        timeline = candidate.timeline
        program = Program(timeline, job, limit, linear=True)
        program.minimize_seconds(steps(timeline))
        relaxed = program.relax()
        units = [(g, unit) for g in timeline.groups for unit in g.units]
        taken = sum(relaxed.added[g][o] for g, unit in units for o in g.options if o.layout == found.layouts[unit])
        assert relaxed.bound + taken <= found.objective * steps(timeline) * (1 + 1e-6)


@pytest.mark.parametrize("hidden", [16, 512])
def test_limit_met_exactly_is_met_at_any_size(hidden):
    """No solver takes a limit without room, of KiB or of GiB beside counts of units, for one that cannot be met."""
    description = transformer(layers=2, hidden=hidden, vocabulary=500, sequence_length=32)
    hardware, job = preset("a100-40", devices_per_node=4), TrainingJob(global_batch_size=32)
    least = least_memory(problem(description, hardware, job))
    assert search(problem(description, hardware, job, least)).plan.proven_optimal


@pytest.mark.parametrize("layers", [2, 12])  # unit by unit, and as a long row
def test_relaxation_knows_the_largest_gradient_that_comes_to_the_host(layers):
    hardware = preset("a100-80", devices_per_node=4)
    job = TrainingJob(global_batch_size=64, micro_batch_size=1, host_offload=True)
    one = problem(transformer(layers=layers, hidden=64, vocabulary=500, sequence_length=32), hardware, job)
    (batch,) = batches(job, hardware.world_size)
    *_, space = search_spaces(one, batch)
    timeline = build_timeline(BatchCosts(one, batch), space)
    away = {group: {max(group.options, key=lambda o: o.bytes.host_moment)} for group in timeline.groups}
    kept = timeline.keeping(away)
    chosen = [option for group in kept.groups for option in group.options for _ in group.units]
    held, moment = sum(o.host for o in chosen), max(o.bytes.host_moment for o in chosen)
    assert moment > 0

    def relaxed(host_bytes: int):
        program = Program(replace(kept, host_limit_bytes=host_bytes), job, 2**50, linear=True)
        program.minimize_seconds(1.0)
        return program.relax()

    assert relaxed(held + moment) is not None
    assert relaxed(held + moment // 2) is None


def test_host_too_small_or_unknown_is_refused_where_asked_for():
    description, hardware, job = instance(0)
    tiny = replace(hardware, host=replace(hardware.host, memory_bytes=10))
    with pytest.raises(HardwareError, match="but it has 10 B"):
        search(problem(description, tiny, replace(job, host_offload=True), 10**12))
    for strategy in (Strategy.OSDP, Strategy.FSDP):
        plan = search(problem(description, tiny, job, 10**12, strategy=strategy)).plan
        assert not any(unit.on_host for unit in plan.units), "what fits the device needs none"
    with pytest.raises(HardwareError, match=r"host_offload=True, but the host of .* is not known"):
        search(problem(description, replace(hardware, host=None), replace(job, host_offload=True), 10**12))
