"""Splits of a model share the traces of what they do not change, and are described as if they shared none."""

from __future__ import annotations

import pytest
import torch

from hf_osdp.modeling.split.candidates import possible_splits
from hf_osdp.planner.split import ModelSplit
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.find_plan import Describer
from hf_osdp.tracing.describe import describe
from hf_osdp.tracing.tracer import Tracer
from tests.helpers.models import tiny_model
from tests.helpers.problems import run_job
from tests.helpers.sampling import slow_but


@pytest.mark.parametrize("name", slow_but(("gpt2", "llama"), daily=("gpt2",)))
def test_loss_in_chunks_is_described_as_by_own_traces(name, monkeypatch):
    """GPT-2's head is tied to its embedding; Llama hands positions to its blocks."""
    runs, stock = [], Tracer.run
    monkeypatch.setattr(Tracer, "run", lambda *args, **options: (runs.append(args), stock(*args, **options))[1])
    model = tiny_model(name, layers=1 if name == "gpt2" else 3, dtype=torch.float32)
    config = OSDPConfig(sequence_length=12, global_batch_size=8)
    describer = Describer(model, run_job(config, world_size=2, reads_loss_alone=True))
    splits = [split for split in possible_splits(model, describer.describe()) if split.loss_chunks > 1]
    for split in (splits[0], splits[-1]):  # alone, and with operator units
        describer.describe(ModelSplit(operators=split.operators))
        runs.clear()
        shared = describer.describe(split)
        assert len(runs) == 1
        assert shared == describe(model, sequence_length=12, split=split) and shared.recomputable
    assert not splits[0].operators and splits[-1].operators
