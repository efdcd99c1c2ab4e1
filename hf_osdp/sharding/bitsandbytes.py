"""bitsandbytes' optimizers on shards: what they hold, states of 8 bits where one process has them, and states as checkpoints have them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import OSDPError
from ..planner.job import OptimizerSpec, bitsandbytes_spec
from .gradients import local

_BLOCK = 256
_STATES = {"state1", "state2"}
_FULL = {"optim_bits": 32}
"""Options that a Trainer gives embeddings, and bitsandbytes its own StableEmbedding."""


def is_bitsandbytes(optimizer: torch.optim.Optimizer) -> bool:
    return any(cls.__module__.startswith("bitsandbytes.") for cls in type(optimizer).__mro__)


def spec_of_bitsandbytes(optimizer: Any, *, device_type: str = "cuda") -> OptimizerSpec | None:  # noqa: ANN401  (it may not be installed)
    """Return what one of bitsandbytes' optimizers holds; None of others, of paged ones, and of LAMB and LARS.

    Raises:
        OSDPError: it does not train on shards as in one process.
    """
    if not is_bitsandbytes(optimizer) or optimizer.is_paged or optimizer.args.max_unorm:
        return None
    named, registered = _overrides(optimizer)
    reason = (
        "is of a bitsandbytes before 0.50, whose states may have no blocks; update it" if hasattr(optimizer.args, "block_wise")
        else "has parameters with options of their own in GlobalOptimManager, which shards do not have; give them a group of their own"
        if named - registered.keys() or any(config != _FULL for config in registered.values())
        else None
    )  # fmt: skip
    if reason:
        raise OSDPError(f"{type(optimizer).__name__} {reason}.")
    args = optimizer.args
    spec = bitsandbytes_spec(optimizer.optimizer_name, args.optim_bits, device_type=device_type, least_quantized=args.min_8bit_size)
    return replace(spec, keeps_embeddings=bool(registered) and spec.is_quantized)


def in_float32(optimizer: torch.optim.Optimizer) -> Collection[int]:
    """Return the `id` of parameters that are registered, by their modules, to have states in float32."""
    return _overrides(optimizer)[1] if is_bitsandbytes(optimizer) else ()


def _overrides(optimizer: Any) -> tuple[set[int], dict[int, object]]:  # noqa: ANN401
    """Return the `id` of parameters with options of their own, and the options of those that are weights of embeddings, by `id`."""
    manager = type(optimizer.mng).get_instance()
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    registered = {
        id(dict.get(module._parameters, name)): config if isinstance(module, nn.Embedding) else None
        for module, name, config in manager.module_weight_config_triple
    }
    return own & manager.pid2config.keys(), {key: config for key, config in registered.items() if key in own}


@torch.no_grad()
def quantize_as_whole(optimizer: Any, plain: Collection[int]) -> None:  # noqa: ANN401
    """Have a step hold states in 8 bits where one process does: by the size of whole parameters, and not of those that are `plain`.

    A stand-in for a shard has its parameter as `whole`. Shards without elements are passed by, for no GPU can launch a kernel on them.
    """
    optimizer.mng = object.__new__(type(optimizer.mng))
    optimizer.mng.initialize()
    for number, group in enumerate(optimizer.param_groups):
        for place, shard in enumerate(group["params"]):
            whole = getattr(shard, "whole", shard)
            full = _FULL if id(whole) in plain or whole.numel() < optimizer.args.min_8bit_size else {}
            optimizer.mng.pid2config[id(shard)] = {"min_8bit_size": 0, **full}
            if shard.grad is not None and not shard.numel():
                if not optimizer.state[shard]:
                    optimizer.init_state(group, shard, number, place)
                optimizer.state[shard]["step"] += 1
                shard.grad = None


def saved_states(states: Mapping[str, Any], shape: torch.Size) -> dict[str, Any]:
    """Return a parameter's states as a checkpoint has them: each of the shard's shape, in float32 and on the host where it is quantized."""
    from bitsandbytes.functional import dequantize_blockwise

    saved = {key: value for key, value in states.items() if not key.startswith(("state", "qmap", "absmax"))}
    for key in states.keys() & _STATES:
        for name, codes, scales in _parts(states, key, shape):
            saved[name] = codes if scales is None else codes.float().cpu()
            if scales is not None and codes.numel():
                saved[name] = dequantize_blockwise(codes, absmax=scales, code=states[f"qmap{key[-1]}"], blocksize=_BLOCK).cpu()
    return saved


def load_states(states: dict[str, Any], saved: Mapping[str, Any], shape: torch.Size) -> None:
    """Overwrite a parameter's states with saved ones, quantized as they are here."""
    from bitsandbytes.functional import quantize_blockwise

    states |= {key: value for key, value in saved.items() if not key.startswith("state")}
    for key in states.keys() & _STATES:
        for name, here, scales in _parts(states, key, shape):
            value = local(saved[name]).to(here.device)
            if scales is not None and here.numel():
                value, found = quantize_blockwise(value, code=states[f"qmap{key[-1]}"], blocksize=_BLOCK)
                scales.copy_(found.absmax)
            here.copy_(value)


def _parts(states: Mapping[str, Any], key: str, shape: torch.Size) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Yield the name in a checkpoint, the tensor and its blocks' scales; AdEMAMix holds two means as one tensor."""
    value, scales = states[key], states.get(f"absmax{key[-1]}")
    if value.shape == shape:
        yield key, value, scales
    else:
        for number, name in enumerate((key, f"{key}_slow")):
            yield name, value[number], None if scales is None else scales[number]
