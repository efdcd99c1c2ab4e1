"""The GPU benchmark's flow on the CPU: counted live bytes in the place of CUDA's allocator, tiny models, limits that are enforced."""

from __future__ import annotations

import pytest

from benchmarks import gpu_memory
from benchmarks.gpu_memory import LayoutRow, LimitRow, Model, headline, lowest_limit, measure, setting_of
from hf_osdp.planning.simulate import fake_process_group
from tests.helpers.counted_memory import CountedMemory

TINY = Model(
    config="GPT2Config", architecture="GPT2LMHeadModel", sequence_length=32, samples=2,
    sizes={"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 301, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0},
)  # fmt: skip

RESOLUTION = 0.02


@pytest.fixture(scope="module")
def found() -> tuple[list[LayoutRow], list[LimitRow], CountedMemory]:
    memory = CountedMemory()
    with pytest.MonkeyPatch.context() as patched, fake_process_group(gpu_memory.WORLD):
        patched.setattr(gpu_memory, "RESOLUTION", RESOLUTION)
        setting = setting_of("tiny", TINY, "bf16", memory.device)
        layouts, limits = measure(setting, memory, ("mixed",), (0.3,))
    return layouts, limits, memory


@pytest.mark.slow
def test_each_layout_is_built_trained_and_counted(found):
    layouts, _, _ = found
    assert [row.layout for row in layouts] == ["mixed"]
    assert all(abs(row.error) < 0.02 for row in layouts), [row.error for row in layouts]


@pytest.mark.slow
def test_plans_run_at_their_limit_and_the_walk_finds_where_they_no_longer_do(found):
    _, limits, memory = found
    assert [row.between for row in limits] == [0.3]
    for row in limits:
        assert row.planned_bytes <= row.limit_bytes
        # The limit is of the allocator's segments, many times what is live in a model as small as this; the walk is as fine as its part.
        assert 0.95 * row.planned_bytes <= row.survives_bytes <= 1.05 * row.planned_bytes + RESOLUTION * row.limit_bytes
        assert row.fits == (row.survives_bytes <= row.limit_bytes)
    assert memory.attempts >= 4, "the walk tried limits"
    gpu_memory.show(found[0], limits)


def test_the_walk_goes_down_from_what_fits_and_up_from_what_does_not():
    for truth in (700, 995, 1003, 1200):
        lowest = lowest_limit(lambda limit, truth=truth: limit >= truth, 1000, 1500, fits=1000 >= truth)
        assert truth <= lowest <= truth + 1000 * gpu_memory.RESOLUTION + 1
    assert lowest_limit(lambda limit: False, 1000, 1500, fits=False) is None
    assert lowest_limit(lambda limit: True, 1000, 1500, fits=True) <= 1 + 1000 * gpu_memory.RESOLUTION


def layout(estimated: int, allocated: int | None) -> LayoutRow:
    return LayoutRow(
        model="m", precision="no", layout="ddp", estimated_bytes=estimated, allocated_bytes=allocated, reserved_bytes=allocated
    )


def limit(used: int | None, size: int = gpu_memory.LARGE_BYTES) -> LimitRow:
    return LimitRow(
        model="m", precision="no", between=0.0, limit_bytes=size, planned_bytes=size, fits=used is not None,
        allocated_bytes=used, reserved_bytes=used, survives_bytes=used,
    )  # fmt: skip


def test_the_headline_tells_a_missed_aim():
    large = gpu_memory.LARGE_BYTES
    assert headline([layout(1005, 1000)], [limit(large)])[1]
    for layouts, limits, part in (
        ([layout(1020, 1000)], [limit(large)], "off by 2.00 %"),
        ([layout(1000, 1000)], [limit(None)], "1 of 1 feasible plans ran out"),
        ([layout(1000, 1000)], [limit(int(0.9 * large))], "at least 90.0 %"),
        ([layout(1000, None)], [limit(large)], "over 0 of 1 layouts"),
    ):
        line, met = headline(layouts, limits)
        assert not met and part.replace(" %", "%") in line, line
    assert headline([layout(1000, 1000)], [limit(500, size=1000)])[1], "a small limit cannot be filled"
