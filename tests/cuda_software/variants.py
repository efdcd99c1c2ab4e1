"""Trainings of every kind that ours knows, by name."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_osdp.planner.placement import Activations
from hf_osdp.planner.plan import UnitDecision
from hf_osdp.planner.wire import WireFormat
from tests.helpers.layouts import SELECTIVE

from .training import Variant, on_host


def _wire(wire: WireFormat) -> Callable[[int, UnitDecision], dict[str, Any]]:
    return lambda number, unit: {"shard_size": 2, "stage_size": 1, "gather_wire": wire, "reduce_wire": wire}


def _states(number: int, unit: UnitDecision) -> dict[str, Any]:
    return {"on_host": False, "states_on_host": number != 1}


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


def _of_bitsandbytes(*args: Any, **options: Any) -> torch.optim.Optimizer:
    import bitsandbytes
    import cuda_software
    from bitsandbytes import cextension

    cextension.lib = cextension.get_native_library()  # it was imported before this rank had a device
    import bitsandbytes.backends.cuda.ops

    cuda_software.compute("bitsandbytes")
    return bitsandbytes.optim.AdamW8bit(*args, **options)


def _of_torchao(*args: Any, **options: Any) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    torch.compiler.set_stance("force_eager")
    return AdamW8bit(*args, **options)


def _low_bit(make: Callable[..., torch.optim.Optimizer]) -> Variant:
    return Variant(model="wide", dtype=torch.float32, make=make, prepare=of_common_operators)


VARIANTS = {
    "full shards": Variant(layout="zero3"),
    "kept parameters": Variant(layout="zero2"),
    "replicas": Variant(layout="replicate"),
    "two stages": Variant(layout="two_stage"),
    "hsdp": Variant(layout="hsdp"),
    "held gradients": Variant(accumulation_steps=2, reduce_every_micro_step=None),
    "activations on the host": Variant(activations=Activations.OFFLOAD),
    "recomputed, inputs on the host": Variant(layout="zero3", activations=Activations.RECOMPUTE_OFFLOAD),
    "recomputed": Variant(model="llama", activations=Activations.RECOMPUTE),
    "recomputed by operator": Variant(activations=SELECTIVE),
    "parameters on the host": Variant(layout="zero3", change=on_host(2)),
    "states on the host": Variant(layout="zero3", change=_states),
    "everything": Variant(layout="everything", accumulation_steps=2),
    "fp16": Variant(dtype=torch.float32, precision="fp16"),
    "bf16": Variant(dtype=torch.float32, precision="bf16"),
    "wire bf16": Variant(dtype=torch.float32, change=_wire(WireFormat.BF16)),
    "wire int8": Variant(dtype=torch.float32, change=_wire(WireFormat.INT8)),
    "8 bits of bitsandbytes": _low_bit(_of_bitsandbytes),
    "8 bits of torchao": _low_bit(_of_torchao),
    "fused": Variant(model="bert", optimizer={"fused": True}),
    "unclipped": Variant(max_norm=math.inf, optimizer={"foreach": True}),
}
TOLERANCES = {"fp16": 2e-4, "bf16": 5e-3, "wire bf16": 1e-4, "wire int8": 1e-4, "8 bits of bitsandbytes": 1e-3,
              "8 bits of torchao": 1e-3}  # fmt: skip
"""Of those whose kernels of 16 and 32 bits round otherwise on CUDA (`of_common_operators`). Where a gradient is near
zero, Adam steps as far the other way if it has another sign; a sum of four in another order may take the next code of
8 bits.
"""
