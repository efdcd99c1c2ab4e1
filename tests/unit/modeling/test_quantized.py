"""Bases in 4 bits: sizes of packed weights, equal products, what a description counts, and what is refused."""

from functools import partial

import pytest
import torch
from torch import nn

from hf_osdp.errors import OSDPError
from hf_osdp.modeling.build import build_on_meta, with_lora
from hf_osdp.modeling.quantized import Packing, layers_in_4_bits, pack, quantize
from hf_osdp.planner.description import DType
from hf_osdp.tracing.describe import describe
from tests.helpers.models import SEQUENCE_LENGTH, tiny_batch, tiny_loss, tiny_model, with_own_norms
from tests.helpers.quantized import adapted, in_4_bits

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed; pip install 'hf_osdp[bnb]'")
pytest.importorskip("peft", reason="the extra peft is not installed")


def base(**options: object) -> nn.Module:
    return in_4_bits(tiny_model("llama", dtype=torch.float32, scale=5.0, layers=2), **options)


@pytest.mark.parametrize("nested", [True, False])
def test_bytes_of_a_weight_are_those_of_bitsandbytes(nested):
    options = {"quant_type": "nf4", "compress_statistics": nested}
    planned = Packing.of(bnb.nn.Linear4bit(200, 300, device="meta", **options))
    layer = bnb.nn.Linear4bit(200, 300, **options).to("cpu")
    state = layer.weight.quant_state
    held = [layer.weight, state.absmax, *((state.state2.absmax, state.offset, state.state2.code) if nested else ())]
    assert Packing.of(layer).sizes == planned.sizes == tuple(tensor.nbytes for tensor in held)
    codes, again = planned.state(planned.pack(layer.weight, state))
    restored = bnb.functional.dequantize_4bit(codes.view(-1, 1), again)
    assert torch.equal(restored, bnb.functional.dequantize_4bit(layer.weight, state))


FP4 = {"quant_type": "fp4", "compress_statistics": False}


@pytest.mark.parametrize("options", [{}, {"quant_storage": torch.float32}, FP4, {"compute_dtype": None}])
def test_packed_model_computes_the_same_to_the_bit(options):
    model, batch = adapted(base(**options)), tiny_batch(0)
    tiny_loss(model, batch).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    tiny_loss(pack(model), batch).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_description_is_equal_before_after_packing_and_on_meta():
    model = adapted(base())
    options = {"sequence_length": SEQUENCE_LENGTH, "partial_recomputation": False}
    before = describe(model, **options)
    assert all(layer.weight.quant_state is not None for layer in layers_in_4_bits(model)), "it is not changed"
    on_meta = with_own_norms(build_on_meta(model.config))
    quantize(on_meta, "nf4")
    planned = describe(with_lora(on_meta, 3), **options)
    packed = describe(pack(model), **options)
    assert before == packed and planned.segments == packed.segments
    assert planned.fingerprint == packed.fingerprint and packed.compute_dtype is DType.FLOAT32


IN_8_BITS = partial(bnb.nn.Linear8bitLt, has_fp16_weights=False)


def in_float8() -> nn.Module:
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed; pip install 'hf_osdp[low-bit]'")
    emulated = float8.Float8LinearConfig(emulate=True)
    return float8.convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), config=emulated)


def of_another_library() -> nn.Module:
    model = tiny_model("llama")
    model.is_quantized, model.quantization_method = True, "gptq"
    return model


@pytest.mark.parametrize(("make", "message"), [
    (lambda: nn.Sequential(IN_8_BITS(4, 4)), r"bitsandbytes in 8 bits, which cannot be planned; load it in 4 bits"),
    (lambda: nn.Sequential(bnb.nn.Embedding4bit(4, 4)), r"4 bits outside of linear layers"),
    (in_float8, r"float8 \(torchao's convert_to_float8_training\), .* leave the conversion out and train in bf16"),
    (of_another_library, r"quantized by gptq, which cannot be planned"),
    (base, r"adapters of peft, .* get_peft_model"),
    (lambda: adapted(base(), use_dora=True), r"DoRA .* use_dora=False trains LoRA"),
])  # fmt: skip
def test_what_cannot_be_planned_is_refused_in_one_line(make, message):
    with pytest.raises(OSDPError, match=message):
        pack(make())
