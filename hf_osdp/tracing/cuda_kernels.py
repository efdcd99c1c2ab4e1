"""Allocate like CUDA's attention and dropout kernels in traces without a GPU; `attention.py` chooses the attention
kernel.

The CPU's own kernels differ: attention with dropout falls back to explicit products, and dropout saves its mask in the
activations' dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import library
from torch.utils._pytree import tree_map_only

from .attention import (
    ASSUMED_CAPABILITY,
    AttentionCall,
    Capability,
    Kernel,
    attention_kernel,
    capability_here,
)
from .kernel_scratch import processors_of
from .tensors import FunctionMode

_IN_FLOAT32 = frozenset({
    "binary_cross_entropy_with_logits", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "exp", "expm1",
    "group_norm", "kl_div",
    "l1_loss", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax", "logsumexp", "mse_loss", "nll_loss",
    "norm", "normalize",
    "pow", "__pow__", "__rpow__", "prod", "reciprocal", "rsqrt", "smooth_l1_loss", "huber_loss", "softmax", "softplus",
    "sum",
})  # fmt: skip
"""Python names of functions that autocast runs in float32 on CUDA but not on the CPU (AT_FORALL_FP32 in
ATen/autocast_mode.h).
"""


library.define(
    "hf_osdp::attention",
    (
        "(Tensor query, Tensor key, Tensor value, Tensor? bias, bool efficient, bool is_causal) -> (Tensor output,"
        " Tensor logsumexp)"
    ),
)
library.define(
    "hf_osdp::attention_backward",
    (
        "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor logsumexp, bool efficient, bool"
        " bias_grad, bool is_causal) -> Tensor[]"
    ),
)


@library.impl("hf_osdp::attention", "CPU")
@library.register_fake("hf_osdp::attention")
def _attention_outputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    efficient: bool,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate what a fused kernel returns: its output, and a float32 logsumexp per query, padded if the kernel is
    `efficient`.

    It is one operator, as on CUDA, so that selective recomputation can save it.
    """
    batch, heads, length, _ = query.shape
    rows = length + (-length % 32 if efficient else 0)
    # The kernels write [b, T, h, d] and return a transposed view, so the caller's reshape copies nothing.
    out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty((batch, heads, rows), dtype=torch.float32)


@library.impl("hf_osdp::attention_backward", "CPU")
@library.register_fake("hf_osdp::attention_backward")
def _attention_gradients(  # noqa: PLR0913  the operator's arguments
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None,
    logsumexp: torch.Tensor,
    efficient: bool, bias_grad: bool, is_causal: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """Allocate like backward of a fused kernel: gradients of query, key, value and perhaps bias, then temporary
    tensors.

    The temporary tensors are float32 query gradients (in float32: as much for the row sums), and for grouped heads
    gradients of keys and values for each query head. Sources: mha_bwd in flash_attn/flash_api.cpp,
    _efficient_attention_backward in cuda/attention_backward.cu, kNeedsAccumGradQ and kKernelComputesDelta in
    mem_eff_attention/kernel_backward.h. cuDNN's workspace holds the same.
    """
    row_sums = torch.empty_like(logsumexp)
    temporary_grads = [torch.empty_like(query, dtype=torch.float32)]
    if efficient and query.element_size() < 4 and query.shape[-1] > 128:  # the sums do not fit in registers
        temporary_grads += [torch.empty_like(tensor, dtype=torch.float32) for tensor in (key, value)]
    if (heads := query.shape[1]) != key.shape[1]:
        temporary_grads += [
            tensor.new_empty(tensor.shape[0], tensor.shape[2], heads, tensor.shape[3]) for tensor in (key, value)
        ]
    grads = [torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)]
    return [*grads, *([torch.empty_like(bias)] if bias_grad and bias is not None else []), row_sums, *temporary_grads]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:  # noqa: ANN401
    query, key, value, bias, ctx.efficient, ctx.is_causal = inputs
    ctx.save_for_backward(query, key, value, bias, *output)


