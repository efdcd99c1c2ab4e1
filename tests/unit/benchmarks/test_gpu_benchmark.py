"""The GPU benchmark's flow on the CPU, and the GPU suite's steps on measurements that are played: rows, aims that
are met and missed.
"""

from __future__ import annotations

import subprocess

import pytest

from benchmarks import gpu_memory
from benchmarks.gpu_memory import Model, lowest_limit, measure, setting_of
from benchmarks.gpu_suite import catalogue, faults  # noqa: F401  (the catalogue has the order of steps)
from hf_osdp.preparation.simulate import fake_process_group
from tests.helpers.counted_memory import CountedMemory

TINY = Model(
    config="GPT2Config", architecture="GPT2LMHeadModel", sequence_length=32, samples=2,
    sizes={"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 301, "n_positions": 32, "bos_token_id": 0,
           "eos_token_id": 0},
)  # fmt: skip

RESOLUTION = 0.02


@pytest.mark.slow
def test_layouts_are_counted_and_plans_run_at_their_limit_to_where_the_walk_ends():
    memory = CountedMemory()
    with pytest.MonkeyPatch.context() as patched, fake_process_group(gpu_memory.WORLD):
        patched.setattr(gpu_memory, "RESOLUTION", RESOLUTION)
        layouts, limits = measure(setting_of("tiny", TINY, "bf16", memory.device), memory, ("mixed",), (0.3,))
    assert [row.layout for row in layouts] == ["mixed"] and [row.between for row in limits] == [0.3]
    assert all(abs(row.error) < 0.02 for row in layouts), [row.error for row in layouts]
    for row in limits:
        assert row.planned_bytes <= row.limit_bytes
        # The limit is of the allocator's segments, many times what is live in a model as small as this; the walk is as
        # fine as its part.
        assert (
            0.95 * row.planned_bytes <= row.survives_bytes <= 1.05 * row.planned_bytes + RESOLUTION * row.limit_bytes
        )
        assert row.fits == (row.survives_bytes <= row.limit_bytes)
    assert memory.attempts >= 4, "the walk tried limits"
    gpu_memory.show(layouts, limits)


def test_the_walk_goes_down_from_what_fits_and_up_from_what_does_not():
    for truth in (700, 995, 1003, 1200):
        lowest = lowest_limit(lambda limit, truth=truth: limit >= truth, 1000, 1500, fits=1000 >= truth)
        assert truth <= lowest <= truth + 1000 * gpu_memory.RESOLUTION + 1
    assert lowest_limit(lambda limit: False, 1000, 1500, fits=False) is None
    assert lowest_limit(lambda limit: True, 1000, 1500, fits=True) <= 1 + 1000 * gpu_memory.RESOLUTION


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "ranks", "on_oom", "wrong"),
    [
        (1, "PLAN a\n", "{said}", 1, "raise", False),
        (0, "PLAN a\nPLAN b\nEND\n", "{said}", 1, "replan", False),
        (0, "PLAN a\nPLAN a\nPLAN b\nPLAN b\nEND\nEND\n", "{said}", 2, "replan", False),
        (0, "PLAN a\nPLAN a\nEND\n", "{said}", 1, "replan", True),
        (0, "PLAN a\nPLAN a\nPLAN b\nPLAN b\nEND\n", "{said}", 2, "replan", True),
        (0, "PLAN a\nEND\n", "{said}", 1, "raise", True),
        (1, "PLAN a\n", "CUDA out of memory", 1, "raise", True),
    ],
)
def test_what_a_run_that_lacks_memory_must_show(code, stdout, stderr, ranks, on_oom, wrong):
    said = "hf_osdp: Out of memory on rank 1 on host in forward of h.1: the plan was estimated to need 5.8 MiB of a limit of 6.0 MiB, 3 more."  # noqa: E501
    done = subprocess.CompletedProcess([], code, stdout, stderr.format(said=said))
    assert bool(faults.problem_of(done, ranks, on_oom)) == wrong
