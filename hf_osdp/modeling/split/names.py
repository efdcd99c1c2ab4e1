"""State dicts of a split model and its optimizer with Hugging Face names and shapes, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import OSDPError
from .modules import SplitOperator

Join = Callable[[Sequence[Any], "SlicedName"], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedName:
    """A parameter as Hugging Face stores it, and where its slices are."""

    name: str
    parts: tuple[str, ...]
    """Names of the slices, in order."""
    dim: int
    """The dimension in which they lie one after the other."""
    sizes: tuple[int, ...]
    """Of each slice in that dimension."""
    shape: tuple[int, ...]
    """Of the whole."""

    @property
    def starts(self) -> tuple[int, ...]:
        """Positions at which the slices begin."""
        return tuple(sum(self.sizes[:index]) for index in range(len(self.sizes)))

    def is_like(self, value: object, sizes: Sequence[int]) -> bool:
        """Whether `value` has the parameter's dimensions, and one of `sizes` in the one that is split."""
        return torch.is_tensor(value) and value.ndim == len(self.shape) and value.shape[self.dim] in sizes


CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module"


def canonical_name(name: str) -> str:
    """Return the name of a module or parameter without the parts that torch's `checkpoint_wrapper` inserts."""
    return ".".join(part for part in name.split(".") if part != CHECKPOINT_WRAPPER)


def is_split(model: nn.Module) -> bool:
    """Whether an operator of the model is in slices."""
    return any(isinstance(module, SplitOperator) for module in model.modules())


def slice_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that are slices, each once, in the model's order; those of a tied head are its embedding's.

    FSDP2 is to make each of them a unit: they are called one by one, those of a head outside of the head's own forward.
    """
    slices = {id(part) for module in model.modules() if isinstance(module, SplitOperator) for part in module.slices}
    return tuple(canonical_name(name) for name, module in model.named_modules() if id(module) in slices)


def split_names(model: nn.Module) -> dict[str, SlicedName]:
    """Return each parameter that is in slices, by its Hugging Face name; names of tied weights have the same slices."""
    modules = [(canonical_name(name), module) for name, module in model.named_modules(remove_duplicate=False)]
    home: dict[int, str] = {}
    for name, module in modules:
        home.setdefault(id(module), name)
    found = {}
    for prefix, module in modules:
        if not isinstance(module, SplitOperator):
            continue
        for leaf, dim in module.leaves.items():
            shape = list(next(module.parts(leaf)).shape)
            shape[dim] = sum(module.sizes)
            parts = tuple(f"{home[id(part)]}.{leaf}" for part in module.slices)
            name = f"{prefix}.{leaf}"
            found[name] = SlicedName(name=name, parts=parts, dim=dim, sizes=module.sizes, shape=tuple(shape))
    return found


def _by_first_part(model: nn.Module) -> tuple[dict[str, list[SlicedName]], set[str]]:
    """Return names by their first slice, tied ones together in the model's order; and the other slices."""
    names: dict[str, list[SlicedName]] = {}
    for whole in split_names(model).values():
        names.setdefault(whole.parts[0], []).append(whole)
    return names, {part for wholes in names.values() for part in wholes[0].parts[1:]}


def concatenated(parts: Sequence[torch.Tensor], whole: SlicedName) -> torch.Tensor:
    """Join slices to one tensor."""
    return torch.cat([part.detach() for part in parts], dim=whole.dim)


def merge_state_dict(state: Mapping[str, Any], model: nn.Module, *, join: Join = concatenated) -> dict[str, Any]:
    """Return a state dict with Hugging Face names and shapes.

    Args:
        state: with slices under their own names; other entries stay, order too.
        model: the split model.
        join: makes one value of the slices; by default tensors, whole and local, are concatenated. Tied weights stay one.

    Raises:
        OSDPError: some slices of a parameter are missing.
    """
    first, others = _by_first_part(model)
    merged: dict[str, Any] = {}
    for name, value in state.items():
        if name in first:
            whole = first[name][0]
            if missing := [part for part in whole.parts if part not in state]:
                raise OSDPError(f"{missing[0]!r} is not in the state, but {name!r} is; give all slices of {whole.name!r}.")
            merged.update(dict.fromkeys((each.name for each in first[name]), join([state[part] for part in whole.parts], whole)))
        elif name not in others:
            merged[name] = value
    return merged


