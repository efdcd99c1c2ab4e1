"""The FSDP plugin of Accelerate, with a plan in place of one strategy for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from ..planner.description import DType
from ..planner.job import Precision
from ..profiling.units import class_of, dtype_of
from .config import OSDPConfig
from .launch import state_dict_type

_COMPUTE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class OSDPPlugin(FullyShardedDataParallelPlugin):
    """FSDP2 under a plan: what is sharded, over how many ranks, and when it is freed is decided unit by unit.

    All other fields are those of `FullyShardedDataParallelPlugin` (`state_dict_type`, `activation_checkpointing`,
    `cpu_offload`, `cpu_ram_efficient_loading`, `mixed_precision_policy`).

    Raises:
        ValueError: a field was set that the plan decides, or that FSDP2 does not have.
    """

    osdp: OSDPConfig | Mapping[str, object] = field(default_factory=OSDPConfig)
    """What to plan for."""

    def __post_init__(self) -> None:
        if not isinstance(self.osdp, OSDPConfig):
            self.osdp = OSDPConfig.from_options(self.osdp)
        if self.fsdp_version not in (None, 2):
            raise ValueError(f"fsdp_version={self.fsdp_version} cannot run a plan; leave it out or use 2.")
        decided = [name for name in ("reshard_after_forward", "sharding_strategy", "ignored_modules") if getattr(self, name) is not None]
        if decided:
            raise ValueError(f"{decided[0]} is for the plan to decide; leave it out, or use OSDPConfig(strategy=...).")
        self.fsdp_version = 2
        self.reshard_after_forward = True
        self.backward_prefetch = "NO_PREFETCH"
        self.auto_wrap_policy = self.auto_wrap_policy or "transformer_based_wrap"
        if self.state_dict_type is None:
            self.state_dict_type = state_dict_type()
        super().__post_init__()

    def set_mixed_precision(self, mixed_precision, buffer_autocast: bool = False, override: bool = False) -> None:
        """Compute in `mixed_precision` and reduce gradients in float32; activations keep the dtype that the model gives them."""
        if isinstance(mixed_precision, str) and mixed_precision in _COMPUTE_DTYPES:
            if override or self.mixed_precision_policy is None:
                self.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=_COMPUTE_DTYPES[mixed_precision], reduce_dtype=torch.float32)
            return
        super().set_mixed_precision(mixed_precision, buffer_autocast=buffer_autocast, override=override)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Used for activation checkpointing only; classes that this model lacks are left out instead of raising."""
        if isinstance(model, FSDPModule):
            return
        if self.transformer_cls_names_to_wrap:
            present = {class_of(module).__name__ for module in model.modules()}
            self.transformer_cls_names_to_wrap = [name for name in self.transformer_cls_names_to_wrap if name in present] or None
        super().set_auto_wrap_policy(model)


def precision_of(mixed_precision: str, policy: MixedPrecisionPolicy | None) -> Precision:
    """The planner's form of what FSDP2 will be told.

    Args:
        mixed_precision: Accelerate's name, `no`, `bf16` or `fp16`.
        policy: a policy that the user set, which counts before the name.

    Raises:
        ValueError: another name.
    """
    if policy is None:
        return Precision.named(mixed_precision)

    def planned(dtype: torch.dtype | None) -> DType | None:
        return None if dtype is None else dtype_of(dtype)

    return Precision(compute=planned(policy.param_dtype), reduce=planned(policy.reduce_dtype))
