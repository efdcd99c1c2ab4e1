"""`OSDPPlugin`: Accelerate's FSDP plugin with a plan instead of one strategy, and the options of FSDP and of
`torch.compile` that it accepts or refuses.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from ..distributed.launcher import variable
from ..errors import refuse_first, shown
from ..preparation.config import OSDPConfig, merged_config
from .launch import launch_request

TAKEN = ("cpu_offload", "cpu_ram_efficient_loading", "state_dict_type", "activation_checkpointing")
"""Fields of the base class that a plan follows, by their names in `TrainingArguments.fsdp_config` too."""
_log = logging.getLogger(__name__)
_NOT_IN_FSDP2 = (
    "backward_prefetch",
    "forward_prefetch",
    "limit_all_gathers",
    "use_orig_params",
    "sync_module_states",
    "param_init_fn",
)
DECIDED = {
    "sharding_strategy": "use OSDPConfig(strategy=...)",
    "reshard_after_forward": "use OSDPConfig(strategy=...) in its place, or in that of fsdp='shard_grad_op'",
    **dict.fromkeys(
        (
            "auto_wrap_policy",
            "transformer_layer_cls_to_wrap",
            "transformer_cls_names_to_wrap",
            "min_num_params",
            "ignored_modules",
        ),
        "use OSDPConfig(block_classes=...)",
    ),
    **dict.fromkeys(_NOT_IN_FSDP2, "leave it out, FSDP2 under a plan has no such option"),
}
"""Options of FSDP that have no effect under a plan → what to use instead."""


@dataclass
class OSDPPlugin(FullyShardedDataParallelPlugin):
    """FSDP2 under a plan, which decides over how many ranks each unit is sharded and when its gathered parameters are
    freed.

    All other fields are those of `FullyShardedDataParallelPlugin` (`state_dict_type`, `activation_checkpointing`,
    `cpu_ram_efficient_loading`, `mixed_precision_policy`).

    Raises:
        ValueError: a field was set that the plan decides, or that FSDP2 does not have.
    """

    osdp: OSDPConfig | Mapping[str, object] = field(default_factory=OSDPConfig)
    """Options of the plan. Those not set here come from the file given to `accelerate launch`."""

    def __post_init__(self: Any) -> None:
        refuse_decided({name: getattr(self, name, None) for name in DECIDED})
        self.osdp = merged_config(self.osdp, launch_request().plan_options)
        if self.fsdp_version not in (None, 2):
            raise ValueError(f"fsdp_version={self.fsdp_version} cannot run a plan; leave it out or use 2.")
        self.fsdp_version = 2
        self.reshard_after_forward = True
        self.backward_prefetch = "NO_PREFETCH"  # otherwise the base class reads the launcher's default
        self.auto_wrap_policy = self.auto_wrap_policy or "transformer_based_wrap"
        layout = "SHARDED_STATE_DICT" if self.osdp.async_save else "FULL_STATE_DICT"
        self.state_dict_type = self.state_dict_type or variable("FSDP_STATE_DICT_TYPE", layout)
        super().__post_init__()
        refuse_first({
            "cpu_offload (fsdp_offload_params) is decided by the plan; leave it out, or use"
            " OSDPConfig(host_offload=True).": isinstance(self.cpu_offload, CPUOffloadPolicy),
            "activation_checkpointing_offload=True is not counted in a plan; leave it out, or use"
            " OSDPConfig(offload_activations=True).": getattr(self, "activation_checkpointing_offload", False),
            "async_save=True writes shards while training continues, but state_dict_type is FULL_STATE_DICT; use"
            " SHARDED_STATE_DICT, or leave async_save out.": self.osdp.async_save and not writes_shards(self),
        })  # fmt: skip

    @property
    def config(self) -> OSDPConfig:
        """The options of the plan, merged."""
        return cast("OSDPConfig", self.osdp)

    def set_mixed_precision(self, *args: object, **kwargs: object) -> None:
        """Leave the policy to the user: without one, the run's `Precision` says how to compute and reduce."""


def writes_shards(plugin: FullyShardedDataParallelPlugin) -> bool:
    return "FULL" not in str(plugin.state_dict_type)


def refuse_decided(options: Mapping[str, Any]) -> None:
    """Refuse options, by their FSDP names, that would otherwise be ignored; wrapping by class is accepted, since
    OSDP does it too, but not the names of classes.
    """
    for name, remedy in DECIDED.items():
        value = options.get(name)
        by_class = name == "auto_wrap_policy" and str(value).lower() == "transformer_based_wrap"
        by_default = name == "limit_all_gathers" and value is True
        if value is not None and not by_class and not by_default:
            raise ValueError(f"{name}={shown(value)} is decided by the plan; {remedy}.")


def compiled_modules(model: nn.Module) -> set[Any]:
    """Return the wrappers of `torch.compile(module)` around a model or its modules."""
    dynamo = sys.modules.get("torch._dynamo")  # without it nothing is wrapped
    return set() if dynamo is None else {m for m in model.modules() if isinstance(m, dynamo.OptimizedModule)}


def refuse_compiled(model: nn.Module) -> None:
    """Refuse a model with a wrapper of `torch.compile(module)`, below which names of parameters begin with
    `_orig_mod.`, also in files.
    """
    if compiled_modules(model):
        raise ValueError(
            "torch.compile(model) was given; give the model itself, and OSDPConfig(compile=True), which compiles its"
            " blocks."
        )
