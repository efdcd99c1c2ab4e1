"""Apply a plan to a model; the only caller of `fully_shard` on a user's model."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from graphlib import TopologicalSorter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from ..distributed.collectives import plain_transport, unit_collectives
from ..distributed.consensus import require_same
from ..distributed.fsdp_internals import JOINS_BLOCKS, parameter_groups
from ..distributed.mesh import SHARD_AXIS, Meshes, collective_device, world_size
from ..distributed.wire import WireTransport, encode_replicas, transports
from ..errors import OSDPError, PlanError, PlanMismatchError
from ..modeling.activations import change_forward
from ..modeling.compiled import compile_blocks
from ..modeling.quantized import pack, view_in
from ..modeling.split.apply import apply_split
from ..modeling.units import modules_by_name, named_parameters, refuse_changed
from ..modeling.wrapping import frozen_norms_keep_dtype, has_running_statistics
from ..planner.decision import UnitDecision
from ..planner.description import DType, GatherSpan, ModelDescription, UnitDescription, shard_dim
from ..planner.placement import Activations
from ..planner.plan import Plan
from .environment import form_process_group, uses_host
from .gradients import clip_across_meshes
from .host import memory_of
from .replica_buckets import AllReduce, Owner, Parameters, owners_of
from .replicas import Replicas, is_under_plan
from .sharded_class import keep_class, refuse_partial_use, save_whole
from .state import broadcast_parameters
from .unit_order import UnitOrder


class _Unit(NamedTuple):
    modules: list[nn.Module]
    decision: UnitDecision
    description: UnitDescription


def apply_plan(
    model: nn.Module,
    plan: Plan,
    units: tuple[UnitDescription, ...],
    *,
    meshes: Meshes | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    broadcast: bool = True,
) -> nn.Module:
    """Shard the model in place according to the plan. Collective.

    A single process shards nothing: FSDP2 manages only units on the host, and the others keep plain parameters. With
    `mp_policy`, which FSDP2 implements, it manages all units.

    Args:
        model: the unsharded model, which is also returned; blocks may be wrapped in torch's `checkpoint_wrapper`.
        plan: the same on every rank.
        units: the model's units, as `find_units` returns them for this model.
        meshes: meshes of the process group; None creates them for the default device.
        mp_policy: FSDP2's mixed precision, for every unit except batch norms.
        broadcast: first check that ranks have the same plan and model, and broadcast rank 0's weights; pass False only
            if all of them are known to be equal.

    Raises:
        PlanError: the plan is for another model or world size, or the model does not have these units.
        PlanMismatchError: ranks have different plans, models or devices; raised on every rank, before the model
            changes.
        OSDPError: the model is sharded already.
        ValueError: `mp_policy` is given, but there is no process group. For units on the host a single process forms
            one.
    """
    if broadcast:
        units_text = f"{_as_description(model, units).fingerprint} in {len(units)} units"
        device = meshes.device_type if meshes else collective_device().type
        require_same({"the plan": plan.fingerprint, "the model": units_text, "the device": device})
    pack(model)
    apply_split(model, plan.split, gathers=any(_is_managed(unit, plan, mp_policy) for unit in plan.units))
    plan.check(_as_description(model, units), world_size())
    refuse_changed(model, units)
    found = _find_units(model, plan, units)
    compile_blocks(model, plan, [unit.description for unit in found])
    for module, decision in ((module, unit.decision) for unit in found for module in unit.modules):
        change_forward(module, decision.activations)
    if not needs_process_group(plan, mp_policy):
        return model
    if uses_host(plan) and not dist.is_initialized():
        form_process_group(needed=True)
    if meshes is None:
        meshes = Meshes(collective_device().type)
    meshes.prepare(plan)
    if broadcast:
        broadcast_parameters(model)
    refuse_hooks(model)
    if mp_policy is not None:
        view_in(model, mp_policy.param_dtype)
        frozen_norms_keep_dtype(model)
    named = named_parameters(model)  # `view_in` has made others
    # FSDP2 refuses parameters without dimensions, and fails with empty ones.
    ignored = {parameter for parameter in named.values() if not (parameter.dim() and parameter.numel())}
    managed = [unit for unit in found if _is_managed(unit.decision, plan, mp_policy)]
    inside = {unit.description.fqn for unit in managed}
    ignored |= {named[p.name] for unit in units if unit.fqn not in inside for p in unit.parameters}
    if managed:
        # a reference would keep all of them, whole, on the device until the last is sharded
        replaced = [weakref.ref(parameter) for parameter in model.parameters() if parameter not in ignored]
        named.clear()
        _shard_units(model, managed, ignored, meshes, mp_policy or MixedPrecisionPolicy())
        clip_across_meshes()
        refuse_partial_use()
    replicas = _replicate(model, found, ignored, meshes, mp_policy) if plan.world_size > 1 else None
    if managed:
        UnitOrder(model, units, replicas, [whole for reference in replaced if (whole := reference()) is not None])
    else:
        list(map(save_whole, model.modules()))
    return model


def _is_managed(decision: UnitDecision, plan: Plan, policy: MixedPrecisionPolicy | None) -> bool:
    """Return whether a unit is FSDP2's: others are replicated, or plain in a single process."""
    if plan.world_size == 1:
        return decision.away or policy is not None
    return decision.away or decision.shard_size > 1


