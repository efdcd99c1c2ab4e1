"""Seconds of a step: what overlap hides, what it cannot, and what accumulation multiplies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_osdp.errors import HardwareError
from hf_osdp.planner.affine import Affine
from hf_osdp.planner.cost.timing import UnitTimer, Windows, compute_seconds, estimate_time, overlap_windows, phase_seconds, unit_time
from hf_osdp.planner.cost.units import UnitSeconds, unit_seconds
from hf_osdp.planner.decision import Batch, UnitLayout, layouts_for
from hf_osdp.planner.description import Activations, DType, ModelDescription, PhaseCost
from hf_osdp.planner.hardware import Backend
from hf_osdp.planner.job import TrainingJob
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset

TERMS = UnitSeconds(
    gather_forward=4.0, gather_backward=4.0, reduce_scatter=3.0, all_reduce=2.0, copy_forward=0.5, copy_backward=0.75, optimizer=0.25
)
ONCE = Batch(micro_batch_size=1, accumulation_steps=1)
FIVE = Batch(micro_batch_size=1, accumulation_steps=5)
REDUCING = UnitLayout(shard_size=2, reshard_after_forward=True)
HOLDING = replace(REDUCING, reduce_every_micro_step=False)
JOB = TrainingJob(global_batch_size=20)


def hardware(backend: Backend = Backend.NCCL):
    return replace(bare_preset("a100-40", devices_per_node=4), backend=backend)


def test_without_windows_everything_is_exposed():
    time = unit_time(TERMS, REDUCING, Windows(), 1.0, ONCE)
    assert time.communication_s == 4 + 4 + 3 + 2
    assert time.exposed_s == time.communication_s
    assert time.total_s == time.compute_s + time.exposed_s + time.copy_s + time.optimizer_s == 1 + 13 + 1.25 + 0.25


def test_overlap_hides_at_most_the_window():
    exposed = unit_time(TERMS, REDUCING, Windows(forward=1.0, backward=2.5), 1.0, ONCE).exposed_s
    assert exposed == (4 - 1) + (4 + 3 + 2 - 2.5)


def test_overlap_hides_at_most_what_there_is():
    time = unit_time(TERMS, REDUCING, Windows(forward=100.0, backward=100.0), 1.0, ONCE)
    assert time.exposed_s == 0
    assert time.communication_s == 13  # it still happens


def test_accumulation_multiplies_compute_gathers_copies_and_reduce_scatters():
    time = unit_time(TERMS, REDUCING, Windows(), 1.0, FIVE)
    assert time.compute_s == 5
    assert time.communication_s == time.exposed_s == 5 * (4 + 4 + 3) + 2  # one all-reduce between replicas
    assert time.copy_s == 5 * 1.25
    assert time.optimizer_s == 0.25


def test_holding_whole_gradients_reduces_once():
    time = unit_time(TERMS, HOLDING, Windows(), 1.0, FIVE)
    assert time.communication_s == time.exposed_s == 5 * (4 + 4) + 3 + 2


def test_window_hides_in_each_micro_step():
    reducing, holding = Windows(backward=8.0), Windows(backward=3.0)
    assert unit_time(TERMS, REDUCING, reducing, 1.0, FIVE).exposed_s == 5 * 4 + 0 * 4 + 1  # 4 + 3 fit beside 8, with 2 more not
    assert unit_time(TERMS, HOLDING, holding, 1.0, FIVE).exposed_s == 5 * 4 + 4 * 1 + (4 + 3 + 2 - 3)


def test_phase_is_a_roofline_of_products_and_traffic():
    phase = PhaseCost(matmul_flops=Affine(per_sample=19.5e12), traffic_bytes=Affine(constant=1555e9))
    assert phase_seconds(phase, 2, transformer(), hardware()) == pytest.approx(2.0 + 1.0)


def test_dispatch_of_operators_adds_to_the_roofline():
    phase = PhaseCost(traffic_bytes=Affine(per_sample=1555e9), operators=Affine(constant=300, per_sample=10))
    slow = replace(hardware(), device=replace(hardware().device, operator_s=1e-3))
    assert phase_seconds(phase, 2, transformer(), replace(slow, backend=Backend.GLOO)) == pytest.approx(2.0 + 320e-3)
    assert phase_seconds(phase, 2, transformer(), slow) == pytest.approx(2.0)  # queued ahead


def launching(operators: float, unit_s: float):
    """A transformer with so many operators in each pass, and a GPU beside a CPU that issues one in a millisecond."""
    description = transformer()
    segments = tuple(
        segment.each(
            lambda costs: replace(
                costs,
                forward=replace(costs.forward, operators=Affine(constant=operators)),
                backward=replace(costs.backward, operators=Affine(constant=operators)),
            )
        )
        for segment in description.segments
    )
    gpu = replace(hardware(), device=replace(hardware().device, operator_s=1e-3, unit_s=unit_s))
    return replace(description, segments=segments), gpu


def test_a_gpu_waits_where_a_micro_step_has_less_work_than_the_cpu_takes_to_issue():
    work = sum(compute_seconds(transformer(), hardware(), 4))
    passes, units = 2 * len(transformer().segments), len({segment.unit for segment in transformer().segments})
    hidden = 0.5 * work / passes / 1e-3  # operators of a pass that take the CPU half as long as all the work
    assert sum(compute_seconds(*launching(hidden, 0.0), 4)) == pytest.approx(work)
    assert sum(compute_seconds(*launching(4 * hidden, 0.0), 4)) == pytest.approx(2 * work)
    assert sum(compute_seconds(*launching(4 * hidden, work), 4)) == pytest.approx(2 * work + 2 * units * work)
    description, gpu = launching(4 * hidden, 0.0)
    assert sum(compute_seconds(description, gpu, 2)) == pytest.approx(2 * work), "fewer samples are no quicker"
    alone = replace(launching(4 * hidden, work)[1], devices_per_node=1)
    assert sum(compute_seconds(description, alone, 4)) == pytest.approx(2 * work), "one process has no hooks"


def test_communication_hides_beside_a_gpu_that_waits():
    description, gpu = launching(0.0, 0.0)
    waiting, slow = launching(1e6, 0.0)
    before, after = overlap_windows(description, gpu, 4), overlap_windows(waiting, slow, 4)
    assert all(b.backward > 100 * a.backward for a, b in zip(before, after, strict=True) if a.backward)


def test_rate_of_an_unknown_dtype_is_an_error_that_lists_the_known():
    titan = bare_preset("titan-rtx", devices_per_node=2)
    with pytest.raises(HardwareError, match=r"float64 rate of TITAN RTX is not known \(known: .*float32"):
        compute_seconds(replace(transformer(), compute_dtype=DType.FLOAT64), titan, 1)


def test_nothing_overlaps_on_gloo():
    description = transformer()
    assert set(overlap_windows(description, hardware(Backend.GLOO), 4)) == {Windows()}
    choices = [layouts_for(u.span, (4,), reshard_after_forward=True)[0] for u in description.units]
    time = estimate_time(description, choices, hardware(Backend.GLOO), JOB, ONCE)
    assert time.total("exposed_s") == time.total("communication_s") > 0


def test_windows_on_nccl_are_the_segment_before_and_the_units_own_backward():
    description = transformer(layers=3)
    windows = overlap_windows(description, hardware(), 4)
    embedding, *middle, _ = description.segments
    forward = [phase_seconds(s.forward, 4, description, hardware()) for s in (embedding, *middle)]
    backward = phase_seconds(middle[0].backward, 4, description, hardware())
    assert windows[:2] == (Windows(), Windows())  # the root and the shared embedding are gathered first and reduced last
    assert windows[2:] == tuple(Windows(forward=before, backward=backward) for before in forward[:3])


def test_overlap_never_slows_a_step():
    description = transformer()
    for g, keep in ((1, False), (2, False), (4, True), (4, False)):
        choices = [layouts_for(u.span, (g,), reshard_after_forward=not keep)[0] for u in description.units]
        # gloo with the ring of NCCL: the same laps, no overlap
        nccl = estimate_time(description, choices, hardware(), JOB, ONCE)
        gloo = estimate_time(description, choices, hardware(Backend.GLOO), JOB, ONCE)
        assert nccl.step_s <= gloo.step_s


def test_step_is_the_sum_of_its_units():
    description = transformer()
    choices = [layouts_for(u.span, (2,), reshard_after_forward=False)[0] for u in description.units]
    time = estimate_time(description, choices, hardware(), JOB, FIVE)
    windows, compute = overlap_windows(description, hardware(), 1), compute_seconds(description, hardware(), 1)
    for index, unit in enumerate(description.units):
        terms = unit_seconds(unit, choices[index], hardware(), JOB)
        assert time.units[index] == unit_time(terms, choices[index], windows[index], compute[index], FIVE)
    assert time.step_s == pytest.approx(
        time.total("compute_s") + time.total("exposed_s") + time.total("copy_s") + time.total("optimizer_s")
    )
    assert time.total("compute_s") == pytest.approx(5 * sum(compute))


def recomputable(layers: int = 3) -> ModelDescription:
    """A transformer whose blocks, run again in backward, take another forward there."""
    description = transformer(layers=layers)
    blocks = {index for index, unit in enumerate(description.units) if unit.fqn.startswith("layers.")}

    def again(segment):
        flops, traffic = (
            Affine(per_sample=sum(getattr(phase, name).per_sample for phase in (segment.forward, segment.backward)))
            for name in ("matmul_flops", "traffic_bytes")
        )
        return replace(segment, backward=replace(segment.backward, matmul_flops=flops, traffic_bytes=traffic))

    segments = (replace(s, recomputed=again(s)) if s.unit in blocks else s for s in description.segments)
    return replace(description, segments=tuple(segments))


def test_recompute_is_one_more_forward_and_a_longer_window_of_its_own_unit_alone():
    description = recomputable()
    assert description.recomputable == {2, 3, 4}
    saved, again = (compute_seconds(description, hardware(), 4, a) for a in (Activations.SAVE, Activations.RECOMPUTE))
    forward = [phase_seconds(s.forward, 4, description, hardware()) for s in description.segments[1:-1]]
    assert again[:2] == saved[:2], "the root and the shared embedding cannot be run again"
    assert again[2:] == pytest.approx([seconds + more for seconds, more in zip(saved[2:], forward, strict=True)])
    short, long = (overlap_windows(description, hardware(), 4, a) for a in (Activations.SAVE, Activations.RECOMPUTE))
    assert [w.forward for w in long] == [w.forward for w in short]
    assert [w.backward for w in long[2:]] == pytest.approx([w.backward + more for w, more in zip(short[2:], forward, strict=True)])


def test_timer_gives_each_unit_the_time_of_its_own_choice():
    description = recomputable()
    timer = UnitTimer(description, hardware(), JOB, FIVE)
    plain = UnitLayout(shard_size=4, reshard_after_forward=True)
    choices = [plain, plain, plain, replace(plain, activations=Activations.RECOMPUTE), replace(plain, reduce_every_micro_step=False)]
    alone = [estimate_time(description, [choice] * 5, hardware(), JOB, FIVE).units[i] for i, choice in enumerate(choices)]
    assert [timer(i, choice) for i, choice in enumerate(choices)] == alone
    assert estimate_time(description, choices, hardware(), JOB, FIVE).units == tuple(alone)
    assert timer(3, choices[3]).compute_s > timer(3, plain).compute_s
    assert timer(4, choices[4]).communication_s < timer(4, plain).communication_s
