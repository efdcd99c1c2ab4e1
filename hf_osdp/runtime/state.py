"""A sharded model's weights as Hugging Face stores them, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..profiling.units import canonical_name


def free_gathered(model: nn.Module) -> None:
    """Show shards everywhere. After a forward without backward, units that are kept go on showing gathered parameters; an
    optimizer made from those would update what nobody reads."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole weights under their Hugging Face names. Collective; one parameter at a time is whole on the device.

    Args:
        model: a sharded or a plain model, between steps.

    Returns:
        On rank 0 CPU copies (later steps do not change them; tied weights stay one tensor), on other ranks an empty dict.
    """
    keep = not dist.is_initialized() or dist.get_rank() == 0
    copies: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    # keep_vars: the parameters themselves, by whose identity ties are known.
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in copies:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            copies[id(value)] = whole.detach().to("cpu", copy=True) if keep else torch.empty(0)
        state[canonical_name(name)] = copies[id(value)]
    return state if keep else {}


def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
    """Load whole weights into a sharded or a plain model. Collective.

    Args:
        model: the model; its layout does not matter.
        state: Hugging Face names → whole tensors; only rank 0's content counts.
        strict: refuse missing and unexpected names.

    Raises:
        RuntimeError: names or shapes do not fit.
    """
    if not isinstance(model, FSDPModule):
        model.load_state_dict(dict(state), strict=strict)
        return
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.get_world_size() > 1, strict=strict)
    set_model_state_dict(model, dict(state) if dist.get_rank() == 0 else {}, options=options)