def split_state_dict(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the reverse of `merge_state_dict`; what is under a slice's own name already stays.

    Raises:
        RuntimeError: a whole tensor has another shape than the model's.
    """
    sliced = split_names(model)
    split: dict[str, Any] = {}
    for name, value in state.items():
        if name not in sliced:
            split[name] = value
            continue
        whole = sliced[name]
        if tuple(value.shape) != whole.shape:
            raise RuntimeError(f"size mismatch for {name}: shape {tuple(value.shape)} was given, but the model's is {whole.shape}.")
        split.update(zip(whole.parts, _split_value(value, whole), strict=True))
    return split


def _split_value(value: torch.Tensor, whole: SlicedName) -> list[torch.Tensor]:
    """Return the slices of a whole value; of one that already knows its slices, those."""
    parts = getattr(value, "parts", None)
    # Contiguous: torch broadcasts the memory of what it is given, whatever the strides.
    return list(parts) if parts is not None else [part.contiguous() for part in torch.split(value, list(whole.sizes), whole.dim)]


def merge_optimizer_state(state: Mapping[str, Any], model: nn.Module, *, join: Join = concatenated) -> dict[str, Any]:
    """Return an optimizer's state dict by parameter names, with Hugging Face names and shapes.

    Args:
        state: `{"state": {name: {...}}, "param_groups": [{"params": [names], ...}]}`, as `get_optimizer_state_dict` gives it.
        model: the split model.
        join: makes one value of the slices of a state tensor; a scalar, such as `step`, is that of the first slice.
    """
    first, others = _by_first_part(model)

    def renamed(name: str) -> str:
        return first[name][0].name if name in first else name

    def merged(whole: SlicedName) -> dict[str, Any]:
        states = [state["state"][part] for part in whole.parts]
        columns = {key: [own[key] for own in states] for key in states[0]}
        return {key: join(values, whole) if whole.is_like(values[0], whole.sizes) else values[0] for key, values in columns.items()}

    return {
        "state": {
            renamed(name): merged(first[name][0]) if name in first else own for name, own in state["state"].items() if name not in others
        },
        "param_groups": [
            {**group, "params": [renamed(name) for name in group["params"] if name not in others]} for group in state["param_groups"]
        ],
    }


def split_optimizer_state(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the reverse of `merge_optimizer_state`; each slice gets its own copy of a scalar."""
    sliced = split_names(model)

    def values(value: object, whole: SlicedName) -> list[Any]:
        if isinstance(value, torch.Tensor) and whole.is_like(value, (whole.shape[whole.dim],)):
            return _split_value(value, whole)
        return [value.clone() if torch.is_tensor(value) else value for _ in whole.parts]

    states: dict[str, Any] = {}
    for name, own in state["state"].items():
        if name not in sliced:
            states[name] = own
            continue
        whole = sliced[name]
        columns = {key: values(value, whole) for key, value in own.items()}
        states.update({part: {key: column[index] for key, column in columns.items()} for index, part in enumerate(whole.parts)})
    parts = {name: whole.parts for name, whole in sliced.items()}
    groups = [
        {**group, "params": [part for name in group["params"] for part in parts.get(name, (name,))]} for group in state["param_groups"]
    ]
    return {"state": states, "param_groups": groups}


def keep_names(model: nn.Module) -> None:
    """Let `state_dict` and `load_state_dict` of a model that is not sharded have Hugging Face names and shapes."""
    if any(hook is _merge_hook for hook in model._state_dict_hooks.values()):
        return
    model.register_state_dict_post_hook(_merge_hook)
    model.register_load_state_dict_pre_hook(_split_hook)


def _merge_hook(model: nn.Module, state: dict[str, Any], prefix: str, local_metadata: object) -> None:
    own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    if any(hasattr(value, "placements") for value in own.values()):
        return  # sharded: torch's functions for such models look slices up by their own names
    merged = merge_state_dict(own, model)
    for name in own:
        del state[prefix + name]
    state.update({prefix + name: value for name, value in merged.items()})


def _split_hook(model: nn.Module, state: dict[str, Any], prefix: str, *others: object) -> None:
    own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    for name in own:
        del state[prefix + name]
    state.update({prefix + name: value for name, value in split_state_dict(own, model).items()})
