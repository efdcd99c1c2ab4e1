"""Models beside the trained one, such as a reference or a teacher, which only run forward: on each device whole, or
in shards if the plan needs their memory.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..distributed.fsdp_internals import parameter_groups, stays_gathered
from ..distributed.mesh import rank, world_size
from ..errors import DescriptionError, shown
from ..measurement.timing import over_ranks
from ..modeling.units import find_units
from ..planner.cost.evaluation import EvaluatedModel
from ..planner.decision import Batch, UnitLayout
from ..planner.description import DType, ModelDescription, Segment
from ..planner.plan import Plan
from ..planner.training_job import TrainingJob
from ..quantities import format_bytes
from ..sharding.apply import apply_plan
from ..sharding.environment import move_to_device
from ..sharding.replicas import is_under_plan
from .job import OTHER_TENSORS, Beside

_log = logging.getLogger(__name__)


_FEW_BYTES = 64 * 2**20
"""Up to so much, such as workspaces of matrix products, is within a limit's margin."""


def modules_in(value: object) -> Iterator[nn.Module]:
    """Yield the modules that a value is, or holds in containers."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, nn.Module))


def tensors_in(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _bytes_on_device(module: nn.Module, seen: set[int]) -> int:
    """Return the bytes of tensors not seen yet, and of the gathered parameters of an FSDP2 root that stays gathered
    after forward.
    """
    new = [tensor for tensor in tensors_in(module) if id(tensor) not in seen]
    seen.update(id(tensor) for tensor in new)
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in new]
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in local)
    if new and stays_gathered(module):
        for parameter in (parameter for group in parameter_groups(module) for parameter in group.fsdp_params):
            dtype = getattr(parameter, "param_dtype", None) or parameter.sharded_param.dtype
            nbytes += parameter.sharded_param.shape.numel() * dtype.itemsize
    return nbytes


def other_tensors(device: torch.device, models: Iterable[nn.Module]) -> dict[str, int]:
    """Return the bytes of tensors on a GPU that do not belong to these models, if they are many: what this process
    keeps there beside the training. Collective.
    """
    if device.type != "cuda":
        return {}
    held = {id(t): t for model in models for t in tensors_in(model) if t.device == device}
    owned = sum(tensor.nbytes + (0 if tensor.grad is None else tensor.grad.nbytes) for tensor in held.values())
    if torch.cuda.memory_allocated(device) - owned > _FEW_BYTES:
        gc.collect()  # an earlier training in a notebook
    (most,) = over_ranks([torch.cuda.memory_allocated(device) - owned])
    if most <= _FEW_BYTES:
        return {}
    if rank() == 0:
        _log.warning("%s of tensors of this program are on the device already: plans leave them that.",
                     format_bytes(most))  # fmt: skip
    return {OTHER_TENSORS: int(most)}


class ModelsBeside:
    """Models of several processes that wait for the plan, which says whether they are sharded."""

    def __init__(self, device: torch.device, models: Iterable[nn.Module] = ()) -> None:
        self._device = device
        self._waiting: dict[nn.Module, RemovableHandle] = {}
        self._placed = WeakSet[nn.Module]()
        for model in models:
            if not isinstance(model, nn.Module):
                raise ValueError(f"OSDPConfig(also={shown(model)}) must hold models.")
            self.add(model)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out weak references, which cannot be pickled, as an accelerator is."""
        return {name: value for name, value in vars(self).items() if name != "_placed"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _placed=WeakSet())

    def add(self, model: nn.Module) -> None:
        """Let a model wait for the plan; one that runs before is whole from then on."""
        if model not in self._waiting and not any(map(is_under_plan, model.modules())):
            self._waiting[model] = model.register_forward_pre_hook(self._runs)

    def bytes(self) -> Beside | None:
        """Return what the models take whole and in shards; None if there are none that gain by it."""
        sharded = self._sharded
        whole = sum(tensor.nbytes for model in sharded for tensor in tensors_in(model))
        standing = [one.standing_bytes for one in sharded.values()]
        held = sum(own for own, _ in standing)
        most = max((gathers for _, gathers in standing), default=0)  # they run one after the other
        if held + most >= whole:
            return None
        units = [unit for one in sharded.values() for unit in one.description.units]
        gathered = tuple(sum(p.numel * p.dtype.itemsize for p in unit.parameters) for unit in units)
        return Beside(whole_bytes=whole, sharded_bytes=held, gathers_bytes=most, gathered_bytes=gathered)

    @property
    def _sharded(self) -> dict[nn.Module, EvaluatedModel]:
        """The models that can be sharded, as they then run; others have dtypes that no plan knows."""
        found = {}
        for model in self._waiting if world_size() > 1 else ():
            with suppress(DescriptionError):
                found[model] = _as_sharded(model)
        return found

    def facts(self, trained: nn.Module, held: Mapping[str, Iterable[nn.Module]] | None = None) -> dict[str, Any]:
        """Return what a `Job` knows of the models beside the trained one: those that wait for the plan, and others
        that a Trainer has `held` in its attributes, of which sharded ones count with their shards. Collective.
        """
        for part in trained.modules():  # which the plan itself places
            if part in self._waiting:
                self._waiting.pop(part).remove()
        models = {name: list(group) for name, group in (held or {}).items()} | {"models beside": [*self._waiting]}
        seen = {id(tensor) for tensor in tensors_in(trained)}
        found = {name: sum(_bytes_on_device(model, seen) for model in group) for name, group in models.items()}
        others = {name: nbytes for name, nbytes in found.items() if nbytes}
        others |= other_tensors(self._device, [trained, *chain(*models.values())])
        return {"other_models": others, "models_beside": self.bytes()}

    def placed_tensors(self) -> list[torch.Tensor]:
        """Return what the models have on the device."""
        return [tensor for model in self._placed for tensor in tensors_in(model)]

    def place(self, *, sharded: bool) -> None:
        """Move the models to the device, whole or in shards. Collective."""
        shards = self._sharded if sharded else {}
        for model in list(self._waiting):
            self._place(model, shards.get(model))

    def _runs(self, module: nn.Module, args: object) -> None:
        if module in self._waiting:  # and is not a copy
            self._place(module)

    def _place(self, model: nn.Module, sharded: EvaluatedModel | None = None) -> None:
        self._waiting.pop(model).remove()
        if sharded is not None:
            description, batch = sharded.description, Batch(micro_batch_size=1, accumulation_steps=1)
            plan = Plan.of(description, sharded.layouts, batch, world_size=sharded.world_size, strategy="fsdp")
            apply_plan(model, plan, description.units)
        move_to_device(model, self._device)
        self._placed.add(model)


def _as_sharded(model: nn.Module) -> EvaluatedModel:
    """Return a model as it runs forward in shards over all ranks, in its parameters' own dtypes."""
    units = find_units(model)
    order = (*range(len(units)), *([0] if len(units) > 1 and not units[0].fqn else []))  # the root's own work ends it
    description = ModelDescription(
        model_name="", model_class=type(model).__name__, block_classes=(), sequence_length=1,
        compute_dtype=DType.FLOAT32, units=units, segments=tuple(Segment(unit=index) for index in order),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
    )  # fmt: skip
    return EvaluatedModel(
        description=description, world_size=world_size(),
        layouts=(UnitLayout(shard_size=world_size(), reshard_after_forward=True),) * len(units),
        job=TrainingJob(global_batch_size=world_size()), trains=False,
    )  # fmt: skip
