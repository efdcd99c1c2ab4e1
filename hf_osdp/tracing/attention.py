"""Choose the attention kernel that torch runs on CUDA, by the rules of torch 2.11 to 2.13, and count the FLOPs of
attention.

Each rule is a check in `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`; torch runs the first kernel whose
checks all pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

Capability = tuple[int, int]

ASSUMED_CAPABILITY: Capability = (8, 6)
"""Compute capability used if the GPU is not known.

From Ampere on its rules are the narrowest, so no other GPU saves more activations.
"""
_SUPPORTED = (8, 0), (12, 1)
_LOW_PRECISION = (torch.float16, torch.bfloat16)
_DROPOUT_IN_SIXTEENTHS = torch.__version__ >= "2.12"
"""Whether torch gives cuDNN only multiples of 1/16 as dropout.

torch 2.11 on an H100 gives it 0.1 too; later versions were read.
"""


class Kernel(str, Enum):
    """A kernel of `scaled_dot_product_attention`."""

    CUDNN = "cuDNN"
    FLASH = "flash"
    EFFICIENT = "memory-efficient"
    MATH = "math"
    """Separate matrix products, which save all attention scores of every head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """The properties of a call by which torch chooses a kernel."""

    dtype: torch.dtype
    query: tuple[int, ...]
    """Shape `[batch, heads, T, d]`, like those of key and value."""
    key: tuple[int, ...]
    value: tuple[int, ...]
    has_mask: bool = False
    is_causal: bool = False
    dropout: float = 0.0
    requires_grad: bool = True
    """Whether an input requires a gradient."""
    enable_gqa: bool = False
    inner_strides_are_one: bool = True
    """Whether the last dimension of query, key and value has stride 1."""

    @property
    def head_sizes(self) -> set[int]:
        return {self.query[-1], self.key[-1], self.value[-1]}

    @property
    def has_equal_heads(self) -> bool:
        return self.query[1] == self.key[1] == self.value[1]

    @property
    def groups_heads(self) -> bool:
        """Whether grouped-query attention is enabled with head counts that flash and cuDNN accept."""
        return self.enable_gqa and self.key[1] == self.value[1] and self.query[1] % self.key[1] == 0


def attention_kernel(call: AttentionCall, capability: Capability) -> Kernel:
    """Return the kernel that torch runs on a CUDA device with this compute capability.

    Torch's defaults of `torch.backends.cuda.enable_*_sdp` are assumed; the user's settings are not read.
    """
    shapes = (call.query, call.key, call.value)
    if (
        all(len(shape) == 4 for shape in shapes)
        and len({shape[0] for shape in shapes}) == 1
        and call.inner_strides_are_one
    ):
        if capability[0] in (9, 10) and _can_use_cudnn(
            call, capability
        ):  # preferred there since torch 2.11, which ships cuDNN above 9.15
            return Kernel.CUDNN
        if _can_use_flash(call, capability):
            return Kernel.FLASH
        if _can_use_efficient(call, capability):
            return Kernel.EFFICIENT
    return Kernel.MATH


def _can_use_cudnn(call: AttentionCall, capability: Capability) -> bool:
    """Return whether cuDNN runs.

    Some heads above 128 need newer versions; flash accepts all of them and saves the same.
    """
    return (
        _is_low_precision(call, capability)
        and max(call.head_sizes) <= 128
        and not any(size % 8 for size in call.head_sizes)
        and (call.has_equal_heads or call.groups_heads)
        and call.key[2] > 1
        and (not _DROPOUT_IN_SIXTEENTHS or float(call.dropout * 16).is_integer())
        and not (call.dropout and call.query[2] == 1)
    )


def _can_use_flash(call: AttentionCall, capability: Capability) -> bool:
    size = call.query[-1]
    narrow = call.requires_grad and ((8, 6) <= capability <= (8, 9) or capability >= (12, 0))
    return (
        _is_low_precision(call, capability)
        and not call.has_mask
        and len(call.head_sizes) == 1
        and size <= 256
        and not (narrow and size > 192 and (size <= 224 or call.dropout > 0))
        and not (call.is_causal and call.query[2] != call.key[2])
        and (call.has_equal_heads or call.groups_heads)
    )


def _can_use_efficient(call: AttentionCall, capability: Capability) -> bool:
    """Return whether the memory-efficient kernel runs; it supports grouped heads only after torch 2.13
    (pytorch/pytorch#191085).
    """
    low = call.dtype in _LOW_PRECISION
    alignment = (8 if low else 4) if capability[0] >= 8 else (8 if low and capability[0] == 7 else 1)
    dtypes = (torch.float32, torch.float16, torch.bfloat16) if capability[0] >= 8 else (torch.float32, torch.float16)
    return (
        (5, 0) <= capability <= _SUPPORTED[1]
        and call.dtype in dtypes
        and call.query[-1] == call.key[-1]
        and not any(size % alignment for size in call.head_sizes)
        and call.has_equal_heads
    )


def _is_low_precision(call: AttentionCall, capability: Capability) -> bool:
    return call.dtype in _LOW_PRECISION and _SUPPORTED[0] <= capability <= _SUPPORTED[1]


def capability_here() -> Capability | None:
    """Return the compute capability of this process's GPU; None without a GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def math_kernel_warning(call: AttentionCall, capability: Capability) -> str:
    """Return a warning that says what the math kernel saves, why it runs, and the remedy."""
    scores = call.query[1] if len(call.query) == 4 else 1
    return (
        f"Attention runs torch's math kernel, which saves {scores} x {call.query[-2]} x {call.key[-2]} scores per"
        f" sample and layer: no fused kernel of compute capability {capability[0]}.{capability[1]} takes"
        f" {str(call.dtype).removeprefix('torch.')} with query {list(call.query)}, key {list(call.key)} and value"
        f" {list(call.value)}; train in {'fp16' if capability[0] < 8 else 'bf16 or fp16'}, or use another"
        " attn_implementation."
    )


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *, backward: bool = False) -> int:
    """Return the FLOPs of scaled dot-product attention: two products, 2 b h Tq Tk (d + dv), even if a causal mask
    halves them.

    Shapes are `[..., heads, T, d]`; grouped keys and values count for every query head, as in
    torch.utils.flop_counter. Forward of fused attention has two products, backward five (FlashAttention-2, arXiv
    2307.08691).
    """
    forward = 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return forward * 5 // 2 if backward else forward
