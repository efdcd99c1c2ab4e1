"""Searches of deep models, whose rows are counts: what OR-tools' implied bounds once called infeasible was not."""

from __future__ import annotations

import itertools

import pytest

from hf_osdp.planner.description import DType
from hf_osdp.planner.job import Precision, TrainingJob
from hf_osdp.planner.presets import preset
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.tracing.describe import describe
from tests.helpers.problems import problem


@pytest.mark.slow
def test_more_memory_gives_a_deep_model_no_slower_plan():
    from transformers import GPT2Config

    config = GPT2Config(n_layer=128, n_embd=25600, n_head=160, n_positions=2048)
    model = describe(config, sequence_length=2048, compute_dtype=DType.BFLOAT16, device_type="cuda", recomputation=True)
    hardware = preset("h100", nodes=128, devices_per_node=8)
    job = TrainingJob(global_batch_size=2048, precision=Precision.named("bf16"))
    least = least_memory(problem(model, hardware, job))
    times = [search(problem(model, hardware, job, int(least * factor))).plan.step_s for factor in (1.5, 2, 3, 5, 10)]
    assert all(after < before for before, after in itertools.pairwise(times)), times
