"""`OSDPPlugin`: Accelerate's FSDP plugin with a plan instead of one strategy; the options of FSDP and of
`torch.compile` that it accepts or refuses, and how a Trainer's arguments ask for it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from ..distributed.launcher import variable
from ..errors import refuse_first, shown
from ..preparation.config import OSDPConfig, merged_config, stated_options
from ..reading import read_json
from .launch import launch_request

if TYPE_CHECKING:
    from transformers import TrainingArguments  # it imports peft

TAKEN = ("cpu_offload", "cpu_ram_efficient_loading", "state_dict_type", "activation_checkpointing")
"""Fields of the base class that a plan follows, by their names in `TrainingArguments.fsdp_config` too."""
DECIDED = {
    "sharding_strategy": "use OSDPConfig(strategy=...)",
    "reshard_after_forward": "use OSDPConfig(strategy=...) in its place, or in that of fsdp='shard_grad_op'",
    **dict.fromkeys(
        (
            "auto_wrap_policy", "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap", "min_num_params",
            "ignored_modules",
        ), "use OSDPConfig(block_classes=...)",
    ),
    **dict.fromkeys(
        (
            "backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params", "sync_module_states",
            "param_init_fn",
        ), "leave it out, FSDP2 under a plan has no such option",
    ),
}  # fmt: skip
"""Options of FSDP that have no effect under a plan → what to use instead."""

_ADDED_BY_TRANSFORMERS = {
    **dict.fromkeys(("min_num_params", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"), 0), "reshard_after_forward": True,
}  # fmt: skip
"""Entries that transformers itself adds to `fsdp_config`, for `fsdp="full_shard"` too, with values that ask for
nothing.
"""


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


def requested_options(
    osdp: OSDPConfig | Mapping[str, object] | bool | None,
    args: TrainingArguments,
    *,
    on_by_default: bool = False,
) -> dict[str, object] | None:
    """Return the options that the Trainer's `osdp` and `fsdp_config` set, for `OSDPPlugin`, which adds those of the
    launcher; None for the stock Trainer.

    The first of the three that sets it turns OSDP on or off, else `on_by_default` does; each option comes from the
    first that sets it.
    """
    if osdp is False:
        return None
    fsdp_config = _fsdp_config(args)
    here, launched = fsdp_config.get("osdp"), launch_request().osdp
    refuse_first({
        f"osdp={shown(osdp)} is of type {type(osdp).__name__}; use True, False, an OSDPConfig or a mapping of its"
        " fields.": osdp not in (None, True) and not isinstance(osdp, (OSDPConfig, Mapping)),
        f"fsdp_config has osdp={shown(here)}; use true, false or a mapping of options.":
            here is not None and not isinstance(here, (bool, Mapping)),
    })  # fmt: skip
    if osdp is None and (here is False or (here is None and not (on_by_default if launched is None else launched))):
        return None
    _refuse_ignored(fsdp_config)
    places = (place for place in (here, osdp) if not isinstance(place, bool))
    options = {name: value for place in places for name, value in stated_options(place).items()}
    if args.torch_compile and options.get("compile") is False:
        raise ValueError("torch_compile=True contradicts compile=False in OSDP's options; leave one of the two out.")
    return options


def _refuse_ignored(fsdp_config: Mapping[str, Any]) -> None:
    """Refuse entries of `fsdp_config` that would have no effect; accept those that transformers adds itself."""
    if fsdp_config.get("version", 2) not in (2, "2"):
        raise ValueError(
            f"fsdp_config has version={fsdp_config['version']!r}, which cannot run a plan; leave it out or use 2."
        )
    set_here = {
        name: value
        for name, value in fsdp_config.items()
        if name not in _ADDED_BY_TRANSFORMERS or value not in (_ADDED_BY_TRANSFORMERS[name], None)
    }
    refuse_decided(set_here)
    known = ("osdp", "version", "auto_wrap_policy", *TAKEN)
    refuse_first({
        f"fsdp_config has {name}={shown(value)}, which has no effect under a plan; leave it out (allowed:"
        f" {', '.join(known)}; options of OSDPConfig go into osdp).": name not in known and value is not None
        for name, value in set_here.items()
    })  # fmt: skip


def requested_plugin(
    osdp: OSDPConfig | Mapping[str, object] | bool | None,
    args: TrainingArguments,
    model: nn.Module | None,
    *,
    on_by_default: bool,
) -> OSDPPlugin | None:
    """Return the plugin with all that a Trainer is given, or refuse what no plan can be made for; None for the stock
    Trainer.
    """
    options = requested_options(osdp, args, on_by_default=on_by_default)
    if options is None:
        return None
    full = next((name for name in ("bf16_full_eval", "fp16_full_eval") if getattr(args, name)), "")
    refuse_first({
        "OSDP plans for one model; pass model=... instead of model_init.": model is None,
        "deepspeed and OSDP both decide how the model is sharded; leave one of them out.": args.deepspeed,
        f"{full}=True converts the weights for evaluation, which FSDP2's shards do not allow; leave it out:"
        f" {full.partition('_')[0]}=True computes evaluations in that precision too.":
            full and args.world_size > 1,
        "The Trainer was given torch.compile(model); give it the model itself, and torch_compile=True in its"
        " arguments.": model is not None and compiled_modules(model),
    })  # fmt: skip
    stated = {**(args.fsdp_plugin_args or {}), **({} if args.fsdp else _fsdp_config(args))}
    return OSDPPlugin(osdp=options, **{name: stated[name] for name in TAKEN if name in stated})


def _fsdp_config(args: TrainingArguments) -> dict[str, Any]:
    """Return `TrainingArguments.fsdp_config` as a dict; transformers does not read it from a file unless `fsdp` is
    set.
    """
    config = args.fsdp_config
    if isinstance(config, str):
        path, config = config, read_json(config, "fsdp_config")
        if not isinstance(config, dict):
            raise ValueError(
                f"fsdp_config={path!r} holds a {type(config).__name__}; it must map option names to values."
            )
    return {str(name).removeprefix("fsdp_"): value for name, value in (config or {}).items()}
