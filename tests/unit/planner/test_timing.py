"""Seconds of a step: what overlap hides, what it cannot, and what accumulation multiplies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_osdp.errors import HardwareError
from hf_osdp.planner.costs import Batch, Choice, UnitSeconds, choices_for, unit_seconds
from hf_osdp.planner.description import Affine, DType, PhaseCost
from hf_osdp.planner.hardware import Backend
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.timing import Windows, compute_seconds, estimate_time, overlap_windows, phase_seconds, unit_time
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset

TERMS = UnitSeconds(
    gather_forward=4.0, gather_backward=4.0, reduce_scatter=3.0, all_reduce=2.0, copy_forward=0.5, copy_backward=0.75, optimizer=0.25
)
ONCE = Batch(micro_batch_size=1, accumulation_steps=1, reduce_every_micro_step=True)
REDUCING = Batch(micro_batch_size=1, accumulation_steps=5, reduce_every_micro_step=True)
HOLDING = Batch(micro_batch_size=1, accumulation_steps=5, reduce_every_micro_step=False)
JOB = TrainingJob(global_batch_size=20)


def hardware(backend: Backend = Backend.NCCL):
    return replace(bare_preset("a100-40", devices_per_node=4), backend=backend)


def test_without_windows_everything_is_exposed():
    time = unit_time(TERMS, Windows(), 1.0, ONCE)
    assert time.communication_s == 4 + 4 + 3 + 2
    assert time.exposed_s == time.communication_s
    assert time.total_s == time.compute_s + time.exposed_s + time.copy_s + time.optimizer_s == 1 + 13 + 1.25 + 0.25
    assert time.choice_s == time.total_s - time.compute_s


def test_overlap_hides_at_most_the_window():
    exposed = unit_time(TERMS, Windows(forward=1.0, backward=2.5), 1.0, ONCE).exposed_s
    assert exposed == (4 - 1) + (4 + 3 + 2 - 2.5)


def test_overlap_hides_at_most_what_there_is():
    time = unit_time(TERMS, Windows(forward=100.0, backward=100.0), 1.0, ONCE)
    assert time.exposed_s == 0
    assert time.communication_s == 13  # it still happens


def test_accumulation_multiplies_compute_gathers_copies_and_reduce_scatters():
    time = unit_time(TERMS, Windows(), 1.0, REDUCING)
    assert time.compute_s == 5
    assert time.communication_s == time.exposed_s == 5 * (4 + 4 + 3) + 2  # one all-reduce between replicas
    assert time.copy_s == 5 * 1.25
    assert time.optimizer_s == 0.25


def test_holding_whole_gradients_reduces_once():
    time = unit_time(TERMS, Windows(), 1.0, HOLDING)
    assert time.communication_s == time.exposed_s == 5 * (4 + 4) + 3 + 2


def test_window_hides_in_each_micro_step():
    assert unit_time(TERMS, Windows(backward=8.0), 1.0, REDUCING).exposed_s == 5 * 4 + 0 * 4 + 1  # 4 + 3 fit beside 8, with 2 more not
    assert unit_time(TERMS, Windows(backward=3.0), 1.0, HOLDING).exposed_s == 5 * 4 + 4 * 1 + (4 + 3 + 2 - 3)


def test_phase_is_a_roofline_of_products_and_traffic():
    phase = PhaseCost(matmul_flops=Affine(per_sample=19.5e12), traffic_bytes=Affine(constant=1555e9))
    assert phase_seconds(phase, 2, transformer(), hardware()) == pytest.approx(2.0 + 1.0)


def test_dispatch_of_operators_adds_to_the_roofline():
    phase = PhaseCost(traffic_bytes=Affine(per_sample=1555e9), operators=Affine(constant=300, per_sample=10))
    slow = replace(hardware(), device=replace(hardware().device, operator_s=1e-3))
    assert phase_seconds(phase, 2, transformer(), slow) == pytest.approx(2.0 + 320e-3)
    assert phase_seconds(phase, 2, transformer(), hardware()) == pytest.approx(2.0)


def test_rate_of_an_unknown_dtype_is_an_error_that_lists_the_known():
    titan = bare_preset("titan-rtx", devices_per_node=2)
    with pytest.raises(HardwareError, match=r"float64 rate of TITAN RTX is not known \(known: .*float32"):
        compute_seconds(replace(transformer(), compute_dtype=DType.FLOAT64), titan, 1)


def test_nothing_overlaps_on_gloo():
    description = transformer()
    assert set(overlap_windows(description, hardware(Backend.GLOO), 4)) == {Windows()}
    choices = [choices_for(u, (4,), keep=False)[0] for u in description.units]
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
        choices = [choices_for(u, (g,), keep=keep)[0] for u in description.units]
        # gloo with the ring of NCCL: the same laps, no overlap
        nccl = estimate_time(description, choices, hardware(), JOB, ONCE)
        gloo = estimate_time(description, choices, hardware(Backend.GLOO), JOB, ONCE)
        assert nccl.step_s <= gloo.step_s


def test_step_is_the_sum_of_its_units():
    description = transformer()
    choices = [choices_for(u, (2,), keep=True)[0] for u in description.units]
    time = estimate_time(description, choices, hardware(), JOB, REDUCING)
    windows, compute = overlap_windows(description, hardware(), 1), compute_seconds(description, hardware(), 1)
    for index, unit in enumerate(description.units):
        terms = unit_seconds(unit, Choice(shard_size=2, keep=True), hardware(), JOB)
        assert time.units[index] == unit_time(terms, windows[index], compute[index], REDUCING)
    assert time.step_s == pytest.approx(
        time.total("compute_s") + time.total("exposed_s") + time.total("copy_s") + time.total("optimizer_s")
    )
    assert time.total("compute_s") == pytest.approx(5 * sum(compute))
