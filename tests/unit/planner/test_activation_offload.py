"""Activations that wait on the host: what they cost in time, what they free, and when the search has them go."""

from dataclasses import replace

import pytest

from hf_osdp.errors import HardwareError
from hf_osdp.planner.affine import Affine
from hf_osdp.planner.cost.moments import SegmentBytes
from hf_osdp.planner.cost.timing import HostTransfer, host_transfers
from hf_osdp.planner.decision import Batch
from hf_osdp.planner.description import GatherSpan, ModelDescription, PhaseCost, Segment
from hf_osdp.planner.hardware import Backend, Hardware
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.search.search import search
from hf_osdp.planner.search.strategies import search_spaces
from hf_osdp.planner.training_job import TrainingJob
from tests.helpers.descriptions import linear_envelope, transformer, ways
from tests.helpers.hardware import bare_preset, host_of
from tests.helpers.problems import problem

SAVE, RECOMPUTE, OFFLOAD, RECOMPUTE_OFFLOAD = Activations.BASIC
ONCE = Batch(micro_batch_size=1, accumulation_steps=1)
LIMIT = 10**12


def recomputable(*, input_bytes: float, own_bytes: float, forward_flops: float = 2e9) -> ModelDescription:
    """Each block's forward may run again; per sample it saves `own_bytes`, all of which can leave, or its input."""

    def saving(segment: Segment, nbytes: float, **more) -> Segment:
        saved = Affine(per_sample=nbytes)
        return replace(segment, saved_bytes=saved, own_saved_bytes=saved, sent_bytes=saved, **more)

    def with_forms(segment: Segment) -> Segment:
        once = replace(segment.forward, matmul_flops=Affine(per_sample=forward_flops))
        peak, flops = linear_envelope(per_sample=own_bytes), Affine(per_sample=3 * forward_flops)
        again = PhaseCost(peak_bytes=peak, matmul_flops=flops)
        backward = replace(segment.backward, matmul_flops=Affine(per_sample=2 * forward_flops))
        recomputed = saving(segment, input_bytes, forward=once, backward=again)
        return saving(segment, own_bytes, forward=once, backward=backward, recomputed=ways(recomputed))

    description = transformer()
    blocks = [unit.span is GatherSpan.USE for unit in description.units]
    return replace(description, segments=tuple(with_forms(s) if blocks[s.unit] else s for s in description.segments))


def with_host(*, link_bytes_per_s: float = 1e9, back_bytes_per_s: float | None = None) -> Hardware:
    back = back_bytes_per_s or link_bytes_per_s
    host = host_of(LIMIT, to_device=back, to_host=link_bytes_per_s, update=1e9)
    return replace(bare_preset("a100-40", devices_per_node=2), host=host)


def test_host_transfers_take_the_own_bytes_over_the_link():
    description = recomputable(input_bytes=2e6, own_bytes=8e6)
    hardware = with_host(link_bytes_per_s=1e9, back_bytes_per_s=2e9)
    rate = hardware.device.memory_bytes_per_s
    wanted = dict.fromkeys((SAVE, RECOMPUTE), HostTransfer())
    wanted[OFFLOAD] = HostTransfer(out=24e-3, back_beside=12e-3, traffic=2 * 24e6 / rate)
    wanted[RECOMPUTE_OFFLOAD] = HostTransfer(out=6e-3, back_before=3e-3, traffic=2 * 6e6 / rate)
    for activations, transfer in wanted.items():
        transfers = host_transfers(description, hardware, 3, activations)
        assert {transfers[index] for index in description.recomputable} == {transfer}
        assert transfers[0].out == transfers[0].back_beside == 0.0, "the root's stay"
    with pytest.raises(HardwareError, match=r"host of .* is not known"):
        host_transfers(description, replace(hardware, host=None), 3, OFFLOAD)


def segment(*, saved: float = 1000, own: float = 700, input_bytes: float = 100) -> Segment:
    """Per sample, as it is saved and as it is recomputed."""

    def form(saved: float, own: float, backward: float, **more) -> Segment:
        peak, moved = PhaseCost(peak_bytes=linear_envelope(per_sample=backward)), Affine(per_sample=own)
        more |= {"saved_bytes": Affine(per_sample=saved), "own_saved_bytes": moved, "sent_bytes": moved}
        return Segment(unit=0, backward=peak, **more)

    return form(saved, own, 2000, recomputed=ways(form(input_bytes, input_bytes, 5000)))


FORMS = [(SAVE, 1000, 2000), (RECOMPUTE, 100, 5000), (OFFLOAD, 1000 - 700, 2000 + 700)]


@pytest.mark.parametrize(("activations", "saved", "backward_peak"), [*FORMS, (RECOMPUTE_OFFLOAD, 0, 5000 + 100)])
def test_segment_bytes_that_leave_in_forward_come_back_in_backward(activations, saved, backward_peak):
    terms = SegmentBytes.of(segment(), GatherSpan.USE, 2, activations)
    assert (terms.saved, terms.backward_peak) == (2 * saved, 2 * backward_peak)
    handed_on = SegmentBytes.of(segment(saved=300), GatherSpan.USE, 1, OFFLOAD)
    assert (handed_on.saved, handed_on.backward_peak) == (0, 2000 + 300), "no more leaves than a block adds"


@pytest.mark.parametrize(("samples", "pinned"), [(1, 128), (2, 256), (3, 512), (5, 512)])
def test_host_bytes_of_input_are_powers_of_two_rest_doubled(samples, pinned):
    found = [SegmentBytes.of(segment(), GatherSpan.USE, samples, kept).host for kept in Activations.BASIC]
    assert found == [0, 0, 2 * 700 * samples, pinned]


def planned(description: ModelDescription, hardware: Hardware, job: TrainingJob, limit: int) -> set[Activations]:
    """What the search decides for the blocks."""
    plan = search(problem(description, hardware, job, limit)).plan
    return {plan.decision(description.units[index].fqn).activations for index in description.recomputable}


def test_offload_without_a_host_is_refused():
    description, hardware = recomputable(input_bytes=2e6, own_bytes=8e6), replace(with_host(), host=None)
    job = TrainingJob(global_batch_size=2, offload_activations=True)
    with pytest.raises(HardwareError, match=r"offload_activations=True, but the host of .* is not known"):
        search_spaces(problem(description, hardware, job), ONCE)
    assert planned(description, hardware, TrainingJob(global_batch_size=2), 10**9) == {SAVE}


QUICK, SLOW = 1e10, 1e6
"""Bytes a second: what a block saves goes and comes in a quarter of its forward's time, or in two minutes."""


@pytest.mark.parametrize(
    ("link", "scarce", "wanted"),
    [(QUICK, True, {OFFLOAD}), (SLOW, True, {RECOMPUTE}), (QUICK, False, set()), (SLOW, False, set())],
)
def test_search_offloads_or_recomputes_what_costs_least(link, scarce, wanted):
    job = TrainingJob(global_batch_size=2, host_offload=False)
    description = recomputable(input_bytes=1e5, own_bytes=64e6, forward_flops=1e12)
    hardware = replace(with_host(link_bytes_per_s=link), backend=Backend.GLOO)  # where no transfer is hidden
    jobs = (replace(job, recompute=again, offload_activations=False) for again in (False, True))
    saving, recomputing = (search(problem(description, hardware, one, LIMIT)).plan.peak_bytes for one in jobs)
    limit = recomputing + (saving - recomputing) // 100 if scarce else LIMIT
    assert planned(description, hardware, job, limit) - {SAVE} == wanted, "the last block's leave nothing to gain"
