"""4-bit bases of bitsandbytes (QLoRA): each frozen weight and its scales as one tensor of bytes, which FSDP2 shards
and gathers like any other parameter.

bitsandbytes keeps scales beside the weight, where FSDP2 does not see them: they stay whole on each device, and a shard
of the weight has lost them. Here they lie behind the codes in the same tensor. The product itself is bitsandbytes'
own, `matmul_4bit`.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import OSDPError
from ..planner.description import DType

_ALIGNMENT = 16
"""Bytes: scales are read as float32, in vectors."""
_OUTER_BLOCK = 256
"""Scales of a block that is quantized again; the only size that bitsandbytes' product accepts."""
_TABLE = 256
"""Values of the code of 8 bits of quantized scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a 4-bit weight and its scales lie in one tensor of bytes."""

    shape: tuple[int, int]
    """Output and input features."""
    dtype: torch.dtype
    """Dtype before it was quantized, in which bitsandbytes' backward restores it."""
    block_size: int
    quant_type: str
    nested: bool
    """Whether the scales are quantized as well (double quantization)."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the codes and of the scales; of nested scales also their own scales, offset and table."""
        elements = math.prod(self.shape)
        blocks = -(-elements // self.block_size)
        codes = (elements + 1) // 2
        return (codes, blocks, 4 * -(-blocks // _OUTER_BLOCK), 4, 4 * _TABLE) if self.nested else (codes, 4 * blocks)

    @property
    def starts(self) -> tuple[int, ...]:
        """First byte of each part, and the number of bytes of all."""
        aligned = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in self.sizes)
        return (0, *itertools.accumulate(aligned))

    @property
    def nbytes(self) -> int:
        return self.starts[-1]

    def parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the parts, each as bytes."""
        whole = packed.view(torch.uint8)
        return [whole.narrow(0, start, size) for start, size in zip(self.starts, self.sizes, strict=False)]

    def pack(self, weight: torch.Tensor, state: Any) -> torch.Tensor:  # noqa: ANN401  (bitsandbytes' QuantState)
        """Return the bytes of a weight that bitsandbytes quantized."""
        outer = (state.state2.absmax, state.offset, state.state2.code) if self.nested else ()
        packed = torch.zeros(self.nbytes, dtype=torch.uint8, device=weight.device)
        for part, value in zip(self.parts(packed), (weight.data, state.absmax, *outer), strict=True):
            part.copy_(value.detach().contiguous().reshape(-1).view(torch.uint8))
        return packed

    def state(self, packed: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the codes, and bitsandbytes' QuantState over views of the other parts."""
        from bitsandbytes.functional import QuantState

        codes, scales, *outer = self.parts(packed)
        known = {"shape": torch.Size(self.shape), "dtype": self.dtype, "blocksize": self.block_size}
        if not self.nested:
            return codes, QuantState(scales.view(torch.float32), quant_type=self.quant_type, **known)
        absmax, offset, table = (part.view(torch.float32) for part in outer)
        inner = QuantState(absmax, code=table, blocksize=_OUTER_BLOCK, dtype=torch.float32)
        return codes, QuantState(
            scales, quant_type=self.quant_type, offset=offset.reshape(()), state2=inner, **known
        )  # fmt: skip

    @classmethod
    def of(cls, layer: Any) -> Packing:  # noqa: ANN401  (bitsandbytes' Linear4bit)
        """Return the packing of a layer; on the meta device, of what bitsandbytes would make of it."""
        weight, state, shape = layer.weight, _state_of(layer), (layer.out_features, layer.in_features)
        if state is None:
            dtype = weight.dtype if weight.is_floating_point() else layer.compute_dtype or torch.bfloat16
            return cls(
                shape=shape, dtype=dtype, block_size=weight.blocksize, quant_type=weight.quant_type,
                nested=weight.compress_statistics,
            )  # fmt: skip
        if tuple(state.shape) != shape or (state.nested and state.state2.blocksize != _OUTER_BLOCK):
            raise OSDPError(
                f"A 4-bit weight of shape {tuple(state.shape)} was quantized by an old bitsandbytes; quantize it again"
                " from the original weights."
            )
        return cls(
            shape=shape, dtype=state.dtype, block_size=state.blocksize, quant_type=state.quant_type,
            nested=state.nested,
        )  # fmt: skip


def _state_of(layer: Any) -> Any:  # noqa: ANN401
    return getattr(layer.weight, "quant_state", None) or layer.quant_state


def layers_in_4_bits(model: nn.Module) -> Iterator[Any]:
    """Yield bitsandbytes' `Linear4bit` modules of a model."""
    package: Any = sys.modules.get("bitsandbytes")  # without it there are none
    for module in model.modules() if package is not None else ():
        if isinstance(module, package.nn.Linear4bit):
            yield module


def is_packed(layer: nn.Module) -> bool:
    return isinstance(layer.__dict__.get("packing"), Packing)


def quantize(model: nn.Module, quant_type: str, compute_dtype: DType | None = None) -> None:
    """Give a transformers model on the meta device, in place, the layers that `from_pretrained` gives it with
    `BitsAndBytesConfig(load_in_4bit=True)` and double quantization; all other weights get `compute_dtype`.

    Raises:
        ValueError: bitsandbytes is not installed.
    """
    from transformers import BitsAndBytesConfig
    from transformers.quantizers import AutoHfQuantizer

    if find_spec("bitsandbytes") is None:
        raise ValueError('A base in 4 bits needs bitsandbytes; install it with: pip install "hf_osdp[bnb]".')
    dtype = torch.float32 if compute_dtype is None else getattr(torch, compute_dtype.value)
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )  # fmt: skip
    AutoHfQuantizer.from_config(config, pre_quantized=False).preprocess_model(model.to(dtype), device_map=None)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # peft reads it


def pack(model: nn.Module) -> nn.Module:
    """Replace each 4-bit weight of a model, in place, by one tensor of bytes that has its scales too.

    Names stay. Weights on the meta device get the sizes that they will have. A model without 4-bit weights is not
    changed.

    Raises:
        OSDPError: the model is quantized, but not so that it can be planned.
    """
    refuse_other_formats(model)
    layers = [layer for layer in layers_in_4_bits(model) if not is_packed(layer)]
    if layers and not hasattr(model, "peft_config"):
        raise OSDPError(
            "A base in 4 bits is trained through adapters of peft, with which checkpoints hold them alone; add them by"
            " get_peft_model before the model is planned."
        )
    _keep_counts(model, layers)
    for layer in layers:
        if getattr(_state_of(layer), "packing_format_for_cpu", False):
            layer.state_dict()  # an evaluation on the CPU has reordered the codes, and this puts them back
        if _state_of(layer) is None and layer.weight.device.type != "meta":
            layer.weight = layer.weight.to(layer.weight.device)  # quantizes it
        packing, weight = Packing.of(layer), layer.weight
        if weight.is_meta:
            packed = torch.empty(packing.nbytes, dtype=torch.uint8, device="meta")
        else:
            packed = packing.pack(weight, _state_of(layer))
        layer.weight = nn.Parameter(packed, requires_grad=False)
        _install(layer, packing)
    return model


def _keep_counts(model: nn.Module, layers: Sequence[Any]) -> None:
    """Make transformers count the parameters of 4-bit weights as before, for the FLOPs that the Trainer logs."""
    missing = {id(layer): math.prod((packing := Packing.of(layer)).shape) - packing.nbytes for layer in layers}
    for module in model.modules() if missing else ():
        if hasattr(type(module), "num_parameters"):
            inside = sum(missing.get(id(inner), 0) for inner in module.modules())
            module.num_parameters = functools.partial(_counted, module.num_parameters, inside)  # type: ignore


def _counted(count: Callable[..., int], missing: int, only_trainable: bool = False, *args: Any, **options: Any) -> int:
    return count(only_trainable, *args, **options) + (0 if only_trainable else missing)


def packed_copy(model: nn.Module) -> nn.Module:
    """Return a model with packed 4-bit weights: itself, or a copy that has them on the meta device and shares all
    other tensors.
    """
    refuse_other_formats(model)
    layers = [layer for layer in layers_in_4_bits(model) if not is_packed(layer)]
    if not layers:
        return model
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for layer in layers:
        packed = torch.empty(Packing.of(layer).nbytes, dtype=torch.uint8, device="meta")
        memo[id(layer.weight)] = nn.Parameter(packed, requires_grad=False)
        memo[id(layer.quant_state)] = None
    copied = copy.deepcopy(model, memo)
    for layer, original in zip(layers_in_4_bits(copied), layers_in_4_bits(model), strict=True):
        if not is_packed(layer):
            _install(layer, Packing.of(original))
    return copied


def refuse_other_formats(model: nn.Module) -> None:
    """Refuse bases in other formats than 4 bits by bitsandbytes, and adapters that read a quantized weight.

    Raises:
        OSDPError: with what to do instead.
    """
    if any(type(module).__module__.startswith("torchao.float8") for module in model.modules()):
        raise OSDPError(
            "The model computes in float8 (torchao's convert_to_float8_training), which cannot be planned; leave the"
            " conversion out and train in bf16, or train it under FSDP2 without OSDP."
        )
    held = {id(layer.weight) for layer in layers_in_4_bits(model)}
    method = getattr(model, "quantization_method", "") if getattr(model, "is_quantized", False) else ""
    method = getattr(method, "value", method)
    kinds = {"Int8Params": "bitsandbytes in 8 bits", "Params4bit": "bitsandbytes in 4 bits outside of linear layers"}
    found = [kinds[type(p).__name__] for p in model.parameters() if type(p).__name__ in kinds and id(p) not in held]
    found += [method] if method not in ("", "bitsandbytes") else []
    if found:
        raise OSDPError(
            f"The model is quantized by {found[0]}, which cannot be planned; load it in 4 bits by"
            " BitsAndBytesConfig(load_in_4bit=True), or in bf16."
        )
    adapters = getattr(model, "peft_config", {}).values() if held else ()
    if any(getattr(adapter, "use_dora", False) for adapter in adapters):
        raise OSDPError("DoRA adapters read the base's weights, which are in 4 bits here; use_dora=False trains LoRA.")


def restored_elements(model: nn.Module) -> Iterator[tuple[torch.dtype, int]]:
    """Yield for each packed weight the dtype in which it is multiplied, and its elements."""
    for layer in filter(is_packed, layers_in_4_bits(model)):
        yield layer.compute_dtype or layer.packing.dtype, math.prod(layer.packing.shape)


def view_in(model: nn.Module, dtype: torch.dtype | None) -> None:
    """View packed weights in the dtype to which FSDP2 casts parameters, so that it leaves their bytes alone: torch up
    to 2.11 casts integers too.
    """
    for layer in layers_in_4_bits(model) if dtype is not None else ():
        layer.weight = nn.Parameter(layer.weight.data.view(dtype), requires_grad=False)


def _install(layer: Any, packing: Packing) -> None:  # noqa: ANN401  (bitsandbytes' Linear4bit)
    layer.packs = {"weight": math.prod(packing.shape)}
    layer.quant_state, layer.packing, layer.forward = None, packing, types.MethodType(_uncompiled_forward(), layer)


@functools.cache
def _uncompiled_forward() -> Callable[..., torch.Tensor]:
    """Return the forward of packed layers; blocks that have them run uncompiled, with a line that says so."""
    return torch.compiler.disable(_forward)


def _forward(layer: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401  (bitsandbytes' Linear4bit)
    """Compute as `Linear4bit.forward`, from packed bytes."""
    if not layer.compute_type_is_set:
        layer.set_compute_type(x)
        layer.compute_type_is_set = True
    codes, state = layer.packing.state(layer.weight)
    inner = x if layer.compute_dtype is None else x.to(layer.compute_dtype)
    bias = None if layer.bias is None else layer.bias.to(inner.dtype)
    if isinstance(codes, FakeTensor):
        product = _FakeProduct.apply(inner, codes, bias, state)
    else:
        from bitsandbytes import matmul_4bit

        product = matmul_4bit(inner, codes.view(-1, 1), bias=bias, quant_state=state)
    return product.to(x.dtype)


class _FakeProduct(torch.autograd.Function):
    """`matmul_4bit` on fake tensors, by the operators that its kernels run: for bitsandbytes it is one operator, which
    hides the restored weight and the product's FLOPs.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None, state: Any) -> torch.Tensor:  # noqa: ANN401
        ctx.codes, ctx.state = codes, state
        return nn.functional.linear(x, _restored(codes, state, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        (gradient,) = gradients
        needs_input, _, needs_bias, _ = ctx.needs_input_grad
        bias = gradient.flatten(0, -2).sum(0) if needs_bias else None
        if not needs_input:
            return None, None, bias, None
        weight = _restored(ctx.codes, ctx.state, ctx.state.dtype).to(gradient.dtype)
        return gradient @ weight, None, bias, None


def _restored(codes: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:  # noqa: ANN401
    operators, scales = torch.ops.bitsandbytes, state.absmax
    if state.nested:
        outer = state.state2
        scales = operators.dequantize_blockwise(scales, outer.absmax, outer.code, outer.blocksize, torch.float32)
        scales = scales + state.offset
    restored: torch.Tensor = operators.dequantize_4bit(
        codes, scales, state.blocksize, state.quant_type, state.shape, dtype
    )
    return restored
