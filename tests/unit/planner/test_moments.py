"""What a segment saves, brings back and has gathered ahead; `tests/property/test_memory_walk.py` sums every moment."""

from dataclasses import replace

import pytest

from hf_osdp.planner.affine import Affine
from hf_osdp.planner.cost.moments import SegmentBytes, gathered_ahead
from hf_osdp.planner.description import GatherSpan, PhaseCost, Segment
from hf_osdp.planner.placement import Activations
from tests.helpers.descriptions import linear_envelope, transformer, ways

SAVE, RECOMPUTE, OFFLOAD, RECOMPUTE_OFFLOAD = Activations.BASIC
ORDERS = {
    "head shared: nothing is gathered during the loss": ("embedding+head", None, (1, 0, 2, 3, 0, 1, 0),
        (None, None, None, 2, 3, 3, None)),
    "root's head: the last block is gathered during the loss": ("embedding+head", None, (0, 2, 3, 0),
        (None, None, 2, 3)),
    "root between blocks": ("embedding+head", None, (0, 2, 0, 3), (None, None, 2, 2)),
    "shared weights run more often than they have modules": ("embedding+head", None, (1, 2, 1, 3, 1),
        (None, None, 2, None, 3)),
    "a shared module that never runs has no place in the order": ("embedding+head", None, (1, 2, 3, 0),
        (None, None, 2, 3)),
    "the last block is a replica": ("embedding", 3, (0, 2, 3, 0, 1, 0), (None, None, 2, 2, 2, None)),
    "the first block is a replica": ("embedding", 2, (0, 2, 3, 0, 1, 0), (None, None, None, 3, 3, None)),
    "the embedding is a replica": ("embedding", 1, (0, 2, 3, 0, 1, 0), (None, None, 2, 3, 3, 3)),
}  # fmt: skip


@pytest.mark.parametrize(("modules", "replica", "order", "ahead"), ORDERS.values(), ids=ORDERS)
def test_gathered_ahead_follows_fsdp2s_order_of_forwards_and_skips_a_replica(modules, replica, order, ahead):
    description = transformer(layers=2)
    root, tied, *rest = description.units
    units = (root, replace(tied, module_names=tuple(modules.split("+"))), *rest)
    segments = tuple(Segment(unit=unit) for unit in order)
    managed = [index != replica for index in range(len(units))]
    assert gathered_ahead(replace(description, units=units, segments=segments), managed) == ahead


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
