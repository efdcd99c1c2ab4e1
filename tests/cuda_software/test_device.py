"""The device itself: its memory, its values, and what guards its libraries."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .training import on_devices

MIB = 1 << 20
FIXED, EXPANDABLE = {"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def filled():
    """Blocks until the device is full: how many of 40 MiB, what the error says, what is left once they are gone."""
    blocks = []
    with pytest.raises(torch.OutOfMemoryError) as error:
        while True:
            blocks.append(torch.empty(40 * MIB, dtype=torch.uint8, device="cuda"))
    reserved = torch.cuda.memory_reserved()
    found = len(blocks), str(error.value)
    blocks.clear()
    torch.cuda.empty_cache()
    return *found, reserved, torch.cuda.memory_reserved(), torch.cuda.mem_get_info()


@pytest.mark.parametrize("segments", [FIXED, EXPANDABLE], ids=["fixed", "expandable"])
def test_device_is_full_at_its_limit_and_empty_again(segments):
    [(blocks, message, reserved, after, (free, total))] = on_devices(filled, 1, memory="400M", env=segments)
    assert blocks == 10 and "total capacity of 400.00 MiB" in message
    assert reserved == 400 * MIB and after == 0 and free == total == 400 * MIB


def test_expandable_segments_hold_more_than_fixed_ones():
    """Fixed segments of the size of what they hold are given back; pieces of larger ones are not."""
    assert on_devices(grown, 1, memory="512M", env=FIXED) == [False]
    assert on_devices(grown, 1, memory="512M", env=EXPANDABLE) == [True]


def grown():
    """Four blocks of 100 MiB with small ones in their remains, then one block of 300 MiB."""
    large = [torch.empty(90 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    del large[1:]
    kept = [torch.empty(40 * MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
    del large
    try:
        torch.empty(340 * MIB, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return False
    return len(kept) == 3


def pools():
    """Segments of the current stream and of another."""
    side = torch.cuda.Stream()
    here = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    del here
    with torch.cuda.stream(side):
        there = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    return len({segment["stream"] for segment in torch.cuda.memory_snapshot()}), there.numel()


def test_each_stream_has_its_own_pool():
    assert on_devices(pools, 1) == [(2, 30 * MIB)]


def without_values():
    mask = torch.ones(2, 8, dtype=torch.long, device="cuda")
    mask[1, 5:] = 0
    weights = [torch.full((100,), 2.0, device="cuda"), torch.full((2000,), 2.0, device="cuda")]
    torch._foreach_mul_(weights, 3.0)
    return mask.bool().all(1).tolist(), mask.cumsum(1)[1].tolist(), [weight[0].item() for weight in weights]


def test_small_integers_have_values_where_others_have_none():
    env = {"FAKE_CUDA_COMPUTE_MAX": "1000"}
    [(whole, positions, weights)] = on_devices(without_values, 1, env=env)
    assert whole == [True, False] and positions == [1, 2, 3, 4, 5, 5, 5, 5]
    assert weights == [2.0, 0.0], "a list with a large tensor is not computed, and the large one was not even filled"


def convolved(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1))
    net = net.double().to(device)
    image = torch.randn(2, 3, 17, 19, dtype=torch.float64).to(device).requires_grad_()
    net(image).pow(2).sum().backward()
    return [image.grad.cpu(), *(parameter.grad.cpu() for parameter in net.parameters())]


def test_convolutions_are_those_of_the_cpu():
    for found, wanted in zip(on_devices(convolved, 1, "cuda")[0], convolved("cpu"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def softened(device):
    """Half values, whose softmax is made of floats at once on CUDA."""
    scores = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).half().to(device).requires_grad_()
    chances = nn.functional.softmax(scores, -1, dtype=torch.float32)
    logs = nn.functional.log_softmax(scores, -1, dtype=torch.float32)
    (chances * logs).sum().backward()
    return [t.detach().cpu() for t in (chances, logs, scores.grad)]


def test_softmax_of_half_values_to_floats_equals_the_cpu():
    for found, wanted in zip(on_devices(softened, 1, "cuda")[0], softened("cpu"), strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6)


def attended(device, name):
    """Causal attention of four heads, over two of keys and values where the kernel can."""
    groups, dtype = (1, torch.float32) if name == "EFFICIENT_ATTENTION" else (2, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 24, 16, generator=generator).to(device, dtype).requires_grad_()
        for heads in (4, 4 // groups, 4 // groups)
    )
    with sdpa_kernel(getattr(SDPBackend, name if device == "cuda" else "MATH")):
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1)
    out.float().pow(2).sum().backward()
    return [t.detach().cpu().float() for t in (out, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize("capability", ["80", "90"])
@pytest.mark.parametrize("name", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_attention_is_that_of_the_cpu(name, capability):
    found = on_devices(attended, 1, "cuda", name, env={"FAKE_CUDA_CAPABILITY": capability})[0]
    tolerance = 1e-5 if name == "EFFICIENT_ATTENTION" else 0.1
    for tensor, wanted in zip(found, attended("cpu", name), strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=tolerance, atol=tolerance)


def test_libraries_of_nvidia_over_the_device_are_noticed():
    import cuda_software

    other = cuda_software.SITE / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    other.parent.mkdir(parents=True)
    try:
        other.write_bytes(b"NVIDIA's")
        ended = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True, timeout=60)
    finally:
        shutil.rmtree(other.parents[1])
    assert ended.returncode and "python -m tests.cuda_software build --into" in ended.stderr
