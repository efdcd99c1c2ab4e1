"""A profile's JSON form; which segments take its times; damaged files give one clear line."""

from dataclasses import replace

import pytest

from hf_osdp.errors import ProfileError
from hf_osdp.planner.affine import Affine, linear_fit
from hf_osdp.planner.block_forms import COUNTED_AS_EAGER, MEASURED_COMPILED
from hf_osdp.planner.cost.timing import phase_affine
from hf_osdp.planner.description import DType, ModelDescription, PhaseCost, Segment
from hf_osdp.planner.hardware import Collective, CollectiveTiming, FsdpOverhead, WorkTime
from hf_osdp.planner.presets import preset
from hf_osdp.planner.profile import BlockTimes, Profile, SegmentTimes, SegmentWork, TimePoint, with_block_times
from hf_osdp.planner.training_job import OptimizerStep
from tests.helpers.descriptions import transformer, ways

DESCRIPTION = transformer(layers=3)
PAIR = {"collective": Collective.ALL_GATHER, "group_size": 2, "crosses_nodes": True}
TIMING = CollectiveTiming(**PAIR, latency_s=1e-4, seconds_per_byte=1e-9)
GATHER, REDUCE = WorkTime(call_s=1e-4, tensor_s=1e-5, seconds_per_byte=1e-10), WorkTime(call_s=2e-4)
UPDATES = {step: WorkTime(tensor_s=1e-5) for step in OptimizerStep}
OVERHEAD = FsdpOverhead(copy=REDUCE, flatten=GATHER, gather=GATHER, reduce=REDUCE, updates=UPDATES)
HARDWARE = replace(preset("cpu", devices_per_node=2), timings=(TIMING,), fsdp_overhead=OVERHEAD)


def times_of(description: ModelDescription, index: int, *points: tuple[int, float, float]) -> SegmentTimes:
    segment = description.segments[index]
    unit = description.units[segment.unit]
    return SegmentTimes(
        class_name=unit.class_name, parameter_shapes=tuple(p.shape for p in unit.parameters),
        sequence_length=description.sequence_length, compute_dtype=description.compute_dtype,
        work=SegmentWork.of(segment),
        points=tuple(TimePoint(samples=b, forward_s=f, backward_s=r) for b, f, r in points),
    )  # fmt: skip


def profile_of(description: ModelDescription = DESCRIPTION) -> Profile:
    """Segment i takes (i + 1) ms + (i + 1) ms a sample forward, ten times that backward."""
    ends = (0, len(description.segments) - 1)
    segments = enumerate(description.segments)
    kinds = {(s.unit if i in ends else -1, SegmentWork.of(s)): i for i, s in segments}
    points = {i: [(b, 1e-3 * (i + 1) * (1 + b), 1e-2 * (i + 1) * (1 + b)) for b in (1, 2, 4)] for i in kinds.values()}
    times = tuple(times_of(description, i, *those) for i, those in points.items())
    facts = {"model": "transformer", "versions": {"torch": "2.13.0"}, "date": "2026-01-01T00:00:00+00:00"}
    return Profile(hardware=HARDWARE, segments=times, device_names=("cpu", "cpu"), **facts)


PROFILE = profile_of()


def test_files_hold_the_profile_exactly(tmp_path):
    PROFILE.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == PROFILE
    assert PROFILE.micro_batch_sizes == (1, 2, 4)


def seconds(phase: PhaseCost, description: ModelDescription) -> float:
    """Of three samples."""
    return phase_affine(phase, description, HARDWARE)(3)


def test_every_segment_takes_the_times_of_its_own_kind():
    timed = with_block_times(DESCRIPTION, PROFILE)
    last_block = len(DESCRIPTION.segments) - 2  # of the equal blocks the last one's entry stands for all
    for index, segment in enumerate(timed.segments):
        number = last_block if 0 < index < len(timed.segments) - 1 else index
        assert seconds(segment.forward, timed) == pytest.approx(4e-3 * (number + 1))
        assert seconds(segment.backward, timed) == pytest.approx(4e-2 * (number + 1))
        assert segment.forward.operators == Affine(), "what the CPU takes to issue them is in the time"
    assert timed.fingerprint == DESCRIPTION.fingerprint
    longer = with_block_times(transformer(layers=7), PROFILE)
    assert {s.forward.seconds for s in longer.segments[1:-1]} == {timed.segments[1].forward.seconds}
    assert with_block_times(DESCRIPTION, replace(PROFILE, segments=())) == DESCRIPTION


def test_recomputed_segments_take_one_more_forward():
    again = replace(DESCRIPTION, segments=tuple(replace(s, recomputed=ways(s)) for s in DESCRIPTION.segments))
    for segment in with_block_times(again, PROFILE).segments:
        forward, backward = (seconds(phase, again) for phase in (segment.forward, segment.backward))
        assert seconds(segment.recomputed[0].costs.backward, again) == pytest.approx(forward + backward)
        assert seconds(segment.recomputed[0].costs.forward, again) == forward


