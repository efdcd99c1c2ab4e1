"""State dicts of a split model and its optimizer with Hugging Face names, positions and shapes, and back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    """The dimension in which they lie one after the other, each of its size."""
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(sum(self.sizes[:index]) for index in range(len(self.sizes)))

    def is_like(self, value: object, sizes: Sequence[int]) -> bool:
        """Whether `value` has the parameter's dimensions, and one of `sizes` in the one that is split."""
        return torch.is_tensor(value) and value.ndim == len(self.shape) and value.shape[self.dim] in sizes


CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module"


def canonical_name(name: str) -> str:
    """Return the name of a module or parameter without the parts that torch's `checkpoint_wrapper` inserts."""
    return ".".join(part for part in name.split(".") if part != CHECKPOINT_WRAPPER)


def is_split(model: nn.Module) -> bool:
    """Whether operators are in slices."""
    return any(isinstance(module, SplitOperator) for module in model.modules())


def slice_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that are slices, each once, in the model's order; those of a tied head are its embedding's."""
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


def concatenated(parts: Sequence[torch.Tensor], whole: SlicedName) -> torch.Tensor:
    return torch.cat([part.detach() for part in parts], dim=whole.dim)


def merge_state_dict(state: Mapping[str, Any], model: nn.Module, *, join: Join = concatenated) -> dict[str, Any]:
    """Return a state dict with Hugging Face names and shapes; other entries than slices stay, order too.

    `join` makes one value of the slices, which tied names share. Raise OSDPError where slices of a parameter are missing.
    """
    return {name: value for names, value in _merge(state, _by_first_part(model), join) for name in names}


def split_state_dict(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the reverse of `merge_state_dict`; what is under a slice's own name already stays. Another shape is refused."""

    def split(value: torch.Tensor, whole: SlicedName) -> list[torch.Tensor]:
        if tuple(value.shape) != whole.shape:
            raise RuntimeError(f"size mismatch for {whole.name}: shape {tuple(value.shape)} was given, but the model's is {whole.shape}.")
        return _split_value(value, whole)

    return _split(state, split_names(model), split)


def merge_optimizer_state(state: Mapping[str, Any], model: nn.Module, *, join: Join = concatenated) -> dict[str, Any]:
    """Return an optimizer's state dict by parameter names, with Hugging Face names and shapes.

    `state` is as `get_optimizer_state_dict` gives it: `{"state": {name: {...}}, "param_groups": [{"params": [names], ...}]}`. `join` makes
    one value of the slices of a state tensor; a scalar, such as `step`, is that of the first slice.
    """

    def merged(states: Sequence[dict[str, Any]], whole: SlicedName) -> dict[str, Any]:
        columns = {key: [own[key] for own in states] for key in states[0]}
        return {key: join(values, whole) if whole.is_like(values[0], whole.sizes) else values[0] for key, values in columns.items()}

    first = _by_first_part(model)
    return {
        "state": {names[0]: own for names, own in _merge(state["state"], first, merged)},
        "param_groups": [{**group, "params": _merged_names(group["params"], first)} for group in state["param_groups"]],
    }


