"""Activations that wait on the host: what they cost in time, what they free, and when the search has them go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_osdp.errors import HardwareError
from hf_osdp.planner.affine import Affine, Envelope
from hf_osdp.planner.cost.memory import SegmentBytes, activation_host_bytes, estimate_memory
from hf_osdp.planner.cost.timing import HostTrip, Windows, host_trips, unit_time
from hf_osdp.planner.cost.units import UnitSeconds
from hf_osdp.planner.decision import Batch, UnitLayout
from hf_osdp.planner.description import Activations, GatherSpan, ModelDescription, PhaseCost, Segment
from hf_osdp.planner.hardware import Backend, HostSpec
from hf_osdp.planner.job import TrainingJob
from hf_osdp.planner.search.search import search
from hf_osdp.planner.search.strategies import search_spaces
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

TERMS = UnitSeconds(
    gather_forward=4.0, gather_backward=4.0, reduce_scatter=3.0, all_reduce=2.0, copy_forward=0.0, copy_backward=0.0, optimizer=0.0
)
CHOICE = UnitLayout(shard_size=2, reshard_after_forward=True)
ONCE = Batch(micro_batch_size=1, accumulation_steps=1)
FIVE = Batch(micro_batch_size=1, accumulation_steps=5)
COMES = HostTrip(out=6.0, back=5.0)
AWAITED = replace(COMES, awaited=True)
"""As the input of a recomputed unit is."""
LIMIT = 10**12


def exposed(trip: HostTrip, *, forward: float = 0.0, backward: float = 0.0, batch: Batch = ONCE) -> float:
    return unit_time(TERMS, CHOICE, Windows(forward=forward, backward=backward), 1.0, batch, trip).exposed_s


def test_without_windows_a_trip_is_exposed_as_a_whole():
    for trip in (COMES, AWAITED):
        time = unit_time(TERMS, CHOICE, Windows(), 1.0, ONCE, trip)
        assert time.exposed_s == time.communication_s == (4 + 6) + (4 + 3 + 2) + 5


def test_the_way_out_shares_forward_with_the_gather():
    assert exposed(COMES, forward=7.0, backward=100.0) == 4 + 6 - 7
    assert exposed(COMES, forward=10.0, backward=100.0) == 0


def test_the_way_back_shares_backward_with_gather_and_reduction():
    assert exposed(COMES, forward=100.0, backward=13.0) == 5 + (4 + 3 + 2) - 13
    assert exposed(COMES, forward=100.0, backward=14.0) == 0


def test_recomputation_waits_for_its_input():
    assert exposed(AWAITED, forward=100.0, backward=100.0) == 5
    assert exposed(AWAITED, forward=100.0, backward=8.0) == 5 + (4 + 3 + 2 - 8)


def test_each_micro_step_makes_the_trip():
    time = unit_time(TERMS, CHOICE, Windows(forward=7.0, backward=13.0), 1.0, FIVE, COMES)
    assert time.communication_s == 5 * (4 + 4 + 6 + 5 + 3) + 2
    assert time.exposed_s == 5 * (4 + 6 - 7) + 4 * 0 + (5 + 4 + 3 + 2 - 13)  # 5 + 4 + 3 fit beside 13
    assert exposed(AWAITED, forward=100.0, backward=100.0, batch=FIVE) == 5 * 5


def recomputable(*, input_bytes: float, own_bytes: float, forward_flops: float = 2e9, saved_bytes: float | None = None) -> ModelDescription:
    """Each block's forward may run again; per sample it saves `saved_bytes`, of which `own_bytes` can leave, or its input."""

    def with_forms(segment: Segment) -> Segment:
        again = PhaseCost(
            peak_bytes=Envelope.linear(per_sample=saved_bytes or own_bytes), matmul_flops=Affine(per_sample=3 * forward_flops)
        )  # fmt: skip
        once = replace(segment.forward, matmul_flops=Affine(per_sample=forward_flops))
        kept = Affine(per_sample=input_bytes)
        recomputed = replace(segment, saved_bytes=kept, own_saved_bytes=kept, sent_bytes=kept, forward=once, backward=again)
        return replace(
            segment, saved_bytes=Affine(per_sample=saved_bytes or own_bytes), own_saved_bytes=Affine(per_sample=own_bytes),
            sent_bytes=Affine(per_sample=own_bytes), forward=once,
            backward=replace(segment.backward, matmul_flops=Affine(per_sample=2 * forward_flops)), recomputed=recomputed,
        )  # fmt: skip

    description = transformer()
    blocks = [unit.span is GatherSpan.USE for unit in description.units]
    return replace(description, segments=tuple(with_forms(s) if blocks[s.unit] else s for s in description.segments))


def with_host(*, link_bytes_per_s: float = 1e9, back_bytes_per_s: float | None = None):
    hardware = bare_preset("a100-40", devices_per_node=2)
    host = HostSpec(
        memory_bytes=LIMIT, to_host_bytes_per_s=link_bytes_per_s, to_device_bytes_per_s=back_bytes_per_s or link_bytes_per_s,
        update_bytes_per_s=1e9, source="made up",
    )  # fmt: skip
    return replace(hardware, host=host)


