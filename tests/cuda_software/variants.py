"""Trainings of every kind that ours knows, by name."""

from __future__ import annotations

import math
import types
from functools import partial

import torch
from torch import nn

from hf_osdp.planner.placement import Activations
from hf_osdp.planner.wire import WireFormat
from tests.helpers.layouts import SELECTIVE, _is_block
from tests.helpers.models import tiny_model
from tests.helpers.training import Change, adamw

from .training import Variant


def _wire(wire: WireFormat) -> Change:
    return lambda number, one, unit: {"shard_size": 2, "stage_size": 1, "gather_wire": wire, "reduce_wire": wire}


def _of_blocks(activations: Activations) -> Change:
    return lambda number, one, unit: {"activations": activations} if _is_block(unit) else {}


def of_common_operators(model: nn.Module) -> None:
    """Attention and layer norm of operators that are the CPU's on CUDA too: CUDA's attention pads heads to 8 elements,
    and its layer norm keeps statistics in float32, which round otherwise.
    """
    model.set_attn_implementation("eager")
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.forward = types.MethodType(_layer_norm, module)


def _layer_norm(self: nn.LayerNorm, hidden: torch.Tensor) -> torch.Tensor:
    centred = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    centred = centred - centred.mean(-1, keepdim=True)
    scaled = centred * (centred.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
    return scaled.to(hidden.dtype) * self.weight + self.bias


def _of_bitsandbytes(model: nn.Module) -> torch.optim.Optimizer:
    import bitsandbytes
    import cuda_software
    from bitsandbytes import cextension

    cextension.lib = cextension.get_native_library()  # it was imported before this rank had a device
    import bitsandbytes.backends.cuda.ops

    cuda_software.compute("bitsandbytes")
    return bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-3)


def _of_torchao(model: nn.Module) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    torch.compiler.set_stance("force_eager")
    return AdamW8bit(model.parameters(), lr=1e-3)


IN_32_BITS = partial(tiny_model, "gpt2", dtype=torch.float32)
WIDE = partial(tiny_model, "gpt2", layers=2, width=128, dtype=torch.float32)
"""Its matrices have blocks of quantized states."""
VARIANTS = {
    "full shards": Variant(layout="zero3"),
    "kept parameters": Variant(layout="zero2"),
    "replicas": Variant(layout="replicate"),
    "two stages": Variant(layout="two_stage"),
    "hsdp": Variant(layout="hsdp"),
    "held gradients": Variant(accumulation_steps=2, reduce=None),
    "activations on the host": Variant(change=_of_blocks(Activations.OFFLOAD)),
    "recomputed, inputs on the host": Variant(layout="zero3", change=_of_blocks(Activations.RECOMPUTE_OFFLOAD)),
    "recomputed": Variant(model=partial(tiny_model, "llama"), change=_of_blocks(Activations.RECOMPUTE)),
    "recomputed by operator": Variant(change=_of_blocks(SELECTIVE)),
    "parameters on the host": Variant(layout="zero3", change=lambda number, *_: {"on_host": number % 2 == 0}),
    "states on the host": Variant(
        layout="zero3", change=lambda number, *_: {"on_host": False, "states_on_host": number != 1}
    ),
    "everything": Variant(layout="everything", accumulation_steps=2),
    "fp16": Variant(model=IN_32_BITS, precision="fp16"),
    "bf16": Variant(model=IN_32_BITS, precision="bf16"),
    "wire bf16": Variant(model=IN_32_BITS, change=_wire(WireFormat.BF16)),
    "wire int8": Variant(model=IN_32_BITS, change=_wire(WireFormat.INT8)),
    "8 bits of bitsandbytes": Variant(model=WIDE, optimizer=_of_bitsandbytes, prepare=of_common_operators),
    "8 bits of torchao": Variant(model=WIDE, optimizer=_of_torchao, prepare=of_common_operators),
    "fused": Variant(model=partial(tiny_model, "bert"), optimizer=adamw),
    "unclipped": Variant(max_norm=math.inf, optimizer=partial(adamw, fused=False, foreach=True)),
}
TOLERANCES = {"fp16": 2e-4, "bf16": 5e-3, "wire bf16": 1e-4, "wire int8": 1e-4, "8 bits of bitsandbytes": 1e-3,
              "8 bits of torchao": 1e-3}  # fmt: skip
"""Of those whose kernels of 16 and 32 bits round otherwise on CUDA (`of_common_operators`). Where a gradient is near
zero, Adam steps as far the other way if it has another sign; a sum of four in another order may take the next code of
8 bits.
"""
