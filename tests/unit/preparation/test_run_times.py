"""A run times the blocks of its model: within the limit, kept on disk, and without a trace in the training."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import GPT2Config, GPT2LMHeadModel

from hf_osdp.errors import ProfileError
from hf_osdp.measurement.block_times import TimedModel, measure_block_times
from hf_osdp.planner.presets import preset
from hf_osdp.planner.profile import BlockTimes
from hf_osdp.planner.split import ModelSplit
from hf_osdp.planner.training_job import Precision
from hf_osdp.preparation import cache, run_times
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.plan_run import PlannedRun, plan_run
from hf_osdp.preparation.run_times import _sizes
from hf_osdp.tracing.describe import describe
from tests.helpers.problems import run_job

CPU = torch.device("cpu")


def config(layers: int) -> GPT2Config:
    return GPT2Config(n_layer=layers, n_head=2, n_embd=16, vocab_size=61, n_positions=16)


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(config(5))


@pytest.fixture
def timings(monkeypatch, tmp_path) -> list[TimedModel]:
    """The models that were timed; the machine, which is not measured, is idle."""
    monkeypatch.setenv("OSDP_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "seconds_without_core", lambda: 0.0)
    monkeypatch.setattr(cache, "measure_hardware", lambda **_: preset("cpu", devices_per_node=1))
    taken: list[TimedModel] = []

    def measure(timed: TimedModel, **options: object):
        taken.append(timed)
        return measure_block_times(timed, **{**options, "seconds": 0.01})

    monkeypatch.setattr(cache, "measure_block_times", measure)
    return taken


def planned(model: nn.Module, *, known: Mapping[str, object] = {}, **options: object) -> PlannedRun:
    defaults = {"compare": False, "sequence_length": 16, "global_batch_size": 8}
    return plan_run(model, run_job(OSDPConfig(**{**defaults, **options}), **known))


def test_run_measures_times_and_the_second_start_reads_them(model, timings):
    first = planned(model).inputs.description
    assert timings[0].micro_batch_sizes == (1, 4, 8)
    phases = [phase for segment in first.segments for phase in (segment.forward, segment.backward)]
    assert all(phase.seconds is not None and phase.seconds(4) > 0 for phase in phases)
    assert first.timing == "measured (1, 4 and 8 samples at once)"
    again = planned(model).inputs.description
    assert len(timings) == 1 and again.segments == first.segments
    assert again.timing == "measured 0 min ago (1, 4 and 8 samples at once)"
    planned(model, sequence_length=12)
    assert len(timings) == 2, "another length has other times"


@pytest.mark.parametrize("option", [{"time_blocks": False}, {"hardware": preset("cpu", devices_per_node=1)}])
def test_blocks_are_estimated_without_option_or_with_given_hardware(model, timings, option):
    description = planned(model, **option).inputs.description
    assert not timings and description.timing == "estimated"
    assert all(segment.forward.seconds is None for segment in description.segments)


def test_compiled_blocks_are_timed_eager_and_failing_ones_estimated(model, timings):
    with torch.compiler.set_stance("force_eager"):  # no code is generated for their description
        planned(model, compile=True)
    assert [timed.compile for timed in timings] == [False]
    model = Failing(config(2))
    timing = planned(model).inputs.description.timing
    assert timing == "estimated. A copy of the model does not run: RuntimeError: no such kernel."


def test_blocks_are_estimated_where_few_exceed_the_limit(model, timings, monkeypatch):
    description = describe(model, sequence_length=16)
    with pytest.raises(ProfileError, match=r"3 blocks need .* of 90\.0 KiB with one sample"):
        _sizes(description, preset("cpu"), 8, 90 * 2**10)
    smaller = _sizes(description, preset("cpu"), 8, 400 * 2**10)
    assert smaller[0] == 1 and smaller[-1] < 8
    monkeypatch.setattr(run_times, "_free_bytes", lambda device: 90 * 2**10)  # of a GPU that others use
    assert planned(model).inputs.description.timing.startswith("estimated. 3 blocks need")
    assert not timings


def test_a_split_model_has_times_in_proportion(model):
    timed = TimedModel(model_or_config=model, sequence_length=16, micro_batch_sizes=(1, 8))
    whole, split = (describe(model, sequence_length=16, split=ModelSplit(operators=parts)) for parts in (False, True))
    segments = measure_block_times(timed, device=CPU, seconds=0.01, description=whole)
    times = BlockTimes.of(segments, whole, preset("cpu"), "measured")
    assert len(split.segments) > len(whole.segments)
    timed = [times.on(description).segments for description in (whole, split)]
    plain_s, split_s = (sum(one.forward.seconds(8) + one.backward.seconds(8) for one in of) for of in timed)
    assert split_s == pytest.approx(plain_s, rel=0.2)


class WithState(GPT2LMHeadModel):
    """Has running statistics, draws random numbers of all kinds, and has a forward replaced on the instance."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.norm = nn.BatchNorm1d(config.n_embd)
        inner = self.lm_head.forward
        self.lm_head.forward = lambda hidden: inner(self.norm(hidden.transpose(1, 2)).transpose(1, 2))  # its closure

    def forward(self, *args, **kwargs):
        random.random(), np.random.rand(), torch.rand(1)
        return super().forward(*args, **kwargs)


def test_timing_changes_neither_generators_nor_gradients_nor_buffers():
    model = WithState(config(4))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    timed = TimedModel(model_or_config=model, sequence_length=16, micro_batch_sizes=(1, 2))
    assert measure_block_times(timed, device=CPU, seconds=0.01)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


class Failing(GPT2LMHeadModel):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if not isinstance(self.lm_head.weight, FakeTensor):
            raise RuntimeError("no such kernel")
        return output


def test_autocast_and_the_loops_own_loss_are_timed(model, timings):
    precision = Precision.named("bf16", autocast=True)
    seen = []

    def loss(copied: nn.Module, batch):
        seen.append({parameter.dtype for parameter in copied.parameters()})
        return copied(**batch).loss * 2

    def inputs(samples: int):
        return {name: torch.ones(samples, 16, dtype=torch.long) for name in ("input_ids", "labels")}

    run = planned(model, known={"precision": precision, "inputs": inputs, "loss": loss})
    assert run.inputs.description.timing.startswith("measured")
    assert seen[-1] == {torch.float32}