def test_parts_of_blocks_take_together_what_whole_blocks_took():
    """The root, which takes other times than its roofline's, does not change them."""
    times = BlockTimes.of(PROFILE.segments, DESCRIPTION, HARDWARE, "")
    units = (replace(u, class_name="Part") if u.class_name == "Block" else u for u in DESCRIPTION.units)

    def blocks_s(description: ModelDescription) -> float:
        phases = (phase for s in description.segments[1:-1] for phase in (s.forward, s.backward))
        return sum(phase_affine(phase, description, HARDWARE)(4) for phase in phases)

    parts = replace(DESCRIPTION, units=tuple(units))
    assert blocks_s(times.on(parts)) == pytest.approx(blocks_s(times.on(DESCRIPTION)))
    assert times.on(parts).segments[0] == times.on(DESCRIPTION).segments[0]


def test_measured_compiled_blocks_save_what_was_measured_and_keep_their_peaks():
    compiled = replace(DESCRIPTION, compiled_classes=("Block",), trace=f"fake tensors, Block {COUNTED_AS_EAGER}")
    traced = DESCRIPTION.segments[1]
    points = [
        TimePoint(samples=b, forward_s=1e-3, backward_s=1e-3, saved_bytes=int(traced.saved_bytes(b) / 2) + 7)
        for b in (2, 4)
    ]
    block = replace(times_of(DESCRIPTION, 1, (1, 1.0, 1.0)), points=tuple(points), compiled=True)
    profile = replace(PROFILE, segments=(*PROFILE.segments, block))
    found = with_block_times(compiled, profile)
    assert found.trace == f"fake tensors, Block {MEASURED_COMPILED}" and found.compiled_classes == ("Block",)
    for was, now in zip(DESCRIPTION.segments, found.segments, strict=True):
        is_block = DESCRIPTION.units[was.unit].class_name == "Block"
        saved = was.saved_bytes(3) / 2 + 7 if is_block else was.saved_bytes(3)
        assert now.saved_bytes(3) == pytest.approx(saved, abs=1)
        ends = [one.saved_bytes(3) + one.backward.peak_bytes.bytes(3) for one in (was, now)]
        assert 0 <= ends[1] - ends[0] <= 8 and now.forward.peak_bytes == was.forward.peak_bytes
    assert with_block_times(DESCRIPTION, profile).segments == with_block_times(DESCRIPTION, PROFILE).segments
    uncompiled = with_block_times(compiled, PROFILE)
    assert COUNTED_AS_EAGER in uncompiled.trace and uncompiled.segments[1].saved_bytes == traced.saved_bytes


def with_work(factor: float, name: str, phase: str, class_name: str = "") -> ModelDescription:
    """The description with another amount of one kind of work, in one class or in all."""

    def scaled(cost: PhaseCost) -> PhaseCost:
        return replace(cost, **{name: getattr(cost, name).scaled(factor, constants=True)})

    def changed(s: Segment) -> Segment:
        meant = class_name in ("", DESCRIPTION.units[s.unit].class_name)
        return replace(s, **{phase: scaled(getattr(s, phase))}) if meant else s

    return replace(DESCRIPTION, segments=tuple(map(changed, DESCRIPTION.segments)))


BLOCKS_ONLY = replace(PROFILE, segments=tuple(times for times in PROFILE.segments if times.class_name == "Block"))
HAS = "it has times for Block at 32 tokens in float32"
OTHERS = [
    (transformer(sequence_length=64), PROFILE, f"at 64 tokens in float32; {HAS}, Root at 32"),
    (transformer(dtype=DType.BFLOAT16), PROFILE, f"in bfloat16; {HAS}"),
    (with_work(1.5, "matmul_flops", "backward", "Block"), PROFILE, "no times for Block"),  # checkpointed
    (DESCRIPTION, BLOCKS_ONLY, f"no times for Root 'embedding+head' at 32 tokens in float32; {HAS}."),
]


@pytest.mark.parametrize(("description", "profile", "reason"), OTHERS)
def test_another_model_is_refused_and_never_half_measured(description, profile, reason):
    with pytest.raises(ProfileError) as caught:
        with_block_times(description, profile)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_linear_fit_recovers_coefficients_and_one_size_is_rate():
    assert linear_fit([(1_000, 2e-3), (1_000_000, 1e-3)]) == pytest.approx((0.0, 1e-9)), "physical under noise"
    assert linear_fit([(n, 1e-4 + 2e-9 * n) for n in (1_000, 100_000, 10_000_000)]) == pytest.approx((1e-4, 2e-9))
    assert times_of(DESCRIPTION, 0, (4, 2.0, 0.0)).linear("forward_s") == Affine(constant=0.0, per_sample=0.5)
