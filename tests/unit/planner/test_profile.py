"""A profile's JSON form; which segments take its times; damaged files give one clear line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hf_osdp.errors import ProfileError
from hf_osdp.planner.affine import Affine, linear_fit
from hf_osdp.planner.cost.timing import compute_seconds, phase_seconds
from hf_osdp.planner.description import DType, ModelDescription, PhaseCost
from hf_osdp.planner.hardware import Collective, CollectiveTiming, FsdpOverhead, WorkTime
from hf_osdp.planner.job import OptimizerStep
from hf_osdp.planner.presets import preset
from hf_osdp.planner.profile import HostLink, Profile, SegmentTimes, SegmentWork, TimePoint, with_block_times
from hf_osdp.reading import MOST_BYTES
from tests.helpers.descriptions import transformer

DESCRIPTION = transformer(layers=3)
HARDWARE = replace(
    preset("cpu", devices_per_node=2),
    timings=(CollectiveTiming(collective=Collective.ALL_GATHER, group_size=2, latency_s=1e-4, seconds_per_byte=1e-9, crosses_nodes=True),),
    fsdp_overhead=FsdpOverhead(
        gather=WorkTime(call_s=1e-4, tensor_s=1e-5, seconds_per_byte=1e-10),
        reduce=WorkTime(call_s=2e-4),
        updates={step: WorkTime(tensor_s=1e-5) for step in OptimizerStep},
    ),
)


def times_of(description: ModelDescription, index: int, *points: tuple[int, float, float]) -> SegmentTimes:
    segment = description.segments[index]
    unit = description.units[segment.unit]
    return SegmentTimes(
        class_name=unit.class_name,
        parameter_shapes=tuple(p.shape for p in unit.parameters),
        sequence_length=description.sequence_length,
        compute_dtype=description.compute_dtype,
        work=SegmentWork.of(segment),
        points=tuple(TimePoint(samples=b, forward_s=f, backward_s=r) for b, f, r in points),
    )


def profile_of(description: ModelDescription = DESCRIPTION) -> Profile:
    """Segment i takes (i + 1) ms + (i + 1) ms a sample forward, ten times that backward."""
    kinds = {(s.unit if i in (0, len(description.segments) - 1) else -1, SegmentWork.of(s)): i for i, s in enumerate(description.segments)}
    return Profile(
        hardware=HARDWARE,
        segments=tuple(
            times_of(description, i, *((b, 1e-3 * (i + 1) * (1 + b), 1e-2 * (i + 1) * (1 + b)) for b in (1, 2, 4))) for i in kinds.values()
        ),
        host_link=HostLink(to_device_bytes_per_s=2e10, to_host_bytes_per_s=1e10),
        device_names=("cpu", "cpu"),
        model="transformer",
        versions={"torch": "2.13.0"},
        date="2026-01-01T00:00:00+00:00",
    )


PROFILE = profile_of()


def refused(text: str | bytes) -> str:
    """The message with which the text is refused: one line that names the file."""
    with pytest.raises(ProfileError) as caught:
        Profile.from_json(text, source="p.json")
    message = str(caught.value)
    assert "\n" not in message and message.startswith("p.json")
    return message


def changed(**values) -> str:
    return json.dumps({**json.loads(PROFILE.to_json()), **values})


def test_json_round_trip_is_exact(tmp_path):
    assert Profile.from_json(PROFILE.to_json()) == PROFILE
    PROFILE.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == PROFILE
    assert PROFILE.micro_batch_sizes == (1, 2, 4)


def test_damaged_profiles_are_refused_in_one_line():
    assert "is not JSON" in refused("{")
    assert "should be an object" in refused("[]")
    assert "hardware: Field required" in refused("{}")
    assert "version 1; this hf_osdp reads version 3" in refused(changed(version=1))
    assert "colour" in refused(changed(colour="red"))
    text = PROFILE.to_json()
    assert "group_size=1" in refused(text.replace('"group_size": 2', '"group_size": 1'))
    assert "gloo" in refused(text.replace('"gloo"', '"mpi"'))
    assert "samples >= 1" in refused(text.replace('"samples": 1,', '"samples": 0,'))
    assert "fused" in refused(text.replace('"fused"', '"other"'))
    assert "positive and finite" in refused(text.replace('"to_host_bytes_per_s": 10000000000.0', '"to_host_bytes_per_s": 0'))


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(ProfileError, match=r"Cannot read the profile .*none\.json: No such file"):
        Profile.load(tmp_path / "none.json")
    with pytest.raises(ProfileError, match="Cannot write the profile"):
        PROFILE.save(tmp_path / "no" / "p.json")
    (tmp_path / "large.json").write_bytes(b" " * (MOST_BYTES + 1))
    with pytest.raises(ProfileError, match="is not a profile"):
        Profile.load(tmp_path / "large.json")


def test_every_segment_takes_the_times_of_its_own_kind():
    timed = with_block_times(DESCRIPTION, PROFILE)
    last_block = len(DESCRIPTION.segments) - 2  # of the equal blocks the last one's entry stands for all
    for index, segment in enumerate(timed.segments):
        number = last_block if 0 < index < len(timed.segments) - 1 else index
        assert phase_seconds(segment.forward, 3, timed, HARDWARE) == pytest.approx(4e-3 * (number + 1))
        assert phase_seconds(segment.backward, 3, timed, HARDWARE) == pytest.approx(4e-2 * (number + 1))
    assert timed.fingerprint == DESCRIPTION.fingerprint
    assert sum(compute_seconds(timed, HARDWARE, 3)) != pytest.approx(sum(compute_seconds(DESCRIPTION, HARDWARE, 3)))


def test_a_longer_model_takes_the_same_times():
    timed = with_block_times(transformer(layers=7), PROFILE)
    blocks = [s for s in timed.segments if timed.units[s.unit].class_name == "Block"]
    assert len(blocks) == 7 and len({s.forward.seconds for s in blocks}) == 1


def test_a_profile_of_the_machine_alone_changes_nothing():
    assert with_block_times(DESCRIPTION, replace(PROFILE, segments=())) == DESCRIPTION


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        (transformer(sequence_length=64), "at 64 tokens in float32; it was measured at 32"),
        (transformer(dtype=DType.BFLOAT16), "in bfloat16; it was measured in float32"),
        (transformer(hidden=96), "other parameter shapes, attention, dropout or checkpointing"),
    ],
)
def test_another_model_is_refused_and_never_half_measured(description, reason):
    with pytest.raises(ProfileError) as caught:
        with_block_times(description, PROFILE)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_a_class_that_was_not_measured_is_named():
    blocks_only = tuple(times for times in PROFILE.segments if times.class_name == "Block")
    with pytest.raises(ProfileError, match=r"no times for Root .* it has times of Block"):
        with_block_times(DESCRIPTION, replace(PROFILE, segments=blocks_only))


def test_checkpointed_blocks_do_not_take_the_times_of_others():
    def twice(cost: PhaseCost) -> PhaseCost:
        return replace(cost, matmul_flops=Affine(per_sample=1.5 * cost.matmul_flops.per_sample))

    segments = tuple(
        replace(s, backward=twice(s.backward)) if DESCRIPTION.units[s.unit].class_name == "Block" else s for s in DESCRIPTION.segments
    )
    with pytest.raises(ProfileError, match="checkpointing"):
        with_block_times(replace(DESCRIPTION, segments=segments), PROFILE)


def test_work_that_differs_by_a_hair_is_the_same():
    def nudged(cost: PhaseCost) -> PhaseCost:
        return replace(cost, traffic_bytes=Affine(per_sample=1.001 * cost.traffic_bytes.per_sample))

    segments = tuple(replace(s, forward=nudged(s.forward)) for s in DESCRIPTION.segments)
    timed = with_block_times(replace(DESCRIPTION, segments=segments), PROFILE)
    assert all(s.forward.seconds is not None for s in timed.segments)


def test_linear_fit_recovers_the_coefficients():
    assert linear_fit([(n, 1e-4 + 2e-9 * n) for n in (1_000, 100_000, 10_000_000)]) == pytest.approx((1e-4, 2e-9))


def test_one_size_is_a_line_through_nothing():
    assert times_of(DESCRIPTION, 0, (4, 2.0, 0.0)).linear("forward_s") == Affine(constant=0.0, per_sample=0.5)
