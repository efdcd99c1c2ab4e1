"""Lay a plan out on a model: the one place that calls `fully_shard`."""

from __future__ import annotations

from dataclasses import replace
from graphlib import TopologicalSorter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ..distributed.consensus import require_same
from ..distributed.mesh import SHARD_AXIS, Meshes, world_size
from ..distributed.two_stage import flat_collectives, two_stage_collectives
from ..errors import OSDPError, PlanError
from ..modeling.activation_offload import offload
from ..modeling.batch_norm import has_running_statistics
from ..modeling.split.apply_split import split_operators
from ..modeling.split.names import is_split
from ..modeling.units import canonical_name, modules_by_name
from ..modeling.wrapping import recompute
from ..planner.description import Activations, DType, GatherSpan, ModelDescription, UnitDescription
from ..planner.plan import Plan, UnitDecision
from .broadcast import broadcast_parameters
from .host_offload import offload_policy, uses_host
from .sharded_class import keep_class
from .weight_reads import watch_reads


def apply_plan(
    model: nn.Module,
    plan: Plan,
    units: tuple[UnitDescription, ...],
    *,
    meshes: Meshes | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    pin_memory: bool | None = None,
    broadcast: bool = True,
) -> nn.Module:
    """Shard the model in place as the plan says. Collective.

    One process needs no sharding. There only units that live on the host are FSDP2's, each whole, and the others stay plain
    parameters that are not copied; `mp_policy` is to be had from FSDP2 alone, and makes all units its own.

    Args:
        model: the unsharded model; blocks may be in torch's `checkpoint_wrapper`.
        plan: the same on every rank (`broadcast_plan`).
        units: the model's units, as `find_units` gives them for this model.
        meshes: meshes of the process group; made for the default device where None.
        mp_policy: FSDP2's mixed precision, for every unit but those of batch norms.
        pin_memory: whether units on the host lie in page-locked memory; None: where the device is not the CPU.
        broadcast: first see that ranks have the same plan and model, and make every rank's weights those of rank 0; False where
            all that is equal for certain.

    Returns:
        The same model.

    Raises:
        PlanError: the plan is for another model or world size, or a unit names a module that the model lacks.
        PlanMismatchError: ranks have different plans, models or devices; on every rank, before any collective.
        OSDPError: the model is sharded already.
        ValueError: `mp_policy` is given, but there is no process group. For units on the host one process forms its own.
    """
    if broadcast:
        device_type = default_device_type() if meshes is None else meshes.device_type
        units_text = f"{_as_description(model, units).fingerprint} in {len(units)} units"
        require_same({"the plan": plan.fingerprint, "the model": units_text, "the device": device_type})
    if plan.split.sliced and not is_split(model):
        split_operators(model, plan.split.sliced)
    plan.check(_as_description(model, units), world_size())
    steps = _steps(model, plan, units)
    for modules, decision, _ in steps:
        if decision.activations.recomputes:
            recompute(modules[0])
        if decision.activations.offloads:
            offload(modules[0])
    if plan.world_size == 1 and not needs_process_group(plan, mp_policy):
        return model
    if plan.world_size == 1 and uses_host(plan):
        from .environment import form_process_group

        form_process_group(needed=True)
    meshes = meshes or Meshes(default_device_type())  # of the group, which may have been formed just now
    meshes.prepare(plan)
    if broadcast:
        broadcast_parameters(model)
    plain = _staying(model, plan, units) if plan.world_size == 1 and not casts(mp_policy) else None
    scalars = {parameter for parameter in model.parameters() if not parameter.dim()}
    ignored = scalars | (plain or set())
    policy = mp_policy or MixedPrecisionPolicy()
    for modules, decision, unit in steps:
        if plain is not None and not decision.on_host:
            continue
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=meshes.mesh(decision.shard_size),
            reshard_after_forward=decision.reshard_after_forward,
            offload_policy=offload_policy(on_host=decision.on_host, device_type=meshes.device_type, pin_memory=pin_memory),
            mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False) if unit.keeps_dtype else policy,
            ignored_params=ignored,
        )
        set_collectives(modules[0], decision, meshes)
    if not isinstance(model, FSDPModule):
        # Without a root, each unit would be a root of its own: no prefetch, no common streams.
        fully_shard(model, mesh=meshes.mesh(plan.world_size), reshard_after_forward=False, mp_policy=policy, ignored_params=ignored)
    watch_reads(model, units, scalars)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            keep_class(module)
    return model