def test_a_trip_is_the_own_bytes_over_the_link():
    description = recomputable(input_bytes=2e6, own_bytes=8e6)
    hardware = with_host(link_bytes_per_s=1e9, back_bytes_per_s=2e9)
    blocks, rate = sorted(description.recomputable), hardware.device.memory_bytes_per_s
    wanted = {
        Activations.SAVE: HostTrip(),
        Activations.RECOMPUTE: HostTrip(),
        Activations.OFFLOAD: HostTrip(out=24e-3, back=12e-3, traffic=2 * 24e6 / rate),
        Activations.RECOMPUTE_OFFLOAD: HostTrip(out=6e-3, back=3e-3, awaited=True, traffic=2 * 6e6 / rate),
    }
    for activations, trip in wanted.items():
        trips = host_trips(description, hardware, 3, activations)
        assert [trips[index] for index in blocks] == [trip] * len(blocks)
        assert trips[0].out == trips[0].back == 0.0  # the root's stay
    with pytest.raises(HardwareError, match=r"host of .* is not known"):
        host_trips(description, replace(hardware, host=None), 3, Activations.OFFLOAD)


def segment(*, saved: float = 1000, own: float = 700, input_bytes: float = 100) -> Segment:
    again = Segment(
        unit=0, saved_bytes=Affine(per_sample=input_bytes), own_saved_bytes=Affine(per_sample=input_bytes),
        sent_bytes=Affine(per_sample=input_bytes),
        backward=PhaseCost(peak_bytes=Envelope.linear(per_sample=5000)),
    )  # fmt: skip
    return Segment(
        unit=0, saved_bytes=Affine(per_sample=saved), own_saved_bytes=Affine(per_sample=own), sent_bytes=Affine(per_sample=own),
        backward=PhaseCost(peak_bytes=Envelope.linear(per_sample=2000)), recomputed=again,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("activations", "saved", "backward_peak"),
    [
        (Activations.SAVE, 1000, 2000), (Activations.RECOMPUTE, 100, 5000), (Activations.OFFLOAD, 1000 - 700, 2000 + 700),
        (Activations.RECOMPUTE_OFFLOAD, 0, 5000 + 100),
    ],
)  # fmt: skip
def test_what_leaves_comes_back_in_backward(activations, saved, backward_peak):
    terms = SegmentBytes.of(segment(), GatherSpan.USE, 2, activations)
    assert (terms.saved, terms.backward_peak) == (2 * saved, 2 * backward_peak)


def test_no_more_leaves_than_is_there():
    """What is handed on may outweigh what a block adds."""
    terms = SegmentBytes.of(segment(saved=300, own=700), GatherSpan.USE, 1, Activations.OFFLOAD)
    assert (terms.saved, terms.backward_peak) == (0, 2000 + 300)


@pytest.mark.parametrize(("samples", "pinned"), [(1, 128), (2, 256), (3, 512), (5, 512)])
def test_an_input_takes_a_power_of_two_of_the_host(samples, pinned):
    assert activation_host_bytes(segment(), samples, Activations.RECOMPUTE_OFFLOAD) == pinned
    assert activation_host_bytes(segment(), samples, Activations.OFFLOAD) == 2 * 700 * samples
    assert not any(activation_host_bytes(segment(), samples, kept) for kept in (Activations.SAVE, Activations.RECOMPUTE))


def test_the_host_holds_what_every_block_sent():
    description = recomputable(input_bytes=2e6, own_bytes=8e6)
    choices = [
        UnitLayout(
            shard_size=1,
            reshard_after_forward=False,
            activations=Activations.OFFLOAD if index in description.recomputable else Activations.SAVE,
        )
        for index in range(len(description.units))
    ]
    estimate = estimate_memory(description, choices, 1, TrainingJob(global_batch_size=1), ONCE)
    assert estimate.host_bytes == len(description.recomputable) * 2 * 8e6


def test_offload_without_a_host_is_refused():
    description, hardware = recomputable(input_bytes=2e6, own_bytes=8e6), replace(with_host(), host=None)
    job = TrainingJob(global_batch_size=2, offload_activations=True)
    with pytest.raises(HardwareError, match="offload_activations=True, but no host is known"):
        search_spaces(problem(description, hardware, job), ONCE)
    assert planned(description, hardware, TrainingJob(global_batch_size=2), 10**9) == {Activations.SAVE}


def planned(description: ModelDescription, hardware, job: TrainingJob, limit: int) -> set[Activations]:
    """What the search decides for the blocks."""
    plan = search(problem(description, hardware, job, limit)).plan
    return {plan.decision(description.units[index].fqn).activations for index in description.recomputable}


JOB = TrainingJob(global_batch_size=2, host_offload=False)
LINKS = {"quick": 1e10, "slow": 1e6}
"""Bytes a second: what a block saves goes and comes in a quarter of its forward's time, or in two minutes."""


@pytest.mark.parametrize(
    ("link", "memory", "wanted"),
    [
        ("quick", "scarce", {Activations.OFFLOAD}), ("slow", "scarce", {Activations.RECOMPUTE}), ("quick", "ample", set()),
        ("slow", "ample", set()),
    ],
)  # fmt: skip
def test_the_search_takes_what_costs_least(link, memory, wanted):
    description = recomputable(input_bytes=1e5, own_bytes=64e6, forward_flops=1e12)
    hardware = replace(with_host(link_bytes_per_s=LINKS[link]), backend=Backend.GLOO)  # under which no trip is hidden, and so free
    saving, recomputing = (
        search(problem(description, hardware, replace(JOB, recompute=again, offload_activations=False), LIMIT)).plan.peak_bytes
        for again in (False, True)
    )
    limit = LIMIT if memory == "ample" else recomputing + (saving - recomputing) // 100
    assert planned(description, hardware, JOB, limit) - {Activations.SAVE} == wanted  # the last block's leave nothing to gain
