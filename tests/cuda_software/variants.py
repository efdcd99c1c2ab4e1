"""Trainings of every kind that ours knows, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hf_osdp.planner.description import Activations
from hf_osdp.planner.plan import UnitDecision
from hf_osdp.planner.wire import WireFormat
from tests.helpers.layouts import SELECTIVE

from .training import Variant, on_host


def _wire(wire: WireFormat) -> Callable[[int, UnitDecision], dict[str, Any]]:
    return lambda number, unit: {"shard_size": 2, "stage_size": 1, "gather_wire": wire, "reduce_wire": wire}


def _states(number: int, unit: UnitDecision) -> dict[str, Any]:
    return {"on_host": False, "states_on_host": number != 1}


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
    "fused": Variant(model="bert", optimizer={"fused": True}),
    "unclipped": Variant(max_norm=math.inf, optimizer={"foreach": True}),
}
TOLERANCES = {"fp16": 1e-4, "bf16": 5e-3, "wire bf16": 1e-4, "wire int8": 1e-4}
"""Of those that compute or send fewer bits; float64 otherwise. NCCL averages what gloo divides and then adds, and Adam
steps as far the other way where a gradient near zero has another sign."""