def set_collectives(module: FSDPModule, decision: UnitDecision, meshes: Meshes) -> None:
    """Give a sharded unit the collectives of its decision; a replicated one gathers and scatters nothing.

    Args:
        module: the unit's first module; its parameter group is that of all.
        decision: how the unit is laid out.
        meshes: where its groups are.
    """
    if decision.shard_size == 1:
        return
    if decision.two_stage:
        gather, scatter = two_stage_collectives(meshes.stages(decision.shard_size, decision.stage_size), meshes.device_type)
    else:
        gather, scatter = flat_collectives(meshes.mesh(decision.shard_size).get_group(SHARD_AXIS), meshes.device_type)
    module.set_custom_all_gather(gather)
    module.set_custom_reduce_scatter(scatter)


def _steps(model: nn.Module, plan: Plan, units: tuple[UnitDescription, ...]) -> list[tuple[list[nn.Module], UnitDecision, UnitDescription]]:
    """Modules and decision of each unit, bottom-up; all that can be wrong is found here, before anything is sharded."""
    by_name = modules_by_name(model)
    for name, module in by_name.items():
        if isinstance(module, FSDPModule):
            raise OSDPError(f"Module {name or '(root)'!r} is sharded by FSDP2 already; apply a plan once, to the model as it was loaded.")
    for unit in units:
        if absent := [name for name in unit.module_names if name not in by_name]:
            raise PlanError(f"Unit {unit.label!r} names module {absent[0]!r}, which the model does not have; find its units again.")
        if plan.decision(unit.fqn).activations is not Activations.SAVE and (unit.span is not GatherSpan.USE or len(unit.module_names) > 1):
            raise PlanError(f"Unit {unit.label!r} is no block, but the plan recomputes or offloads its activations; plan again.")
        if plan.decision(unit.fqn).activations.recomputes and has_running_statistics(by_name[unit.module_names[0]]):
            raise PlanError(
                f"Unit {unit.label!r} has batch normalisation, whose running statistics its recomputation would update twice; plan again."
            )
    return [([by_name[name] for name in unit.module_names], effective(plan.decision(unit.fqn), unit), unit) for unit in bottom_up(units)]


def effective(decision: UnitDecision, unit: UnitDescription) -> UnitDecision:
    """What FSDP2 is told: units in use from forward to the end of backward are always kept gathered, those with calls never."""
    match unit.span:
        case GatherSpan.USE:
            return decision
        case GatherSpan.CALLS:
            return replace(decision, reshard_after_forward=True)
        case GatherSpan.STEP:
            return replace(decision, reshard_after_forward=False)


def bottom_up(units: tuple[UnitDescription, ...]) -> tuple[UnitDescription, ...]:
    """Units in an order in which each comes after all that lie inside it; the root is last."""
    by_fqn = {unit.fqn: unit for unit in units}
    inside = {unit.fqn: [other.fqn for other in units if other.fqn != unit.fqn and _holds(unit, other)] for unit in units}
    return tuple(by_fqn[fqn] for fqn in TopologicalSorter(inside).static_order())


def default_device_type() -> str:
    """`"cuda"` where the process group moves CUDA tensors, else `"cpu"`."""
    return "cuda" if torch.cuda.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config()) else "cpu"


def _holds(outer: UnitDescription, inner: UnitDescription) -> bool:
    return any(not a or b.startswith(a + ".") for a in outer.module_names for b in inner.module_names)


def _as_description(model: nn.Module, units: tuple[UnitDescription, ...]) -> ModelDescription:
    """The units as a description, for `Plan.check`; what it leaves out does not count there."""
    return ModelDescription(
        model_name="", model_class=type(model).__name__, block_classes=(), sequence_length=1, compute_dtype=DType.FLOAT32,
        units=units, segments=(),
    )  # fmt: skip


def needs_process_group(plan: Plan, mp_policy: MixedPrecisionPolicy | None) -> bool:
    """Whether the plan is FSDP2's to run, in one process as in many."""
    return plan.world_size > 1 or casts(mp_policy) or uses_host(plan)


def casts(mp_policy: MixedPrecisionPolicy | None) -> bool:
    """Whether a policy asks for another dtype than the parameters have."""
    return mp_policy is not None and any((mp_policy.param_dtype, mp_policy.reduce_dtype, mp_policy.output_dtype))


def _staying(model: nn.Module, plan: Plan, units: tuple[UnitDescription, ...]) -> set[nn.Parameter]:
    """Parameters of units that stay on the device."""
    named = {canonical_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    return {named[p.name] for unit in units if not plan.decision(unit.fqn).on_host for p in unit.parameters}
