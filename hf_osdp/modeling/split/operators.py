"""Replace operators of a model by operators in slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import nn

from ...errors import OSDPError
from ...planner.split import OperatorSplit
from ..parts import canonical_name
from ..units import embedding_and_head
from .modules import SplitLinear, is_conv1d


def split_operators(model: nn.Module, splits: Sequence[OperatorSplit]) -> None:
    """Split operators into slices, in place, before the model is sharded.

    An `nn.Linear` or a GPT-2 `Conv1D` becomes a `SplitLinear`; `hf_osdp.sharding.state` has whole parameters.

    Raise OSDPError if an operator cannot be split; the model is then unchanged.
    """
    modules = {canonical_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    for split in splits:
        if problem := _problem(model, modules.get(split.fqn), split.slices):
            raise OSDPError(
                f"{split.fqn!r} {problem}, and cannot be split into {split.slices} slices; leave it whole."
            )
    for split in splits:
        whole = modules[split.fqn]
        _replace(model, whole, SplitLinear(whole, split.slices))


def _problem(model: nn.Module, module: nn.Module | None, slices: int) -> str:
    """Return why a module cannot be split; empty if it can. Of subclasses slices would not run the code."""
    if module is None or not (type(module) is nn.Linear or is_conv1d(module)):
        return f"is {'absent' if module is None else type(module).__name__}, not nn.Linear or GPT-2's Conv1D"
    weight, own = cast(nn.Parameter, module.weight), set(map(id, module._parameters.values())) - {id(None)}
    others = (other for other in model.modules() if other is not module)
    problems = {
        "is sharded already": hasattr(weight, "placements"),
        "has fewer output features": weight.shape[1 if is_conv1d(module) else 0] < slices,
        "has hooks, which slices would not call": module._forward_hooks or module._forward_pre_hooks
        or module._backward_hooks or module._backward_pre_hooks,
        "is the vocabulary projection": embedding_and_head(model)[1] is module,
        "shares its weight or bias": any(own & set(map(id, other._parameters.values())) for other in others),
    }  # fmt: skip
    return next((problem for problem, holds in problems.items() if holds), "")


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = new
