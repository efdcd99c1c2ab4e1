"""bitsandbytes' optimizers on shards: what they hold, 8-bit states for the same parameters as in one process,
states in checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...errors import OSDPError
from ...planner.optimizers import bitsandbytes_spec
from ...planner.training_job import OptimizerSpec
from ..gradients import local
from .kind import Kind

_BLOCK_SIZE = 256
_STATE_KEYS = {"state1", "state2"}
_FLOAT32_OPTIONS = {"optim_bits": 32}
"""Options that the Trainer sets for embeddings, and bitsandbytes for its StableEmbedding."""


class Bitsandbytes(Kind):
    """Paged ones, LAMB and LARS are tried as others."""

    packages = ("bitsandbytes.",)

    @property
    def name(self) -> str:
        """With its bits, because the Trainer uses one class for both."""
        return known.name if (known := self.known()) else super().name

    def known(self, device_type: str = "cuda") -> OptimizerSpec | None:
        """Return what it holds; None for paged ones, LAMB and LARS.

        Raises:
            OSDPError: it would train on shards differently than in one process.
        """
        optimizer, args = self.optimizer, self.optimizer.args
        if optimizer.is_paged or args.max_unorm:
            return None
        named, registered = self._overrides(optimizer.param_groups)
        reason = (
            "comes from bitsandbytes before 0.50, whose states may have no blocks; update it" if hasattr(args, "block_wise")  # noqa: E501
            else "has parameters with options of their own in GlobalOptimManager, which shards do not have; give them a group of their own"  # noqa: E501
            if named - registered.keys() or any(config != _FLOAT32_OPTIONS for config in registered.values())
            else None
        )  # fmt: skip
        if reason:
            raise OSDPError(f"{type(optimizer).__name__} {reason}.")
        spec = bitsandbytes_spec(
            optimizer.optimizer_name, args.optim_bits, device_type=device_type, least_quantized=args.min_8bit_size
        )
        return replace(spec, keeps_embeddings=bool(registered) and spec.is_quantized)

    @torch.no_grad()
    def before_step(self, groups: list[dict[str, Any]]) -> None:
        """Make a step quantize the same states as one process: by the size of whole parameters, and never for those
        whose modules are registered to keep states in float32.

        Empty shards are skipped, because no GPU can launch a kernel on them.
        """
        optimizer, plain = self.optimizer, self._overrides(groups)[1]
        optimizer.mng = object.__new__(type(optimizer.mng))
        optimizer.mng.initialize()
        for number, group in enumerate(optimizer.param_groups):
            for place, shard in enumerate(group["params"]):
                whole = getattr(shard, "whole", shard)
                full = _FLOAT32_OPTIONS if id(whole) in plain or whole.numel() < optimizer.args.min_8bit_size else {}
                optimizer.mng.pid2config[id(shard)] = {"min_8bit_size": 0, **full}
                if shard.grad is not None and not shard.numel():
                    if not optimizer.state[shard]:
                        optimizer.init_state(group, shard, number, place)
                    optimizer.state[shard]["step"] += 1
                    shard.grad = None

    def saved_states(self, parameter: nn.Parameter, shown: dict[str, Any]) -> dict[str, Any]:
        """Return each state in the shard's shape, which the state dict does not show; quantized ones in float32 on the
        host.
        """
        from bitsandbytes.functional import dequantize_blockwise

        states, shape = self.optimizer.state.get(parameter, {}), local(parameter).shape
        saved = {key: value for key, value in states.items() if not key.startswith(("state", "qmap", "absmax"))}
        for key in states.keys() & _STATE_KEYS:
            for name, codes, scales in _parts(states, key, shape):
                saved[name] = codes if scales is None else codes.float().cpu()
                if scales is not None and codes.numel():
                    saved[name] = dequantize_blockwise(
                        codes, absmax=scales, code=states[f"qmap{key[-1]}"], blocksize=_BLOCK_SIZE
                    ).cpu()
        return saved

    def load_states(self, parameter: nn.Parameter, saved: dict[str, Any]) -> dict[str, Any]:
        """Overwrite the states with saved ones, quantized as they are."""
        from bitsandbytes.functional import quantize_blockwise

        held: dict[str, Any] = self.optimizer.state.get(parameter, {})
        held |= {key: value for key, value in saved.items() if not key.startswith("state")}
        for key in held.keys() & _STATE_KEYS:
            for name, here, scales in _parts(held, key, local(parameter).shape):
                value = local(saved[name]).to(here.device)
                if scales is not None and here.numel():
                    value, found = quantize_blockwise(value, code=held[f"qmap{key[-1]}"], blocksize=_BLOCK_SIZE)
                    scales.copy_(found.absmax)
                here.copy_(value)
        return held

    def _overrides(self, groups: list[dict[str, Any]]) -> tuple[set[int], dict[int, object]]:
        """Return the `id`s of parameters with options of their own, and registered options by `id` (None unless of an
        embedding).
        """
        manager = type(self.optimizer.mng).get_instance()
        own = {id(parameter) for group in groups for parameter in group["params"]}
        registered = {
            id(dict.get(module._parameters, name)): config if isinstance(module, nn.Embedding) else None
            for module, name, config in manager.module_weight_config_triple
        }
        return own & manager.pid2config.keys(), {key: config for key, config in registered.items() if key in own}


def _parts(
    states: Mapping[str, Any], key: str, shape: torch.Size
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Yield each state's name in a checkpoint, its tensor and its block scales; AdEMAMix stores two means in one
    tensor.
    """
    value, scales = states[key], states.get(f"absmax{key[-1]}")
    if value.shape == shape:
        yield key, value, scales
    else:
        for number, name in enumerate((key, f"{key}_slow")):
            yield name, value[number], None if scales is None else scales[number]
