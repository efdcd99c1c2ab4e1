"""Which operators of a block are worth saving: corners of the frontier, and what the trace of a model finds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, LlamaConfig

from hf_osdp.planner.description import Recomputation
from hf_osdp.tracing.describe import describe
from hf_osdp.tracing.recomputation import LoggedCall, corner_indices, recomputations

TOKENS = 256
GPT2 = GPT2Config(n_embd=768, n_layer=2, n_head=12, n_positions=TOKENS, vocab_size=100)
LLAMA = LlamaConfig(
    hidden_size=768, intermediate_size=2048, num_hidden_layers=2, vocab_size=100, num_attention_heads=12,
    num_key_value_heads=4,
)  # fmt: skip


def call(name: str, *, flops: int = 0, traffic: int = 0, saved: int = 0, module: str = "") -> LoggedCall:
    return LoggedCall(call=name, module=module, flops=flops, traffic_bytes=traffic, saved_bytes=saved)


def test_ways_save_what_takes_most_time_for_its_bytes_first():
    calls = [
        call("addmm#0", flops=20_000, saved=100, module="attn.qkv"), call("mul#0", traffic=300, saved=100),
        call("view#0"), call("attention#0", flops=40_000, saved=100, module="attn"), call("relu_#0", traffic=200),
    ]  # fmt: skip
    ways = recomputations(calls, 1000, "cpu")  # a byte moves in the time of 20 FLOPs
    assert [
        way.saved_calls for way in ways
    ] == [(), ("attention#0",), ("addmm#0", "attention#0"), ("addmm#0", "mul#0", "attention#0")]  # fmt: skip
    assert [way.share for way in ways] == pytest.approx([1, 0.429, 0.143, 0.057], abs=1e-3)
    assert ways[2].names == ("qkv", "attention")
    beyond = [call("addmm#0", flops=20_000, saved=100), call("mul#0", traffic=100, saved=900)]
    assert [way.saved_calls for way in recomputations(beyond, 500, "cpu")] == [(), ("addmm#0",)], "more than its share"
    names = enumerate(("attn.c_proj", "mlp.c_proj", "mlp.c_fc"))
    *_, most = recomputations([call(f"addmm#{i}", flops=10**6, saved=10, module=m) for i, m in names], 1000, "cpu")
    assert most.names == ("attn.c_proj", "mlp.c_proj", "c_fc"), "as much of a module as tells it apart"


points = st.lists(st.tuples(st.integers(0, 1000).map(float), st.integers(0, 1000).map(float)), min_size=1, max_size=12)


@given(points, st.integers(1, 6))
def test_corners_are_few_and_lie_below_their_neighbours_line(some, most):
    rising = [(0.0, 2000.0), *((x + 1, y) for x, y in sorted({x: y for x, y in some}.items())), (2000.0, 0.0)]
    found = [rising[index] for index in corner_indices(rising, most=most, least_gain=0.0)]
    assert found[0] == (0.0, 2000.0) and found[-1] == (2000.0, 0.0) and len(found) <= most + 1
    for (x0, y0), (x, y), (x1, y1) in zip(found, found[1:], found[2:], strict=False):
        assert x0 < x < x1
        assert y < y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@pytest.mark.parametrize(("config", "device_type"), [(GPT2, "cuda"), (LLAMA, "cpu")], ids=["gpt2", "llama"])
def test_each_way_beats_a_mix_of_its_neighbours(config, device_type):
    description = describe(config, sequence_length=TOKENS, device_type=device_type)
    blocks = [segment for segment in description.segments if segment.recomputed]
    assert len(blocks) == 2 and len({description.recomputations[s.unit] for s in blocks}) == 1
    for segment in blocks:
        first, *others = (way.recomputation for way in segment.recomputed)
        assert first == Recomputation() and all(way.saved_calls and way.share < 1 for way in others)
        costs = [(way.costs.saved_bytes(2), way.costs.backward) for way in segment.recomputed]
        costs.append((segment.saved_bytes(2), segment.backward))
        rate = {"cpu": 20, "cuda": 150}[device_type]
        work = [(saved, phase.flops(2) / rate + phase.traffic_bytes(2)) for saved, phase in costs]
        for (x0, y0), (x, y), (x1, y1) in zip(work, work[1:], work[2:], strict=False):
            assert x0 < x < x1 and y < y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        assert all(way.costs.forward.flops == segment.forward.flops for way in segment.recomputed)