def split_optimizer_state(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the reverse of `merge_optimizer_state`; each slice gets its own copy of a scalar."""

    def column(value: object, whole: SlicedName) -> list[Any]:
        if isinstance(value, torch.Tensor) and whole.is_like(value, (whole.shape[whole.dim],)):
            return _split_value(value, whole)
        return [value.clone() if torch.is_tensor(value) else value for _ in whole.parts]

    def split(own: Mapping[str, Any], whole: SlicedName) -> list[dict[str, Any]]:
        columns = {key: column(value, whole) for key, value in own.items()}
        return [{key: values[index] for key, values in columns.items()} for index in range(len(whole.parts))]

    sliced = split_names(model)
    parts = {name: whole.parts for name, whole in sliced.items()}
    groups = [
        {**group, "params": [part for name in group["params"] for part in parts.get(name, (name,))]} for group in state["param_groups"]
    ]
    return {"state": _split(state["state"], sliced, split), "param_groups": groups}


def _by_first_part(model: nn.Module) -> dict[str, list[SlicedName]]:
    """Return names by their first slice, tied ones together in the model's order."""
    names: dict[str, list[SlicedName]] = {}
    for whole in split_names(model).values():
        names.setdefault(whole.parts[0], []).append(whole)
    return names


def _merge(values: Mapping[str, Any], first: Mapping[str, list[SlicedName]], join: Join) -> Iterator[tuple[list[str], Any]]:
    """Yield each value with its Hugging Face names, slices joined."""
    others = {part for wholes in first.values() for part in wholes[0].parts[1:]}
    for name, value in values.items():
        if name in first:
            whole = first[name][0]
            if missing := [part for part in whole.parts if part not in values]:
                raise OSDPError(f"{missing[0]!r} is not in the state, but {name!r} is; give all slices of {whole.name!r}.")
            yield [each.name for each in first[name]], join([values[part] for part in whole.parts], whole)
        elif name not in others:
            yield [name], value


def _merged_names(names: Iterable[str], first: Mapping[str, list[SlicedName]]) -> list[str]:
    return [found[0] for found, _ in _merge(dict.fromkeys(names), first, lambda values, whole: None)]


def _split(
    values: Mapping[str, Any], sliced: Mapping[str, SlicedName], split: Callable[[Any, SlicedName], Sequence[Any]]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= {name: value} if name not in sliced else dict(zip(sliced[name].parts, split(value, sliced[name]), strict=True))
    return found


def _split_value(value: torch.Tensor, whole: SlicedName) -> list[torch.Tensor]:
    """Return the slices of a whole value; of one that already knows its slices, those."""
    parts = getattr(value, "parts", None)
    # Contiguous: torch broadcasts the memory of what it is given, whatever the strides.
    return list(parts) if parts is not None else [part.contiguous() for part in torch.split(value, list(whole.sizes), whole.dim)]


def keep_names(model: nn.Module) -> None:
    """Let `state_dict` and `load_state_dict` of a model that is not sharded have Hugging Face names and shapes."""
    if any(hook is _merge_hook for hook in model._state_dict_hooks.values()):
        return
    model.register_state_dict_post_hook(_merge_hook)
    model.register_load_state_dict_pre_hook(_split_hook)


def _merge_hook(model: nn.Module, state: dict[str, Any], prefix: str, local_metadata: object) -> None:
    # sharded: torch's functions for such models look slices up by their own names
    if not any(hasattr(value, "placements") for name, value in state.items() if name.startswith(prefix)):
        _replace(state, prefix, lambda own: merge_state_dict(own, model))


def _split_hook(model: nn.Module, state: dict[str, Any], prefix: str, *others: object) -> None:
    _replace(state, prefix, lambda own: split_state_dict(own, model))


def _replace(state: dict[str, Any], prefix: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    changed = change({name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)})
    for name in [name for name in state if name.startswith(prefix)]:
        del state[name]
    state.update({prefix + name: value for name, value in changed.items()})


def keep_positions(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Let `state_dict` and `load_state_dict` of an optimizer of a split model have the positions of the whole model's parameters.

    In each group all slices of a parameter must follow one another. Where parameters are sharded nothing changes: torch's functions for
    those use names.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if not _positions(optimizer):
        hooks = _Positions(model)
        optimizer.register_state_dict_post_hook(hooks.merged)
        optimizer.register_load_state_dict_pre_hook(hooks.split)


@contextmanager
def own_positions(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within, the optimizer's state dicts have the slices' positions, which torch's functions that use names expect."""
    found = _positions(optimizer)
    for hooks in found:
        hooks.active = False
    try:
        yield
    finally:
        for hooks in found:
            hooks.active = True


def at_positions(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by positions in the order of its groups, from one by names."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    return _renamed(state, {name: position for position, name in enumerate(names)})


def _renamed(state: Mapping[str, Any], new: Mapping[Any, Any]) -> dict[str, Any]:
    groups = [{**group, "params": [new[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {new[name]: own for name, own in state["state"].items()}, "param_groups": groups}


def _positions(optimizer: torch.optim.Optimizer) -> list[_Positions]:
    hooks = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_state_dict_post_hooks.values())
    return [owner for owner in hooks if isinstance(owner, _Positions)]


class _Positions:
    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.active = True

    def merged(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Turn positions of slices into those of whole parameters; for `register_state_dict_post_hook`."""
        model, own = self._names(optimizer)
        return None if model is None else at_positions(merge_optimizer_state(_renamed(state, dict(enumerate(own))), model))

    def split(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Turn positions of whole parameters into those of slices; for `register_load_state_dict_pre_hook`."""
        model, own = self._names(optimizer)
        names = [] if model is None else _merged_names(own, _by_first_part(model))
        if model is None or sum(len(group["params"]) for group in state["param_groups"]) != len(names):
            return None  # torch says what does not fit
        return at_positions(split_optimizer_state(_renamed(state, dict(enumerate(names))), model))

    def _names(self, optimizer: torch.optim.Optimizer) -> tuple[nn.Module | None, list[str]]:
        """Return the model, None where nothing is to be done, and the parameters' names by position."""
        model = self._model() if self.active else None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = {} if model is None else {parameter: canonical_name(name) for name, parameter in model.named_parameters()}
        if not all(parameter in names and not hasattr(parameter, "placements") for parameter in parameters):
            return None, []
        return model, [names[parameter] for parameter in parameters]
