"""The highest peak of micro-batches under a budget of tokens is that of the longest or of the shortest rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from hf_osdp.planner.cost.memory import estimate_memory
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.tracing.describe import describe
from tests.helpers.layouts import plan_of
from tests.helpers.models import tiny_model
from tests.helpers.sampling import slow_but

TOKENS, SHORTEST, LONGEST = 4096, 4, 512


def config_of(name: str, attention: str) -> object:
    config = tiny_model(name, layers=2).config
    config.n_positions = config.max_position_embeddings = LONGEST
    config._attn_implementation = attention
    return config


CASES = list(product(("gpt2", "bert", "llama"), ("eager", "sdpa"), ("zero3", "replicate", "everything")))


@pytest.mark.parametrize(("name", "attention", "layout"), slow_but(CASES, daily=CASES[:1]))
def test_peak_is_highest_at_an_end(name: str, attention: str, layout: str) -> None:
    peaks = []
    for length in (LONGEST, 128, 32, 8, SHORTEST):
        again = layout == "everything"
        description = describe(config_of(name, attention), sequence_length=length, recomputation=again)
        plan = replace(plan_of(description.units, 4, layout, accumulation_steps=2), micro_batch_size=TOKENS // length)
        job = TrainingJob(global_batch_size=plan.global_batch_size)
        layouts = plan.layouts(description)
        peaks.append(estimate_memory(description, layouts, 4, job, plan.batch).peak_bytes)
    assert max(peaks) <= 1.001 * max(peaks[0], peaks[-1])