def _attention_backward(ctx: Any, grad: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
    query, key, value, bias, _out, logsumexp = ctx.saved_tensors
    bias_grad = ctx.needs_input_grad[3]
    grads = torch.ops.hf_osdp.attention_backward(
        grad, query, key, value, bias, logsumexp, ctx.efficient, bias_grad, ctx.is_causal
    )
    return *grads[:3], grads[3] if bias_grad else None, None, None


library.register_autograd("hf_osdp::attention", _attention_backward, setup_context=_save_for_backward)


class CudaKernels(FunctionMode):
    """Replace attention and dropout by functions that allocate like CUDA's kernels; without a capability, that of
    this machine's GPU.
    """

    def __init__(self, capability: Capability | None = None) -> None:
        super().__init__({
            F.scaled_dot_product_attention: self.call_attention,
            torch.dropout: lambda input, p, train: _dropout(input, p, train),
            F.dropout: _dropout,
        })  # fmt: skip
        self.processors = processors_of(capability)
        self._capability = capability or capability_here() or ASSUMED_CAPABILITY
        self.found: dict[Kernel, AttentionCall] = {}
        """The attention kernels that would have run, each with its first call."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if torch.is_autocast_enabled("cpu") and getattr(func, "__name__", "") in _IN_FLOAT32:
            args, kwargs = _cast((args, kwargs), torch.float32)
        return super().__torch_function__(func, types, args, kwargs)

    def call_attention(  # noqa: PLR0913  the function's arguments
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Run `scaled_dot_product_attention` like the kernel that CUDA would choose."""
        if torch.is_autocast_enabled("cpu"):
            query, key, value, attn_mask = _cast((query, key, value, attn_mask), torch.get_autocast_dtype("cpu"))
        call = AttentionCall(
            dtype=query.dtype, query=tuple(query.shape), key=tuple(key.shape), value=tuple(value.shape),
            has_mask=attn_mask is not None, is_causal=is_causal, dropout=dropout_p, enable_gqa=enable_gqa,
            requires_grad=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)),
            inner_strides_are_one=all(tensor.stride(-1) == 1 for tensor in (query, key, value)),
        )  # fmt: skip
        kernel = attention_kernel(call, self._capability)
        self.found.setdefault(kernel, call)
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.empty(attn_mask.shape, dtype=query.dtype)  # the kernels need an additive bias
        if kernel is Kernel.MATH:
            with torch.autocast("cpu", enabled=False):
                return _math(query, key, value, attn_mask, call)
        size = value.shape[-1]
        if kernel is Kernel.FLASH and size % 8:
            query, key, value = (F.pad(tensor, (0, -size % 8)) for tensor in (query, key, value))
        if attn_mask is not None and kernel is Kernel.EFFICIENT and (padding := -attn_mask.shape[-1] % 16):
            attn_mask = F.pad(attn_mask, (0, padding))
        output: torch.Tensor = torch.ops.hf_osdp.attention(
            query, key, value, attn_mask, kernel is Kernel.EFFICIENT, call.is_causal
        )[0]
        return output[..., :size]


def _cast(value: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401
    """Cast an operator's arguments as autocast does; it does not cast float64."""
    known = (torch.float32, torch.bfloat16, torch.float16)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.dtype in known else tensor, value)


def _math(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, call: AttentionCall
) -> torch.Tensor:
    """Allocate like `_scaled_dot_product_attention_math` (ATen/native/transformers/attention.cpp): half precision
    in float32.
    """
    dtype = query.dtype
    if dtype in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
    query = query * 1.0  # queries and keys are scaled before they are multiplied
    if call.is_causal:
        bias = torch.empty(query.shape[-2], key.shape[-2], dtype=dtype)
    if call.enable_gqa and (repeats := query.shape[-3] // key.shape[-3]) > 1:
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = torch.matmul(query, key.transpose(-2, -1) * 1.0)
    if bias is not None:
        scores.add_(bias)
    temporary = torch.empty_like(scores)  # safe softmax allocates one that it does not return
    weights = torch._safe_softmax(scores, -1)
    del temporary, scores
    return torch.matmul(_dropout(weights, call.dropout), value).to(dtype)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Run dropout as its fused CUDA kernel does: the mask is saved as bool."""
    if inplace or not training or not 0 < p < 1 or input.numel() == 0:
        return F.dropout(input, p, training, inplace)
    output: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return output
