"""Times of segments: which section a moment belongs to, the shortened model, and what fits whose description."""

import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import BertConfig, GPT2Config, LlamaConfig, T5Config

from hf_osdp.measurement.block_times import Stopwatch, TimedModel, measure_block_times
from hf_osdp.measurement.machine import measure_profile
from hf_osdp.measurement.model_copies import materialised, shortened
from hf_osdp.modeling.build import build_on_meta
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.presets import preset
from hf_osdp.planner.profile import Profile, with_block_times
from hf_osdp.tracing.describe import describe
from hf_osdp.tracing.memory_tracker import MemoryTracker
from tests.helpers.distributed import run_ranks
from tests.helpers.sampling import slow_but

CPU = torch.device("cpu")
SIZES = {"num_hidden_layers": 5, "hidden_size": 20, "intermediate_size": 36, "vocab_size": 61}
CONFIGS = {
    "gpt2": GPT2Config(n_layer=5, n_embd=20, n_head=4, vocab_size=61, n_positions=16, bos_token_id=0, eos_token_id=0),
    "bert": BertConfig(**SIZES, num_attention_heads=4),
    "llama": LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False),
    "t5": T5Config(num_layers=4, d_model=16, d_ff=32, num_heads=2, d_kv=8, vocab_size=61),
}


def timed(name: str, **options) -> TimedModel:
    return TimedModel(model_or_config=CONFIGS[name], **{"sequence_length": 12, "micro_batch_sizes": (1, 2), **options})


def measured(name: str, **options) -> Profile:
    segments = measure_block_times(timed(name, **options), device=CPU, seconds=0.1)
    return Profile(hardware=preset("cpu"), segments=segments)


@pytest.mark.parametrize("name", slow_but(CONFIGS, daily=("llama",)))
def test_block_times_hold_every_segment_of_the_whole_model(name):
    state = torch.get_rng_state()
    profile = measured(name)
    assert torch.equal(torch.get_rng_state(), state)
    description = with_block_times(describe(CONFIGS[name], sequence_length=12), profile)
    blocks = [s for s in description.segments if description.units[s.unit].class_name in description.block_classes]
    assert len(blocks) == {"t5": 8}.get(name, 5)
    assert all(s.forward.seconds(2) > 0 and s.backward.seconds(2) > 0 for s in blocks)
    assert profile.micro_batch_sizes == (1, 2)


def test_materialised_keeps_ties_and_has_real_buffers_and_weights():
    whole = build_on_meta(CONFIGS["bert"])
    model = materialised(shortened(whole, find_units(whole)), CPU, torch.bfloat16)
    embeddings = model.bert.embeddings
    assert len(model.bert.encoder.layer) == 1
    assert embeddings.word_embeddings.weight is model.cls.predictions.decoder.weight
    assert embeddings.word_embeddings.weight.dtype is torch.bfloat16
    assert torch.equal(embeddings.position_ids[0], torch.arange(CONFIGS["bert"].max_position_embeddings))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert embeddings.word_embeddings.weight.std() > 0


class Slow(nn.Module):
    """Sleeps in forward and in backward."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_s)
        inner = (value * self.weight).clone()
        inner.register_hook(lambda _: time.sleep(self.backward_s))
        return inner + 0.0


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(3))
        self.layers = nn.ModuleList([Slow(0.01, 0.02), Slow(0.03, 0.04)])

    def forward(self) -> torch.Tensor:
        value = self.start * 2
        for layer in self.layers:
            value = layer(value)
        time.sleep(0.05)
        return value.sum()


def test_stopwatch_gives_each_section_its_own_time():
    model = Row()
    watch = Stopwatch(model, find_units(model, ["Slow"]), CPU, None)
    with watch.attached():
        sections, seconds, _ = watch.measure(model)
    assert sections == [0, 1, 0, 2, 0]
    least = [(0, 0), (0.01, 0.02), (0, 0), (0.03, 0.04), (0.05, 0)]
    for (forward, backward), (least_forward, least_backward) in zip(seconds, least, strict=True):
        assert forward >= least_forward and backward >= least_backward
    # of each phase's sleep nothing is in another section: those that do not sleep stay below the shortest sleep
    assert max(seconds[0][0], seconds[2][0], seconds[0][1], seconds[2][1], seconds[4][1]) < 0.01
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "forward" not in model.layers[0].__dict__


def _profile_here():
    return measure_profile(device_type="cpu", seconds=0.5, model=timed("gpt2")).to_json()


@pytest.mark.slow
def test_measure_profile_is_equal_on_all_ranks():
    texts = run_ranks(_profile_here, 2)
    assert texts[0] == texts[1]
    profile = Profile.from_json(texts[0])
    overhead = profile.hardware.fsdp_overhead
    for work in (overhead.gather, overhead.reduce, *overhead.updates.values()):
        assert work(4, 2**20) > 0
    assert len(profile.device_names) == 2
    with_block_times(describe(CONFIGS["gpt2"], sequence_length=12), profile)


def test_what_segments_save_is_measured_as_traced(monkeypatch):
    with MemoryTracker(block_bytes=1) as memory:  # as the trace counts on the CPU
        monkeypatch.setattr(Stopwatch, "_allocated_bytes", lambda self: memory.current_bytes)
        segments = measure_block_times(timed("gpt2"), device=CPU, seconds=0.1)
    description = describe(CONFIGS["gpt2"], sequence_length=12)
    block = next(segment for segment in description.segments if segment.recomputed)
    (found,) = (times for times in segments if times.fits(description, block))
    # the line is that of 2 and 3 samples, raised to 1: there attention keeps views of one tensor of q, k and v
    saved, traced = [point.saved_bytes for point in found.points], block.saved_bytes
    assert saved == [traced.bytes(1), 2 * traced.per_sample]
    assert found.saved_bytes is None, "it did not run compiled"
    line = replace(found, compiled=True).saved_bytes
    assert [line.bytes(n) for n in (1, 2)] == saved
