"""Convert state dicts of a split model and its optimizer to Hugging Face names and shapes, and the latter back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ...errors import OSDPError
from ..parts import canonical_name
from .modules import SplitLinear

Join = Callable[[Sequence[Any], "WholeParameter"], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeParameter:
    """A parameter that is cut in parts, with its Hugging Face name and shape."""

    name: str
    parts: tuple[str, ...]
    """Names of the parts, in order."""
    dim: int
    """The dimension in which they are concatenated."""
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes[:-1], initial=0))

    def is_like(self, value: object, sizes: Sequence[int]) -> bool:
        """Whether `value` has as many dimensions as the parameter, and one of `sizes` in the split dimension."""
        return torch.is_tensor(value) and value.ndim == len(self.shape) and value.shape[self.dim] in sizes

    def cut(self, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the slices of a whole value; if the value already has `parts`, return those."""
        parts = getattr(value, "parts", None)
        # Contiguous, because torch broadcasts the memory of a tensor and ignores its strides.
        return (
            [part.contiguous() for part in torch.split(value, list(self.sizes), self.dim)] if parts is None else parts
        )


def is_split(model: nn.Module) -> bool:
    """Whether the model has operators in slices."""
    return any(isinstance(module, SplitLinear) for module in model.modules())


def whole_parameters(model: nn.Module) -> dict[str, WholeParameter]:
    """Return each parameter that is split, by its Hugging Face name; all names of a tied weight have the same
    slices.
    """
    home = {id(module): canonical_name(name) for name, module in model.named_modules()}
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, SplitLinear):
            continue
        for leaf, dim in module.leaves.items():
            shape = list(getattr(module.slices[0], leaf).shape)
            shape[dim] = sum(module.sizes)
            parts = tuple(f"{home[id(part)]}.{leaf}" for part in module.slices)
            name = f"{canonical_name(prefix)}.{leaf}"
            found[name] = WholeParameter(name=name, parts=parts, dim=dim, sizes=module.sizes, shape=tuple(shape))
    return found


def concatenated(parts: Sequence[torch.Tensor], whole: WholeParameter) -> torch.Tensor:
    return torch.cat([part.detach() for part in parts], dim=whole.dim)


def merge_state_dict(
    state: Mapping[str, Any], model: nn.Module, *, join: Join = concatenated, tied: bool = True
) -> dict[str, Any]:
    """Return a state dict with Hugging Face names and shapes; other entries and the order are unchanged.

    `join` combines the slices into one value, which is stored under all names of a tied weight if `tied`, else only
    under the first. Raise OSDPError if slices of a parameter are missing.
    """
    wholes: dict[str, list[WholeParameter]] = {}
    for whole in whole_parameters(model).values():
        wholes.setdefault(whole.parts[0], []).append(whole)
    others = {part for same in wholes.values() for part in same[0].parts[1:]}
    merged: dict[str, Any] = {}
    for name, value in state.items():
        if name in wholes:
            whole = wholes[name][0]
            if missing := [part for part in whole.parts if part not in state]:
                raise OSDPError(
                    f"{missing[0]!r} is not in the state, but {name!r} is; give all slices of {whole.name!r}."
                )
            joined = join([state[part] for part in whole.parts], whole)
            merged |= {same.name: joined for same in wholes[name][: None if tied else 1]}
        elif name not in others:
            merged[name] = value
    return merged


def merge_optimizer_state(state: Mapping[str, Any], model: nn.Module, *, join: Join = concatenated) -> dict[str, Any]:
    """Return an optimizer's state dict by parameter names, with Hugging Face names and shapes.

    `state` has the form of `get_optimizer_state_dict`: `{"state": {name: {...}}, "param_groups": [{"params": [names],
    ...}]}`. `join` combines the slices of a state tensor; a scalar, such as `step`, is taken from the first slice.
    """

    def merged(states: Sequence[dict[str, Any]], whole: WholeParameter) -> dict[str, Any]:
        columns = {key: [own[key] for own in states] for key in states[0]}
        return {
            key: join(values, whole) if whole.is_like(values[0], whole.sizes) else values[0]
            for key, values in columns.items()
        }

    groups = [{**group, "params": merged_names(group["params"], model)} for group in state["param_groups"]]
    return {"state": merge_state_dict(state["state"], model, join=merged, tied=False), "param_groups": groups}


def merged_names(names: Iterable[str], model: nn.Module, *, tied: bool = False) -> list[str]:
    """Return names of parameters with Hugging Face names in the place of slices, as `merge_state_dict` does."""
    return list(merge_state_dict(dict.fromkeys(names), model, join=lambda *_: None, tied=tied))


def split_optimizer_state(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Reverse `merge_optimizer_state`; each slice gets its own copy of a scalar."""
    sliced, found = whole_parameters(model), dict[str, Any]()
    for name, own in state["state"].items():
        whole = sliced.get(name)
        if whole is None:
            found[name] = own
            continue
        found |= {part: {} for part in whole.parts}
        for key, value in own.items():
            is_whole = whole.is_like(value, (whole.shape[whole.dim],))
            copies = (
                whole.cut(value)
                if is_whole
                else [value.clone() if torch.is_tensor(value) else value for _ in whole.parts]
            )
            for part, one in zip(whole.parts, copies, strict=True):
                found[part][key] = one
    groups = [
        {
            **group,
            "params": [
                part for name in group["params"] for part in (sliced[name].parts if name in sliced else (name,))
            ],
        }
        for group in state["param_groups"]
    ]
    return {"state": found, "param_groups": groups}


def renamed(state: Mapping[str, Any], new: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an optimizer's state with other keys of its parameters, such as names instead of positions."""
    groups = [{**group, "params": [new[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {new.get(name, name): own for name, own in state["state"].items()}, "param_groups": groups}
