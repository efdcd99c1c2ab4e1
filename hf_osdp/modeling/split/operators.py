"""Replace operators of a model by operators in slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import nn

from ...errors import OSDPError
from ...planner.split import OperatorSplit
from ..parts import canonical_name
from .modules import SplitLinear, is_conv1d
from .names import keep_names


def split_operators(model: nn.Module, splits: Sequence[OperatorSplit]) -> None:
    """Split operators into slices, in place, before the model is sharded.

    An `nn.Linear` or a GPT-2 `Conv1D` becomes a `SplitLinear`. `state_dict` and `load_state_dict` of the model keep
    Hugging Face names and shapes until it is sharded; then use `hf_osdp.sharding.state`.

    Raise ValueError if a name is not in the model, OSDPError if an operator cannot be split; the model is then
    unchanged.
    """
    modules = {canonical_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    for split in splits:
        _check(model, modules, split)
    for split in splits:
        whole = modules[split.fqn]
        _replace(model, whole, SplitLinear(whole, split.slices))
    if splits:
        keep_names(model)


def _check(model: nn.Module, modules: dict[str, nn.Module], split: OperatorSplit) -> None:
    """Raise ValueError or OSDPError if an operator cannot be split."""
    module = modules.get(split.fqn)
    if module is None:
        leaf = split.fqn.rpartition(".")[2]
        alike = next((name for name in modules if name.rpartition(".")[2] == leaf), None)
        remedy = f"did you mean {alike!r}?" if alike is not None else "take a name from named_modules()"
        raise ValueError(f"{split.fqn!r} is not a module of {type(model).__name__}; {remedy}.")
    _check_class(split, module)
    features = cast(nn.Parameter, module.weight).shape[1 if is_conv1d(module) else 0]
    if split.slices > features:
        raise ValueError(
            f"{split.fqn!r} has {features} output features, too few for {split.slices} slices; use at most {features}."
        )
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise OSDPError(
            f"{split.fqn!r} has hooks, which a split operator would not call; split before setting hooks, or leave it"
            " whole."
        )
    own = {id(parameter) for parameter in module._parameters.values() if parameter is not None}
    sharing = {
        canonical_name(name): other
        for name, other in model.named_modules()
        if other is not module and any(id(parameter) in own for parameter in other._parameters.values())
    }
    if any(getattr(m, "get_output_embeddings", lambda: None)() is module for m in model.modules()):
        raise OSDPError(f"{split.fqn!r} is the vocabulary projection; leave it whole, and take its loss in chunks.")
    if sharing:
        raise OSDPError(
            f"{split.fqn!r} shares its weight or bias with {next(iter(sharing))!r}, which is not split with it; leave"
            " it whole."
        )


def _check_class(split: OperatorSplit, module: nn.Module) -> None:
    """Refuse subclasses, because slices would not run their code, and operators that are already split or sharded."""
    if isinstance(module, SplitLinear):
        raise OSDPError(
            f"{split.fqn!r} is already in {len(module.sizes)} slices; split a model only once, after loading."
        )
    if any(hasattr(parameter, "placements") for parameter in module.parameters()):
        raise OSDPError(f"{split.fqn!r} is already sharded; split operators before the model is sharded.")
    if type(module) is not nn.Linear and not is_conv1d(module):
        raise OSDPError(
            f"{split.fqn!r} is a {type(module).__name__}, but only nn.Linear and GPT-2's Conv1D can be split; leave it"
            " whole."
        )


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = new
