"""Memory that CUDA's kernels take while they run, against what torch's allocator counted (torch 2.11's CUDA build)."""

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

from hf_osdp.planner.affine import Affine, Envelope, ScratchMoment
from hf_osdp.tracing.describe import describe
from hf_osdp.tracing.kernel_scratch import Processors, kernel_scratch
from tests.helpers.host_tracker import scratch_bytes

aten = torch.ops.aten
MIB = 2**20
A100, H100 = Processors(108, 2048), Processors(132, 2048)


def row_sum(rows: int, outputs: int, processors: Processors, dtype: torch.dtype = torch.bfloat16) -> int:
    tensor = torch.empty(rows, outputs, dtype=dtype, device="meta")
    scratch = kernel_scratch(aten.sum.dim_IntList, (tensor, [0], True), processors)
    return 0 if scratch is None else scratch_bytes(scratch)


@pytest.mark.parametrize(("rows", "outputs", "dtype", "processors", "counted"), [
    (6304, 768, "bfloat16", H100, 38_928_408), (6304, 3072, "bfloat16", A100, 108 * MIB),
    (6304, 3072, "bfloat16", H100, 132 * MIB), (2048, 4096, "float32", H100, 64 * MIB),
    (16384, 16384, "bfloat16", A100, 128 * MIB), (16384, 16384, "bfloat16", H100, 136 * MIB),
    (8192, 1001, "bfloat16", H100, 2_178_304), (8192, 768, "float64", H100, 96 * MIB),
    (8192, 50, "float32", H100, 204_808), (1021, 768, "bfloat16", H100, 6 * MIB), (1020, 768, "bfloat16", H100, 0),
    (512, 3072, "float32", H100, 0),
])  # fmt: skip
def test_row_sum_takes_the_buffer_that_the_allocator_counted(rows, outputs, dtype, processors, counted):
    found = row_sum(rows, outputs, processors, getattr(torch, dtype))
    assert 0.999 * counted <= found <= 1.07 * counted  # blocks are counted in whole numbers


@pytest.mark.parametrize(
    ("tokens", "rows", "counted"),
    [(3072, 50257, 0), (4096, 50257, 14_039_256), (65536, 50257, 177_351_792), (16384, 1000, 8_534_272)],
)
def test_embedding_gradient_takes_the_sums_that_the_allocator_counted(tokens, rows, counted):
    gradient = torch.empty(1, tokens, 768, dtype=torch.bfloat16, device="meta")
    indices = torch.empty(1, tokens, dtype=torch.long, device="meta")
    scratch = kernel_scratch(aten.embedding_dense_backward.default, (gradient, indices, rows, -1, False), H100)
    assert scratch_bytes(scratch) == pytest.approx(counted, rel=1e-3)


def test_scratch_moment_adds_kernel_bytes_from_least_batch_on():
    live, growing = Affine(constant=10, per_sample=1), Affine(per_sample=20)
    moment = ScratchMoment(live=live, least=3, growing=growing, most=(Affine(constant=100),))
    peak = Envelope(pieces=(Affine(constant=50),), scratch=(moment,))
    assert [peak.bytes(samples) for samples in (2, 3, 4, 5, 6)] == [50, 73, 94, 115, 116]
    assert peak.plus(Affine(constant=5)).bytes(4) == 99 and peak.scaled(2, constants=True).bytes(4) == 188


def test_description_for_cuda_counts_buffers_of_larger_batches():
    """A ViT's bias gradients take none at the traced batches of 2 and 3 images; at 32 the buffer is the peak."""
    model = ViTForImageClassification(ViTConfig(num_hidden_layers=2))
    options = {"sequence_length": 1, "recomputation": False}
    cuda, cpu = (
        [segment.backward.peak_bytes for segment in describe(model, device_type=kind, **extra, **options).segments]
        for kind, extra in (("cuda", {"capability": (9, 0)}), ("cpu", {}))
    )
    assert max(len(peak.scratch) for peak in cuda) >= 2 and not any(peak.scratch for peak in cpu)
    grown = [peak.bytes(32) - max(piece.bytes(32) for piece in peak.pieces) for peak in cuda]
    assert max(grown) > 32 * MIB and all(peak.bytes(2) == max(p.bytes(2) for p in peak.pieces) for peak in cuda)
