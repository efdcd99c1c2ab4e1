"""An expected step of samples of unequal lengths: its tokens, its micro-steps, and what the search makes of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from transformers import GPT2Config

from hf_osdp.modeling.build import build_on_meta
from hf_osdp.planner.cost.timing import estimate_time, price_micro_batches
from hf_osdp.planner.decision import Batch
from hf_osdp.planner.lengths import Lengths, lognormal
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.presets import preset
from hf_osdp.planner.token_budget import TokenBudget
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.find_plan import find_plan
from hf_osdp.tracing.describe import describe
from tests.helpers.layouts import plan_of
from tests.helpers.problems import run_job

TWO = Batch(micro_batch_size=2, accumulation_steps=1)
FREE = TokenBudget(tokens=64, shortest=64, longest=64, overhead=0)
COSTLY = replace(FREE, overhead=10**6)


def gpt2(heads: int, length: int) -> GPT2Config:
    return GPT2Config(n_layer=2, n_embd=64 * heads, n_head=heads, vocab_size=500, n_positions=length)


def tokens_of(batch: Batch, longest: int) -> float:
    return batch.micro_batch_size * batch.accumulation_steps * longest


def test_rows_of_one_length_are_the_batch_itself():
    found = Lengths(tokens=(64,), longest=64).expected(Batch(micro_batch_size=4, accumulation_steps=3), 8)
    assert (found.micro_batch_size, found.accumulation_steps) == (4, 3)
    assert Lengths(tokens=(8, 64), longest=64, padded_to_longest=True).expected(TWO, 8) is TWO


@pytest.mark.parametrize("ranks", [1, 2])
def test_expected_tokens_are_those_of_every_draw(ranks):
    lengths, draws = (8, 16, 48), list(product((8, 16, 48), repeat=2 * ranks))
    longest = [max(2 * max(draw[2 * rank :][:2]) for rank in range(ranks)) for draw in draws]
    found = Lengths(tokens=lengths, longest=64).expected(TWO, ranks)
    assert tokens_of(found, 64) == pytest.approx(sum(longest) / len(draws), rel=0.04)


def test_loaded_batches_are_padded_together_and_not_joined():
    lengths = Lengths(tokens=(8, 64), longest=64, padded_together=4)
    small, large = (
        lengths.expected(Batch(micro_batch_size=size, accumulation_steps=16 // size), 1) for size in (1, 8)
    )
    assert (small.accumulation_steps, large.accumulation_steps) == (16, 4)  # of at most the 4 that were loaded
    assert tokens_of(small, 64) == pytest.approx(tokens_of(large, 64)) == pytest.approx(16 * 64, rel=0.1)


def test_cut_by_length_pads_less_unless_micro_batches_are_costly():
    as_they_come, batch = Lengths(tokens=(8, 8, 8, 64), longest=64), Batch(micro_batch_size=8, accumulation_steps=2)
    plain, cut, whole = (replace(as_they_come, budget=budget).expected(batch, 1) for budget in (None, FREE, COSTLY))
    assert tokens_of(cut, 64) < 0.5 * tokens_of(plain, 64)
    assert tokens_of(cut, 64) == pytest.approx(16 * as_they_come.mean, rel=0.02)
    assert cut.accumulation_steps > whole.accumulation_steps >= 1


def test_a_dataset_is_held_by_its_quantiles():
    held = Lengths.of(range(1, 2001), longest=1000)
    assert len(held.tokens) == 100 and held.tokens[0] == 11 and held.tokens[-1] == 1000
    assert held.mean == pytest.approx(750, rel=0.001)  # the longer half counts as the longest
    with pytest.raises(ValueError, match="from 0 to 5 tokens; give at least one, each from 1 to the 8"):
        Lengths(tokens=(0, 5), longest=8)


@pytest.mark.parametrize(("mean", "longest"), [(1, 8), (300, 2048), (1900, 2048), (64, 64)])
def test_lognormal_lengths_have_their_mean(mean, longest):
    found = lognormal(mean, longest)
    assert sum(found) / 100 == pytest.approx(mean, rel=0.01) and 1 <= min(found) <= max(found) <= longest


@pytest.mark.parametrize("layout", ["zero3", "replicate"])
@pytest.mark.parametrize("device", ["cpu", "a100-80"])
def test_prices_are_those_of_the_estimate(device, layout):
    """Tokens beside those of a micro-batch, and the tokens that are free, are where two estimates agree."""
    description = describe(gpt2(2, 32), sequence_length=32, device_type="cuda")
    hardware, job = preset("a100-80", devices_per_node=4), TrainingJob(global_batch_size=2**20)
    if device == "cpu":
        hardware = replace(hardware, device=replace(hardware.device, operator_s=0.0))
    layouts = plan_of(description.units, 4, layout).layouts(description)
    budget = price_micro_batches(description, layouts, hardware, job)

    def step_s(samples: int, steps: int) -> float:
        batch = Batch(micro_batch_size=samples, accumulation_steps=steps)
        return estimate_time(description, layouts, hardware, job, batch).step_s

    large = 2**16
    of_token_s = (step_s(2 * large, 2) - step_s(large, 2)) / (2 * large * 32)
    more_s = step_s(large, 3) - step_s(large, 2)
    assert more_s == pytest.approx((large * 32 + budget.overhead) * of_token_s, rel=0.01)
    nothing_s = step_s(0, 3) - step_s(0, 2)
    tokens = budget.least + budget.overhead  # each a whole number
    assert nothing_s == pytest.approx(tokens * of_token_s, rel=0.01, abs=of_token_s)


@pytest.mark.parametrize(("heads", "length", "together", "cuts"), [(2, 64, None, False), (32, 1024, 16, True)])
def test_search_cuts_by_length_where_that_is_faster(heads, length, together, cuts):
    """Small micro-batches wait for the CPU; large ones compute padding."""
    model = build_on_meta(gpt2(heads, length), None)
    config = OSDPConfig(sequence_length=length, global_batch_size=64, hardware="a100-80", operator_splitting=False)
    lengths = Lengths.of(lognormal(length // 8, length), length, padded_together=together)
    job = run_job(config, device_type="cuda", lengths=lengths, cuts_by_length=True)
    found = find_plan(model, job)
    kept = find_plan(model, job.asking(batch_by_tokens=False))
    forced = find_plan(model, job.asking(batch_by_tokens=True))
    assert (found.problem.job.lengths.budget is not None) is cuts
    assert isinstance(found.outcome, Plan) and kept.problem.job.lengths.budget is None
    assert forced.problem.job.lengths.budget is not None
    assert (forced.plan.step_s < 0.95 * kept.plan.step_s) is cuts
