"""Kernels and autocast of CUDA, for traces without a GPU: which one torch takes, what is saved and computed."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_osdp.planner.description import DType
from hf_osdp.tracing import attention
from hf_osdp.tracing.attention import AttentionCall, Kernel, attention_kernel
from hf_osdp.tracing.cuda_kernels import CudaKernels
from hf_osdp.tracing.describe import describe

V100, A100, RTX_3090, H100 = (7, 0), (8, 0), (8, 6), (9, 0)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
GROUPED = {"groups": 2, "enable_gqa": True}


def call(dtype=BF16, *, groups=8, size=64, length=128, values=None, **facts) -> AttentionCall:
    query, key, value = (2, 8, length, size), (2, groups, 128, size), (2, groups, 128, values or size)
    return AttentionCall(dtype=dtype, query=query, key=key, value=value, **facts)


RULES = [
    # half precision: cuDNN first on Hopper, flash on Ampere, neither before
    (call(), H100, Kernel.CUDNN), (call(), A100, Kernel.FLASH), (call(FP16), V100, Kernel.EFFICIENT),
    (call(), V100, Kernel.MATH), (call(is_causal=True, **GROUPED), H100, Kernel.CUDNN),
    (call(is_causal=True, **GROUPED), A100, Kernel.FLASH),
    # float32 and float64
    (call(FP32), H100, Kernel.EFFICIENT), (call(FP32, **GROUPED), H100, Kernel.MATH),
    (call(FP32, enable_gqa=True), H100, Kernel.EFFICIENT), (call(torch.float64), H100, Kernel.MATH),
    # masks
    (call(has_mask=True), H100, Kernel.CUDNN), (call(has_mask=True), A100, Kernel.EFFICIENT),
    (call(has_mask=True, **GROUPED), A100, Kernel.MATH), (call(is_causal=True, length=64), A100, Kernel.EFFICIENT),
    # dropout: cuDNN takes sixteenths alone
    (call(dropout=0.1), H100, Kernel.FLASH), (call(dropout=0.125), H100, Kernel.CUDNN),
    (call(dropout=0.1, has_mask=True), H100, Kernel.EFFICIENT),
    # head sizes
    (call(size=256), H100, Kernel.FLASH), (call(size=256), RTX_3090, Kernel.FLASH),
    (call(size=256, dropout=0.1), RTX_3090, Kernel.EFFICIENT),
    (call(size=256, dropout=0.1, requires_grad=False), RTX_3090, Kernel.FLASH),
    (call(size=224), RTX_3090, Kernel.EFFICIENT), (call(size=288), A100, Kernel.EFFICIENT),
    (call(size=288, **GROUPED), A100, Kernel.MATH), (call(size=60), A100, Kernel.FLASH),
    (call(size=60, has_mask=True), A100, Kernel.MATH), (call(size=192, values=128), A100, Kernel.EFFICIENT),
    (call(FP32, size=18), A100, Kernel.MATH), (call(FP32, size=18), V100, Kernel.EFFICIENT),
    # layouts
    (call(inner_strides_are_one=False), A100, Kernel.MATH),
    (AttentionCall(dtype=BF16, query=(8, 128, 64), key=(8, 128, 64), value=(8, 128, 64)), A100, Kernel.MATH),
]  # fmt: skip


def test_attention_kernel_follows_torchs_checks(monkeypatch):
    monkeypatch.setattr(attention, "_DROPOUT_IN_SIXTEENTHS", True)
    found = [attention_kernel(given, capability) for given, capability, _ in RULES]
    assert found == [expected for *_, expected in RULES]
    monkeypatch.setattr(attention, "_DROPOUT_IN_SIXTEENTHS", False)  # as in torch 2.11, seen on an H100
    assert attention_kernel(call(dropout=0.1, has_mask=True, **GROUPED), H100) is Kernel.CUDNN


def saved_bytes(run) -> int:
    """Storages that autograd keeps."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        output = run()  # noqa: F841  kept until the sum is made
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}.values())


@pytest.mark.parametrize("mask", [None, "causal", torch.bool, "additive"])
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("dtype", [torch.float64, BF16])
def test_math_kernel_saves_what_torchs_own_does(dtype, groups, mask):
    heads = (8, groups, groups)
    query, key, value = (torch.randn(2, count, 32, 8, dtype=dtype, requires_grad=True) for count in heads)
    options = {"is_causal": mask == "causal", "enable_gqa": groups != 8}
    if mask not in (None, "causal"):
        options["attn_mask"] = torch.ones(2, 1, 32, 32, dtype=dtype if mask == "additive" else mask)
    with sdpa_kernel(SDPBackend.MATH):
        real = saved_bytes(lambda: F.scaled_dot_product_attention(query, key, value, **options))
    with CudaKernels(V100) as kernels:
        allocated = saved_bytes(lambda: F.scaled_dot_product_attention(query, key, value, **options))
    assert list(kernels.found) == [Kernel.MATH]
    assert allocated == real > 2 * 8 * 32 * 32 * 4


@pytest.mark.parametrize(
    ("capability", "masked", "rows", "bias"),
    [(A100, False, 40, 0), (A100, True, 64, 48), (H100, True, 40, 40)],
    ids=["flash", "memory-efficient pads", "cuDNN"],
)
def test_fused_kernels_save_row_sums_and_bias_as_laid_out(capability, masked, rows, bias):
    query, key, value = (torch.randn(2, 4, 40, 16, dtype=BF16, requires_grad=True) for _ in range(3))
    mask = torch.ones(2, 1, 40, 40, dtype=torch.bool) if masked else None
    with CudaKernels(capability):
        found = saved_bytes(lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=mask))
    assert found == 4 * 2 * 4 * 40 * 16 * 2 + 2 * 4 * rows * 4 + 2 * 40 * bias * 2


def test_grouped_heads_in_float32_save_every_score_and_say_so(configuration, caplog):
    llama, options = configuration("LlamaForCausalLM"), {"device_type": "cuda", "recomputation": False}
    with caplog.at_level(logging.WARNING):
        trace = describe(llama, sequence_length=32, **options).trace
    assert trace.startswith("fake tensors, device cuda") and "(compute capability 8.6 assumed)" in trace
    assert "attention sdpa by math kernel" in trace and "which saves every score" in trace
    assert "saves 2 x 32 x 32 scores" in caplog.text and "train in bf16 or fp16" in caplog.text
    caplog.clear()
    describe(llama, sequence_length=32, compute_dtype=DType.BFLOAT16, **options)
    assert not caplog.records


def test_operators_in_float32_are_those_of_cudas_autocast():
    value, weight = torch.randn(2, 4, 8, dtype=BF16), torch.randn(8, 8)
    with CudaKernels():
        assert F.layer_norm(value, (8,)).dtype is BF16
        with torch.autocast("cpu", dtype=BF16):
            wide = (torch.exp(value), value**2, value.softmax(-1), F.layer_norm(value, (8,)))
            assert {result.dtype for result in wide} == {FP32}
            heads = torch.randn(2, 4, 16, 8)
            attended = F.scaled_dot_product_attention(heads, heads, heads)
            narrow = (F.linear(value.float(), weight), value.relu(), value * 2, attended)
            assert {result.dtype for result in narrow} == {BF16}
