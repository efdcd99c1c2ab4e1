"""The search finds what CP-SAT proves of the program with every run, and leaves out nothing that is better."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from hf_osdp.errors import HardwareError
from hf_osdp.planner.affine import Affine
from hf_osdp.planner.description import ModelDescription, Segment
from hf_osdp.planner.hardware import Backend, Hardware, HostSpec
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import Strategy
from hf_osdp.planner.search import solver
from hf_osdp.planner.search.candidates import Candidate
from hf_osdp.planner.search.integer_model import IntegerModel
from hf_osdp.planner.search.options import undominated
from hf_osdp.planner.search.program import Program
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.search.timeline import BatchCosts, build_timeline
from hf_osdp.planner.space import batches, search_spaces
from hf_osdp.planner.training_job import OptimizerSpec, OptimizerStep, Precision, TrainingJob
from hf_osdp.planner.wire import WireFormat
from tests.helpers.descriptions import at_random, transformer, ways
from tests.helpers.hardware import host_of, toy_hardware
from tests.helpers.problems import problem
from tests.helpers.random_problems import some_hardware, some_host
from tests.helpers.sampling import slow_but


def small_hardware(dice: random.Random) -> Hardware:
    nodes, per_node = dice.choice([(1, 2), (1, 3), (1, 4), (2, 2), (2, 1), (1, 1)])
    link, backend = (1e-6, dice.choice([1e7, 1e8])), dice.choice(list(Backend))
    return toy_hardware(nodes, per_node, intra=link, backend=backend, host=dice.choice([None, None, small_host(dice)]))


def small_host(dice: random.Random) -> HostSpec:
    memory, back, update = dice.choice([20_000, 10**9]), dice.choice([1e7, 1e8]), dice.choice([1e7, 1e9])
    return host_of(memory, to_device=back, to_host=1e7, update=update)


def instance(seed: int):
    dice = random.Random(seed)
    hardware = replace(some_hardware(dice), host=replace(some_host(dice), memory_bytes=10**9), margin=0.0)
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
    return candidate, int(1.2 * candidate.least()[1])


def steps(timeline) -> float:
    return 2**32 / sum(len(g.units) * max(o.seconds for o in g.options) for g in timeline.groups)


def holding_nothing(description):
    """The model without what is held beside recomputed blocks: a space has some, or none."""
    return replace(description, segments=tuple(replace(s, held_bytes=Affine()) for s in description.segments))


def every_run(timeline):
    return frozenset((g.units, o.layout) for g in timeline.groups if len(g.units) > 1 for o in g.options)


def gives_up(*_, **options):
    return None


BREAKS = {
    "few options": lambda patch: patch.setattr(solver, "_FEW", 1),
    "no options alike": lambda patch: patch.setattr(solver, "_ALIKE", 0.0),
    "no relaxation": lambda patch: patch.setattr(IntegerModel, "relax", gives_up),
    "nothing": lambda patch: None,
}


@pytest.mark.parametrize("broken", BREAKS)
@pytest.mark.parametrize("seed", slow_but(range(8), daily=(0, 5)))
def test_fastest_is_the_optimum_of_the_whole_program(monkeypatch, seed, broken):
    candidate, limit = question(seed)
    scale = steps(candidate.timeline)
    whole = Program(candidate.timeline, limit, runs=every_run(candidate.timeline))
    whole.minimize_seconds(scale)
    layouts = whole.solve()
    assert layouts and whole.optimal and candidate.needed(layouts).device <= limit
    best = whole.bound
    BREAKS[broken](monkeypatch)
    found = candidate.solver(limit).run()
    assert found.bound >= found.objective and found.objective == pytest.approx(best / scale, rel=2e-7)
    assert candidate.solver(limit).run(found.objective * (1 - 1e-6)) is None


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
        program = Program(timeline, limit)
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


@pytest.mark.parametrize("seed", slow_but(range(60), daily=range(8)))
def test_option_that_is_left_out_lowers_no_moment(seed):
    """In any plan, the option that dominates another takes its place without a higher peak, on the device or the
    host.
    """
    dice = random.Random(seed)
    hardware = replace(some_hardware(dice), host=some_host(dice))
    job = TrainingJob(
        global_batch_size=2 * hardware.world_size, micro_batch_size=dice.choice([1, 2]),
        precision=Precision.named(dice.choice(["no", "bf16"])),
        optimizer=OptimizerSpec(states=2, step=dice.choice(list(OptimizerStep))),
    )  # fmt: skip
    description = at_random(seed, kinds=2, blocks=4, recomputable=True, tied=dice.random() < 0.3)
    asked = problem(holding_nothing(description), hardware, job)
    (batch,) = batches(job, hardware.world_size)
    *_, space = search_spaces(asked, batch)
    candidate = Candidate(problem=asked, batch=batch, costs=BatchCosts(asked, batch), space=space)
    groups = build_timeline(candidate.costs, space, every_layout=True).groups
    lowered = 0
    for _ in range(200):
        plan = {unit: dice.choice(group.options).layout for group in groups for unit in group.units}
        group = dice.choice(groups)
        option, other, unit = *dice.choices(group.options, k=2), dice.choice(group.units)
        if undominated([option, other], by_memory=True) == [other]:
            with_option, with_other = (candidate.needed({**plan, unit: one.layout}) for one in (option, other))
            assert with_other.device <= with_option.device and with_other.host <= with_option.host
            lowered += 1
    assert lowered or all(len(group.options) < 10 for group in groups)


def gathering(description: ModelDescription) -> ModelDescription:
    """A model whose compute takes next to nothing and whose blocks are frozen, so that gathers have the peak."""

    def light(segment: Segment) -> Segment:
        phases = {name: getattr(segment, name) for name in ("forward", "backward")}
        less = {name: phase.peak_bytes.scaled(0.001, constants=True) for name, phase in phases.items()}
        return replace(segment, **{name: replace(phase, peak_bytes=less[name]) for name, phase in phases.items()})

    root, *blocks = description.units
    frozen = (tuple(replace(p, requires_grad=False) for p in unit.parameters) for unit in blocks)
    units = (root, *(replace(unit, parameters=own) for unit, own in zip(blocks, frozen, strict=True)))
    return replace(description, units=units, segments=tuple(segment.each(light) for segment in description.segments))


@pytest.mark.parametrize("seed", slow_but(range(100), daily=(*range(6), 27)))
def test_program_accepts_every_plan_that_fits_and_with_all_runs_no_other(seed):
    """Whatever runs are constrained, under a plan's own peak as limit; a byte less is too little if all are."""
    dice = random.Random(seed)
    hardware, light = small_hardware(dice), seed % 3 == 0
    hardware = replace(hardware, host=replace(small_host(dice), memory_bytes=10**9) if dice.random() < 0.3 else None)
    if light:
        hardware = replace(hardware, nodes=2, devices_per_node=2)
    job = TrainingJob(
        global_batch_size=2 * hardware.world_size, micro_batch_size=dice.choice([1, 2]),
        precision=Precision.named(dice.choice(["no", "bf16"])),
        optimizer=OptimizerSpec(states=2, step=dice.choice(list(OptimizerStep))),
    )  # fmt: skip
    description = holding_nothing(at_random(seed, kinds=1, blocks=12, recomputable=True))
    if light:
        description = gathering(description)
        job = replace(job, communication=dice.choice(["exact", *WireFormat]))
    asked = problem(description, hardware, job)
    (batch,) = batches(job, hardware.world_size)
    *_, space = search_spaces(asked, batch)
    candidate = Candidate(problem=asked, batch=batch, costs=BatchCosts(asked, batch), space=space)
    timeline = candidate.timeline
    runs = sorted(every_run(timeline), key=lambda run: (run[0], str(run[1])))
    for _ in range(4):
        few = {g: sorted(dice.sample(range(len(g.options)), min(3, len(g.options)))) for g in timeline.groups}
        if light:
            staged = {g: [k for k, o in enumerate(g.options) if o.bytes.gather_stage][:3] for g in timeline.groups}
            replicas = {g: [k for k, o in enumerate(g.options) if not o.bytes.managed][:1] for g in timeline.groups}
            few = {g: [*staged[g], *replicas[g]] if staged[g] else ks for g, ks in few.items()}
        taken = {
            g: Counter(dice.choice(few[g]) for _ in g.units) if len(g.units) > 1 else Counter([dice.choice(few[g])])
            for g in timeline.groups
        }
        layouts = {}
        for group in timeline.groups:
            layouts |= group.assign([taken[group][k] for k in range(len(group.options))])
        needed, every = candidate.needed(layouts), frozenset(runs)
        some = frozenset(dice.sample(runs, min(len(runs), 3)))
        for limit, constrained, fits in (
            (needed.device, frozenset(), True), (needed.device, some, True), (needed.device, every, True),
            (needed.device - 1, every, False),
        ):  # fmt: skip
            whole = constrained == every
            program = Program(timeline, limit, runs=constrained, earlier=whole, ordered=whole)
            for group, own in program._groups.items():
                for k, x in enumerate(own.counts):
                    program._model.add(x == taken[group][k])
            assert (program.solve() is not None) == fits, (limit - needed.device, len(constrained))
