"""What the trace attributes to each segment, also where it does not run what it has run before."""

import random
from itertools import product

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from hf_osdp.modeling.batch import training_batch
from hf_osdp.modeling.build import build_on_meta
from hf_osdp.modeling.split.apply import apply_split
from hf_osdp.modeling.units import find_units
from hf_osdp.planner.description import GatherSpan
from hf_osdp.planner.placement import Activations
from hf_osdp.planner.split import ModelSplit
from hf_osdp.tracing.memory_tracker import MemoryTracker
from hf_osdp.tracing.options import DescribeOptions
from hf_osdp.tracing.recorder import Recorder
from hf_osdp.tracing.trace import trace_segments
from hf_osdp.tracing.work import PhaseRecord
from tests.helpers.architectures import tiny_config
from tests.helpers.sampling import slow_but

aten = torch.ops.aten
TOKENS = 24
CHANGES = {
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 4}, "BertForMaskedLM": {"max_position_embeddings": TOKENS},
    "LlamaForCausalLM": {}, "T5ForConditionalGeneration": {}, "ViTForImageClassification": {},
    "BartForConditionalGeneration": {"max_position_embeddings": TOKENS},
}  # fmt: skip


def real_model(name: str, **changes) -> nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, name)(tiny_config(name, **CHANGES.get(name, {}), **changes))


def meta_model(name: str) -> nn.Module:
    return build_on_meta(tiny_config(name, **CHANGES[name]), name)


def traced(model: nn.Module, *, blocks=(), **run):
    """Units, and segments of a trace with each basic policy of these blocks."""
    units, run = find_units(model), DescribeOptions(sequence_length=TOKENS, **run)
    options = {"blocks": blocks, "choices": Activations.BASIC[1:] if blocks else ()}
    return units, trace_segments(model, units, training_batch(model, TOKENS), run, **options).segments


@pytest.mark.parametrize(
    ("name", "device_type"),
    slow_but([*((name, "cpu") for name in CHANGES), ("GPT2LMHeadModel", "cuda")],
        daily=[("GPT2LMHeadModel", "cuda"), ("T5ForConditionalGeneration", "cpu")]),
)  # fmt: skip
def test_reuse_of_equal_blocks_changes_nothing(monkeypatch, name, device_type):
    model = meta_model(name)
    _, quick = traced(model, device_type=device_type)
    monkeypatch.setattr("hf_osdp.tracing.tracer.block_key", id)  # no two blocks are equal
    _, whole = traced(model, device_type=device_type)
    assert [s.unit for s in quick] == [s.unit for s in whole]
    for one, other in zip(quick, whole, strict=True):
        assert one.forward.matmul_flops == other.forward.matmul_flops
        assert one.backward.matmul_flops == other.backward.matmul_flops
        for samples in (1, 4):
            # a decoder's last block makes the buffer in which the gradient of the encoder's output adds up
            slack = 2 * 32 * TOKENS * 4 * samples if name.endswith("ForConditionalGeneration") else 16
            assert abs(one.saved_bytes(samples) - other.saved_bytes(samples)) <= slack
            assert abs(one.backward.peak_bytes.bytes(samples) - other.backward.peak_bytes.bytes(samples)) <= slack


@pytest.mark.parametrize(
    ("name", "device_type"),
    slow_but(product(CHANGES, ("cpu", "cuda")), daily=[("GPT2LMHeadModel", "cuda")]),
)
def test_repeated_operators_change_nothing(monkeypatch, name, device_type):
    model = meta_model(name)
    units = enumerate(find_units(model))
    blocks = [i for i, unit in units if unit.span is GatherSpan.USE and "Embedding" not in unit.class_name]
    repeated, again = Recorder._repeated, []

    def noted(*args):
        result = repeated(*args)
        again.append(result is not None)  # and not the result, which is to be freed
        return result

    monkeypatch.setattr(Recorder, "_repeated", noted)
    quick = traced(model, device_type=device_type, blocks=blocks)
    monkeypatch.setattr(Recorder, "_repeated", lambda *_: None)
    assert traced(model, device_type=device_type, blocks=blocks) == quick
    assert any(again)


def test_matmul_flops_are_those_of_torchs_counter():
    model = real_model("GPT2LMHeadModel", attn_implementation="eager").train()
    _, segments = traced(model)
    with FlopCounterMode(display=False) as counter:
        model(**training_batch(model, TOKENS)(2)).loss.backward()
    found = sum(s.forward.matmul_flops(2) + s.backward.matmul_flops(2) for s in segments)
    assert found == pytest.approx(counter.get_total_flops())


def test_loss_in_chunks_has_the_flops_of_the_whole_loss():
    model = real_model("GPT2LMHeadModel").train()
    flops = []
    for chunks in (1, 8):
        apply_split(model, ModelSplit(loss_chunks=chunks))
        flops.append(sum(s.forward.matmul_flops(2) + s.backward.matmul_flops(2) for s in traced(model)[1]))
    assert flops[0] == pytest.approx(flops[1])


def test_operators_that_run_kernels_count_more_than_views():
    record, matrix = PhaseRecord(), torch.ones(4, 4)
    for func, args in ((aten.mm, (matrix, matrix)), (aten.t, (matrix,)), (aten.empty_like, (matrix,))):
        record.count(func.default, args, {}, matrix)
    assert record.operators == 1.75 + 2 * 0.75


def test_trace_leaves_model_and_random_states_as_they_are():
    model = real_model("BertForSequenceClassification").eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    traced(model)
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert all("forward" not in vars(module) and not module._forward_hooks for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert model.config.problem_type is None


def test_experts_compute_under_the_tracker_what_they_compute_without():
    """In float32, where torch's shape function for grouped products is replaced, on fake tensors alone."""
    a, weights, ends = torch.randn(6, 8), torch.randn(2, 8, 4), torch.tensor([2, 6], dtype=torch.int32)
    with MemoryTracker() as live:
        product = nn.functional.grouped_mm(a, weights, offs=ends)
    torch.testing.assert_close(product, torch.cat([a[:2] @ weights[0], a[2:] @ weights[1]]))
    assert live.peak_bytes
    with FakeTensorMode() as fake, MemoryTracker():
        a, weights, ends = map(fake.from_tensor, (a, weights, ends))
        assert nn.functional.grouped_mm(a, weights, offs=ends).shape == product.shape