def _replicate(
    model: nn.Module,
    units: list[_Unit],
    plain: set[nn.Parameter],
    meshes: Meshes,
    policy: MixedPrecisionPolicy | None,
) -> Replicas | None:
    """Keep the parameters that FSDP2 ignores equal on all ranks."""
    owners = {parameter: places for parameter, places in owners_of(model).items() if parameter in plain}
    if not owners:
        return None
    group, lower = meshes.replicas(), None if policy is None else policy.param_dtype
    transport = plain_transport(group, meshes.device_type)
    named = {name: owners[parameter] for name, parameter in named_parameters(model).items() if parameter in owners}
    found: list[Parameters] = []
    for unit in sorted(reversed(units), key=lambda unit: not unit.description.fqn):  # the root's backward ends last
        encoded = None
        if (wire := unit.decision.replica_wire) is not None:
            encoded = partial(WireTransport(transport, wire).all_reduce, op=dist.ReduceOp.AVG, group=group)
        dtype = None if unit.description.keeps_dtype else lower
        found += _parameters_of(unit.description, named, dtype, encoded)
    replicas = Replicas(model, found, group, averages=not transport.reduces_in_place)
    for unit in units:
        if not (lower is None or unit.description.keeps_dtype or isinstance(unit.modules[0], FSDPModule)):
            for module in unit.modules:
                replicas.watch(module, lower)
    return replicas


def _parameters_of(
    unit: UnitDescription,
    named: Mapping[str, list[Owner]],
    lower: torch.dtype | None,
    encoded: AllReduce | None,
) -> Iterator[Parameters]:
    """Yield a unit's plain parameters, those alike together."""
    alike: dict[tuple[torch.dtype, torch.dtype | None], list[list[Owner]]] = {}
    for (module, leaf), *others in [named[spec.name] for spec in unit.parameters if spec.name in named]:
        own = module._parameters[leaf]
        assert own is not None
        is_cast = own.is_floating_point() and own.dtype != lower and own.dim() > 0 and own.numel() > 0
        alike.setdefault((own.dtype, lower if is_cast else None), []).append([(module, leaf), *others])
    for (_, dtype), places in alike.items():
        yield Parameters(label=unit.label, places=places, dtype=dtype, encoded=encoded)


def refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks of parameters, which shards would not have."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise OSDPError(
                f"Parameter {name!r} has a hook on its gradient, which its shards would lose; remove it, and change"
                " parameter.grad before"
                " optimizer.step(), or use register_post_accumulate_grad_hook once the model is sharded."
            )


def _shard_units(
    model: nn.Module,
    units: list[_Unit],
    ignored: set[nn.Parameter],
    meshes: Meshes,
    policy: MixedPrecisionPolicy,
) -> None:
    def placement(shard_size: int, parameter: nn.Parameter) -> Shard:
        return Shard(shard_dim(parameter.shape, shard_size))

    for unit in units:
        fully_shard(
            unit.modules if len(unit.modules) > 1 else unit.modules[0],
            shard_placement_fn=partial(placement, unit.decision.shard_size),
            mesh=meshes.mesh(unit.decision.shard_size),
            reshard_after_forward=unit.decision.reshard_after_forward,
            **memory_of(unit.decision, meshes.device_type),
            mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False) if unit.description.keeps_dtype else policy,
            ignored_params=ignored,
        )
        _set_collectives(unit.modules[0], unit.decision, meshes)
        _check_groups(unit)
    if not isinstance(model, FSDPModule):
        # Without a common root, each unit would be a root: no prefetch, no common streams.
        root_mesh = meshes.mesh(meshes.world_size)
        fully_shard(model, mesh=root_mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=ignored)
    for module in model.modules():
        keep_class(module)


