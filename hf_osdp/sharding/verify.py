"""Read the layout back from a sharded model, and compare it with the plan."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from ..distributed.collectives import TwoStageAllGather, TwoStageReduceScatter, flat_collectives
from ..distributed.mesh import world_size
from ..errors import PlanMismatchError
from ..modeling.activation_offload import is_offloaded
from ..modeling.compiled import is_compiled
from ..modeling.units import modules_by_name
from ..modeling.wrapping import recomputation_of
from ..planner.decision import UnitDecision
from ..planner.description import Activations, GatherSpan, UnitDescription
from ..planner.plan import Plan
from .apply import effective
from .host_offload import parameter_groups


def verify_applied(model: nn.Module, plan: Plan, units: tuple[UnitDescription, ...]) -> None:
    """Refuse to train in another layout than the plan's.

    Raises:
        PlanMismatchError: names the first unit that differs, and how many do.
    """
    modules = modules_by_name(model)
    different = [
        (unit, planned, found)
        for unit, found in zip(units, read_back(model, units), strict=True)
        if _managed(unit) and found != (planned := _visible(effective(plan.decision(unit.fqn), unit), modules[unit.module_names[0]]))
    ]
    if different:
        unit, planned, found = different[0]
        raise PlanMismatchError(
            f"Unit {unit.label!r} runs as {found.describe(plan.world_size)!r}, but the plan says"
            f" {planned.describe(plan.world_size)!r} ({len(different)} of {len(units)} units differ);"
            " apply the plan to a fresh model and do not change its layout afterwards."
        )
    for unit in units:
        compiles = unit.class_name in plan.compiled_classes and unit.span is GatherSpan.USE
        if is_compiled(modules[unit.module_names[0]]) is not compiles:
            has, says = ("is not", "compiles it") if compiles else ("is", "does not compile it")
            raise PlanMismatchError(f"Unit {unit.label!r} {has} compiled, but the plan {says}; apply the plan to a fresh model.")


def read_back(model: nn.Module, units: tuple[UnitDescription, ...]) -> tuple[UnitDecision, ...]:
    """Return what FSDP2 really does with each unit of a model after `apply_plan`.

    A unit without parameters has no layout; it reads as sharded over all and kept, as does one that one process trains as it is.

    Raises:
        PlanMismatchError: a unit is not sharded, lies on a mesh that is not this world, or holds other parameters.
    """
    modules = modules_by_name(model)
    names: dict[int, str] = {}
    owners: dict[tuple[int, str], str] = {}
    """(identity of the owning module, attribute) → the first name of the parameter."""
    for name, module in modules.items():
        module = getattr(module, "_checkpoint_wrapped_module", module)
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                owners[id(module), leaf] = names.setdefault(id(parameter), f"{name}.{leaf}".lstrip("."))
    return tuple(_read_unit(unit, modules[unit.module_names[0]], owners) for unit in units)


def _read_unit(unit: UnitDescription, module: nn.Module, owners: dict[tuple[int, str], str]) -> UnitDecision:
    world, expected, groups = world_size(), _managed(unit), parameter_groups(module)
    if not expected:
        return UnitDecision(fqn=unit.fqn, shard_size=world, reshard_after_forward=False)
    activations = Activations(recomputation=recomputation_of(module), offloads=is_offloaded(module))
    if world == 1 and not groups:  # plain parameters, see `apply_plan`
        return UnitDecision(fqn=unit.fqn, shard_size=1, reshard_after_forward=False, activations=activations)
    if len(groups) != 1:
        raise PlanMismatchError(f"Unit {unit.label!r} has {len(groups)} FSDP2 parameter groups instead of one; apply the plan to it.")
    group, mesh = groups[0], groups[0].mesh_info.mesh
    held = {owners.get((id(p._module_info.module), p._module_info.param_name), "") for p in group.fsdp_params}
    if odd := sorted(held ^ expected):
        raise PlanMismatchError(
            f"Unit {unit.label!r} was to hold {len(expected)} parameters and holds {len(held)}; first odd one: {odd[0]!r}."
        )
    if mesh.size() != world:
        raise PlanMismatchError(f"Unit {unit.label!r} lies on a mesh of {mesh.size()} ranks, but {world} are running.")
    return UnitDecision(
        fqn=unit.fqn,
        shard_size=mesh.size(mesh.ndim - 1),
        reshard_after_forward=group.post_forward_mesh_info is not None,
        stage_size=_stage_size(group),
        activations=activations,
        on_host=isinstance(group.offload_policy, CPUOffloadPolicy),
    )


def _visible(planned: UnitDecision, module: nn.Module) -> UnitDecision:
    """Return what the model shows of a decision: not what micro-steps do, nor the layout of a unit that one process trains as it is."""
    shown = replace(planned, reduce_every_micro_step=True)
    plain = world_size() == 1 and not planned.on_host and not parameter_groups(module)
    return replace(shown, reshard_after_forward=False) if plain else shown


def _managed(unit: UnitDescription) -> set[str]:
    """Return names of the parameters that FSDP2 has; those without dimensions are replicated beside it."""
    return {parameter.name for parameter in unit.parameters if parameter.shape}


def _stage_size(group: FSDPParamGroup) -> int:
    """Return the ranks of a node where a parameter group gathers and reduces in two stages, else 1."""
    mesh = group.mesh_info.mesh
    shards = mesh.get_group(mesh.ndim - 1)
    gather, scatter = group._all_gather_comm, group._reduce_scatter_comm
    if isinstance(gather, TwoStageAllGather) and isinstance(scatter, TwoStageReduceScatter):
        stages = gather.stages
        if stages == scatter.stages and shards.size() == stages.between.size() * stages.within.size():
            return stages.within.size()
    flat = tuple(type(collective) for collective in flat_collectives(shards, mesh.device_type))
    if shards.size() > 1 and (type(gather), type(scatter)) != flat:
        raise PlanMismatchError(
            f"A unit gathers by {type(gather).__name__} and reduces by {type(scatter).__name__}, which no plan has;"
            " apply the plan to a fresh model and do not change its collectives afterwards."
        )
    return 1
