"""Several blocks in one unit."""

from dataclasses import replace

import pytest
from transformers import GPT2Config, T5Config

from hf_osdp.modeling.build import build_on_meta
from hf_osdp.planner.affine import Affine, Envelope
from hf_osdp.planner.grouping import SIZES, grouped, joined
from hf_osdp.planner.presets import preset
from hf_osdp.planner.problem import Strategy
from hf_osdp.planner.search.compare import NEAR, choose_blocks_per_unit
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.split import ModelSplit
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.tracing.describe import describe
from tests.helpers.problems import problem

HARDWARE = preset("h100", devices_per_node=4)
JOB = TrainingJob(global_batch_size=4)


@pytest.fixture(scope="module")
def gpt2():
    config = GPT2Config(n_layer=7, n_embd=64, n_head=4, vocab_size=512, n_positions=64)
    return describe(build_on_meta(config), sequence_length=32, partial_recomputation=False, device_type="cuda")


def blocks_of(description):
    return [u.module_names for u in description.units if u.class_name == "GPT2Block"]


def test_neighbouring_blocks_become_units_with_the_same_parameters_and_work(gpt2):
    joined = grouped(gpt2, 3)
    names = [f"transformer.h.{i}" for i in range(7)]
    assert blocks_of(joined) == [tuple(names[:3]), tuple(names[3:6]), (names[6],)]
    assert [u.label for u in joined.units[2:]] == ["transformer.h.0-2", "transformer.h.3-5", "transformer.h.6"]
    assert joined.numel == gpt2.numel and len({p.name for u in joined.units for p in u.parameters}) == 7 * 12 + 4
    for phase in ("forward", "backward"):
        for cost in ("flops", "traffic_bytes", "operators"):
            sums = [sum(getattr(getattr(s, phase), cost)(5) for s in one.segments) for one in (gpt2, joined)]
            assert sums[0] == pytest.approx(sums[1])
    assert joined.split == ModelSplit(blocks_per_unit=3) and joined.fingerprint != gpt2.fingerprint
    assert [joined.units[s.unit].label for s in joined.segments].count("transformer.h.0-2") == 1


def test_highest_peak_keeps_that_of_one_sample():
    usual = Envelope(pieces=(Affine(per_sample=4),), single=9)
    assert [Envelope.highest([usual, Envelope(pieces=(Affine(constant=5),))]).bytes(n) for n in (1, 2)] == [9, 8]
    assert Envelope.highest([usual, Envelope(pieces=(Affine(constant=20),))]).bytes(1) == 20


def test_only_equal_neighbours_of_whole_blocks_are_joined(gpt2):
    config = T5Config(num_layers=3, d_model=16, d_kv=8, d_ff=64, num_heads=2, vocab_size=61)
    t5 = describe(build_on_meta(config), sequence_length=12, recomputation=False)
    names = [u.module_names for u in grouped(t5, 8).units if u.class_name == "T5Block"]
    rows = [[f"{part}.block.0"] for part in ("encoder", "decoder")], [
        [f"{part}.block.{i}" for i in (1, 2)] for part in ("encoder", "decoder")
    ]  # fmt: skip
    assert sorted(names) == sorted(tuple(row) for rows_of in rows for row in rows_of), "the first has a table more"
    assert grouped(gpt2, 1) is gpt2
    cut = replace(gpt2, split=ModelSplit(operators=True))
    assert grouped(cut, 4) is cut


def test_units_without_segments_are_joined_too(gpt2):
    """A trace of text alone has no segments of a tower for pictures."""
    calls = [s for s in gpt2.segments if not gpt2.units[s.unit].fqn.startswith("transformer.h.")]
    index = {u.fqn: i for i, u in enumerate(gpt2.units)}
    parts = [[index[f"transformer.h.{i}"] for i in row] for row in ((0, 1, 2), (3, 4, 5))]
    traced = joined(replace(gpt2, segments=tuple(calls)), parts)
    assert traced.fingerprint == grouped(gpt2, 3).fingerprint == joined(gpt2, parts).fingerprint
    assert joined(gpt2, parts).segments == grouped(gpt2, 3).segments
    assert [traced.units[s.unit].fqn for s in traced.segments] == [gpt2.units[s.unit].fqn for s in calls]


def test_fastest_number_of_blocks_is_taken(gpt2):
    limit = int(1.2 * least_memory(problem(gpt2, HARDWARE, JOB)))
    asked = problem(gpt2, HARDWARE, JOB, limit)
    chosen = choose_blocks_per_unit(asked)
    seconds = {k: search(replace(asked, description=grouped(gpt2, k))).time.step_s for k in (1, *SIZES)}
    fastest = min(seconds.values())
    assert chosen.split.blocks_per_unit > 1 and seconds[1] > NEAR * fastest, "each gather takes the CPU"
    assert seconds[chosen.split.blocks_per_unit] <= NEAR * fastest
    assert choose_blocks_per_unit(asked, 1) is gpt2
    assert choose_blocks_per_unit(asked, 5) == grouped(gpt2, 5)
    assert choose_blocks_per_unit(replace(asked, strategy=Strategy.FSDP)) is gpt2
    assert choose_blocks_per_unit(replace(asked, memory_limit_bytes=1)) is gpt2


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="blocks_per_unit=2 needs whole blocks; leave operators and slices out"):
        ModelSplit(blocks_per_unit=2, operators=True)