def _check_groups(unit: _Unit) -> None:
    """Check that FSDP2 has one group for the unit's parameters, over the planned number of ranks."""
    managed = any(parameter.shape and parameter.numel for parameter in unit.description.parameters)
    planned, found = unit.decision.shard_size, [group.ranks for group in parameter_groups(unit.modules[0])]
    if found != [planned] * managed:
        raise PlanMismatchError(
            f"Unit {unit.description.label!r} has FSDP2 groups over {found} ranks, but the plan shards it over"
            f" {planned}; apply the plan to a fresh model."
        )


def _set_collectives(module: nn.Module, decision: UnitDecision, meshes: Meshes) -> None:
    """Set the collectives of a unit's decision on its first module."""
    if not isinstance(module, FSDPModule):
        return
    device_type = meshes.device_type
    plain = plain_transport(dist.distributed_c10d._get_default_group(), device_type)
    for group in parameter_groups(module):
        group.reduces_always = decision.reduce_every_micro_step
        encode_replicas(group, decision, plain)
    if decision.shard_size == 1:  # a replicated unit neither gathers nor scatters
        return
    stages = meshes.stages(decision.shard_size, decision.stage_size) if decision.two_stage else None
    gather, scatter = unit_collectives(
        meshes.mesh(decision.shard_size).get_group(SHARD_AXIS), device_type, stages, *transports(decision, plain)
    )
    module.set_custom_all_gather(gather)
    module.set_custom_reduce_scatter(scatter)


def effective(decision: UnitDecision, unit: UnitDescription) -> UnitDecision:
    """Return the decision as FSDP2 receives it."""
    return replace(decision, reshard_after_forward=unit.span.reshards(decision.reshard_after_forward))


def bottom_up(units: tuple[UnitDescription, ...], modules: Mapping[str, nn.Module]) -> tuple[UnitDescription, ...]:
    """Sort units so that each comes after all units nested in it, under any of their names; the root is last."""
    by_fqn = {unit.fqn: unit for unit in units}
    held = {unit.fqn: {one for name in unit.module_names for one in modules[name].modules()} for unit in units}
    inside = {
        outer: [unit.fqn for unit in units if unit.fqn != outer and any(modules[n] in own for n in unit.module_names)]
        for outer, own in held.items()
    }
    return tuple(by_fqn[fqn] for fqn in TopologicalSorter(inside).static_order())


def needs_process_group(plan: Plan, mp_policy: MixedPrecisionPolicy | None) -> bool:
    """Return whether FSDP2 runs the plan, in one process or in several."""
    return plan.world_size > 1 or mp_policy is not None or uses_host(plan)


def _find_units(model: nn.Module, plan: Plan, units: tuple[UnitDescription, ...]) -> list[_Unit]:
    """Find each unit's modules and decision, bottom-up; raise errors before anything is sharded."""
    by_name = modules_by_name(model)
    for name, module in by_name.items():
        if is_under_plan(module):
            raise OSDPError(
                f"Module {name or '(root)'!r} is under a plan or sharded by FSDP2 already; apply a plan once, to the"
                " model as it was loaded."
            )
    for unit in units:
        if len(unit.module_names) > 1 and unit.span is GatherSpan.USE and not JOINS_BLOCKS:
            raise PlanError(
                f"Unit {unit.label!r} has several blocks, which needs torch 2.13; install it, or plan with"
                " blocks_per_unit=1."
            )
        activations = plan.decision(unit.fqn).activations
        if activations != Activations.SAVE and unit.span is not GatherSpan.USE:
            raise PlanError(
                f"Unit {unit.label!r} is not a block, but the plan recomputes or offloads its activations; plan again."
            )
        if activations.recomputes and any(has_running_statistics(by_name[name]) for name in unit.module_names):
            raise PlanError(
                f"Unit {unit.label!r} has batch normalisation, whose running statistics its recomputation would update"
                " twice; plan again."
            )
    return [
        _Unit([by_name[name] for name in u.module_names], effective(plan.decision(u.fqn), u), u)
        for u in bottom_up(units, by_name)
    ]


def _as_description(model: nn.Module, units: tuple[UnitDescription, ...]) -> ModelDescription:
    """Return the units as a description; `Plan.check` and the fingerprint read nothing else of it."""
    return ModelDescription(
        model_name="", model_class=type(model).__name__, block_classes=(), sequence_length=1,
        compute_dtype=DType.FLOAT32,
        units=units, segments=(),
    )  # fmt: skip
