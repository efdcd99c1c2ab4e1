"""How FSDP2 runs a model after `apply_plan`, read back from it, and compared with the plan."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from torch import nn

from hf_osdp.distributed.collectives import Stages, plain_transport, unit_collectives
from hf_osdp.distributed.fsdp_internals import AllGather, ParameterGroup, ReduceScatter, owners, parameter_groups
from hf_osdp.distributed.mesh import world_size
from hf_osdp.distributed.wire import EncodedReplicas, WireTransport, transports
from hf_osdp.errors import PlanMismatchError
from hf_osdp.modeling.activations import activations_of
from hf_osdp.modeling.units import modules_by_name
from hf_osdp.planner.decision import UnitDecision
from hf_osdp.planner.description import UnitDescription
from hf_osdp.planner.plan import Plan
from hf_osdp.planner.wire import Wires
from hf_osdp.sharding.apply import effective
from hf_osdp.sharding.host import place_of
from hf_osdp.sharding.replica_buckets import Parameters
from hf_osdp.sharding.replicas import replicas_of


def verify_applied(model: nn.Module, plan: Plan, units: tuple[UnitDescription, ...]) -> None:
    """Raise PlanMismatchError, which names the first unit that differs, if the model's layout is not the plan's."""
    modules = modules_by_name(model)
    different = []
    for unit, found in zip(units, read_back(model, units), strict=True):
        planned = _visible(effective(plan.decision(unit.fqn), unit), modules[unit.module_names[0]])
        if _managed_names(unit) and found != planned:
            different.append((unit, *(decision.describe(plan.world_size) for decision in (found, planned))))
    for unit, runs, planned in different[:1]:
        share = f"{len(different)} of {len(units)} units differ"
        raise PlanMismatchError(f"Unit {unit.label!r} runs as {runs!r}, but the plan says {planned!r} ({share}).")


def read_back(model: nn.Module, units: tuple[UnitDescription, ...]) -> tuple[UnitDecision, ...]:
    """Return how FSDP2 really runs each unit of a model after `apply_plan`.

    A unit without parameters has no layout; it is reported as sharded over all ranks and kept, like a plain unit in a
    single process.
    """
    modules = modules_by_name(model)
    names: dict[int, str] = {}
    named: dict[tuple[int, str], str] = {}
    """(`id` of the owning module, attribute) → the parameter's first name."""
    for name, module in modules.items():
        module = getattr(module, "_checkpoint_wrapped_module", module)
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                named[id(module), leaf] = names.setdefault(id(parameter), f"{name}.{leaf}".lstrip("."))
    replicas = replicas_of(model)
    plain = [] if replicas is None else replicas.parameters
    return tuple(_read_unit(unit, modules[unit.module_names[0]], named, plain) for unit in units)


def _read_unit(
    unit: UnitDescription, module: nn.Module, named: dict[tuple[int, str], str], plain: list[Parameters]
) -> UnitDecision:
    world, expected, groups = world_size(), _managed_names(unit), parameter_groups(module)
    if not expected:
        return UnitDecision(fqn=unit.fqn, shard_size=world, reshard_after_forward=False)
    activations = activations_of(module)
    if world == 1 and not groups:  # plain parameters, see `apply_plan`
        return UnitDecision(fqn=unit.fqn, shard_size=1, reshard_after_forward=False, activations=activations)
    if own := [one for one in plain if one.label == unit.label and not groups]:
        held = {named[id(owner), leaf] for one in own for (owner, leaf), *_ in one.places}
        _require(held >= expected, f"Unit {unit.label!r} lacks {sorted(expected - held)[:1]}")
        wires = {None if one.encoded is None else one.encoded.func.__self__.wire for one in own}
        _require(len(wires) == 1, f"Unit {unit.label!r} is reduced in several formats")
        return UnitDecision(
            fqn=unit.fqn, shard_size=1, reshard_after_forward=False, replica_wire=wires.pop(), activations=activations
        )
    _require(len(groups) == 1, f"Unit {unit.label!r} has {len(groups)} FSDP2 parameter groups instead of one")
    group, mesh = groups[0], groups[0].mesh_info.mesh
    held = {named.get((id(module), leaf), "") for module, leaf in (owners(p)[0] for p in group.fsdp_params)}
    odd = sorted(held ^ expected)
    _require(not odd, f"Unit {unit.label!r} holds other parameters; the first difference is {odd[:1]}")
    _require(mesh.size() == world, f"Unit {unit.label!r} uses a mesh of {mesh.size()} ranks of {world}")
    return UnitDecision(
        fqn=unit.fqn, shard_size=group.ranks, reshard_after_forward=group.post_forward_mesh_info is not None,
        **_read_collectives(group), activations=activations, **place_of(group)._asdict(),
    )  # fmt: skip


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PlanMismatchError(otherwise)


def _visible(planned: UnitDecision, module: nn.Module) -> UnitDecision:
    """Return what `read_back` can see of a decision: not micro-steps, the optimizer, or freeing a plain unit."""
    shown = replace(planned, reduce_every_micro_step=True, states_on_host=False)
    plain = planned.shard_size == 1 and not planned.away and not parameter_groups(module)
    return replace(shown, reshard_after_forward=False) if plain else shown


def _managed_names(unit: UnitDescription) -> set[str]:
    """Return the names of the parameters that FSDP2 manages: those without dimensions or elements are replicated."""
    return {parameter.name for parameter in unit.parameters if parameter.shape and parameter.numel}


def _read_collectives(group: ParameterGroup) -> dict[str, Any]:
    """Return the ranks per node of a parameter group's two-stage collectives (1 if in one stage), and its formats."""
    mesh, sent = group.mesh_info.mesh, wires_of(group)
    shards, (gather, scatter) = mesh.get_group(mesh.ndim - 1), _collectives(group)
    stages = getattr(gather, "stages", None)
    plain = plain_transport(shards, mesh.device_type)
    planned = unit_collectives(shards, mesh.device_type, stages, *transports(sent, plain))
    reaches_all = stages is None or shards.size() == stages.between.size() * stages.within.size()
    as_planned = (_kind(gather), _kind(scatter)) == (_kind(planned[0]), _kind(planned[1]))
    used = f"gathers with {type(gather).__name__} and reduces with {type(scatter).__name__}"
    _require(shards.size() == 1 or (reaches_all and as_planned), f"A unit {used}, as in no plan")
    return {"stage_size": 1 if stages is None else stages.within.size(), **asdict(sent)}


def _kind(collective: AllGather | ReduceScatter) -> tuple[type, Stages | None]:
    return type(collective), getattr(collective, "stages", None)


def wires_of(group: ParameterGroup) -> Wires:
    """Return the formats that a unit's collectives really use."""
    sent = [getattr(collective, "between", None) for collective in _collectives(group)]
    replicas = getattr(group.mesh_info, "replicate_process_group", None)
    gather, reduce = (one.wire if isinstance(one, WireTransport) else None for one in sent)
    replica = replicas.transport.wire if isinstance(replicas, EncodedReplicas) else None
    return Wires(gather_wire=gather, reduce_wire=reduce, replica_wire=replica)


def _collectives(group: ParameterGroup) -> tuple[Any, Any]:
    return group._all_gather_comm, group._reduce_scatter_comm
