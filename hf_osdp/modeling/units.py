"""Find the units of a model that FSDP2 gathers: the root unit, blocks, tied weights, embedding and head."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import DescriptionError, PlanError
from ..planner.description import DType, GatherSpan, ParameterSpec, UnitDescription
from .parts import CHECKPOINT_WRAPPER, LinearSlice
from .parts import canonical_name as canonical_name

LEAST_SHARE = 0.02
"""Least share of a block's parameters for a child to be a unit; smaller ones, such as norms, go to the root,
gathered once per step.
"""
LEAST_TABLE = 2**20
"""Least elements of a module outside of blocks that is a unit, if it has `LEAST_SHARE` of the model's parameters."""


def dtype_of(dtype: torch.dtype) -> DType:
    """Return the planner's name of a torch dtype; raise DescriptionError if it has none."""
    try:
        return DType(str(dtype).removeprefix("torch."))
    except ValueError:
        known = ", ".join(d.value for d in DType)
        raise DescriptionError(
            f"Parameters of {dtype} cannot be planned (known: {known}); convert them first."
        ) from None


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the module's original class, without the checkpoint wrapper and FSDP2's subclass."""
    module = unwrapped(module)
    cls = type(module)
    fsdp = sys.modules.get(
        "torch.distributed.fsdp"
    )  # planning does not import it; without the import nothing is sharded
    return cls.__mro__[2] if fsdp is not None and isinstance(module, fsdp.FSDPModule) else cls


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module itself, or the module inside torch's `checkpoint_wrapper`."""
    return getattr(module, CHECKPOINT_WRAPPER, module)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter under each of its canonical names."""
    return {canonical_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}


def refuse_changed(model: nn.Module, units: Iterable[UnitDescription]) -> None:
    """Raise PlanError if a model's parameters are not those of the units that were found in it; 4-bit weights, which
    have another view under a plan, may differ.
    """
    specs = [spec for unit in units for spec in unit.parameters]
    planned = {spec.name: _shown(spec.shape, spec.dtype.value, spec.requires_grad) for spec in specs}
    now = {
        names[0]: _shown(parameter.shape, str(parameter.dtype).removeprefix("torch."), parameter.requires_grad)
        for parameter, names in _names_of_parameters(model).items()
    } | {spec.name: planned[spec.name] for spec in specs if spec.packs}
    for name in planned | now:
        was, own = (of.get(name, "absent") for of in (planned, now))
        if was != own:
            raise PlanError(
                f"The model has changed since it was planned: {name} is {own}, but was {was}; change a model before"
                " plan, train, evaluate or prepare plans for it."
            )


def _shown(shape: Sequence[int], dtype: str, trained: bool) -> str:
    return f"{dtype} {list(shape)}{'' if trained else ', frozen'}"


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return every module once, by canonical name; a checkpoint wrapper replaces the module that it wraps."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        modules.setdefault(canonical_name(name), module)
    return modules


def segment_modules(modules: dict[str, nn.Module], units: Sequence[UnitDescription]) -> list[tuple[int, nn.Module]]:
    """Return the modules whose calls are segments, with their units' indices; the root and batch norms that are
    units are left out.
    """
    return [
        (i, modules[name])
        for i, unit in enumerate(units)
        if unit.fqn and not unit.keeps_dtype
        for name in unit.module_names
    ]


def find_units(
    model: nn.Module,
    block_classes: Sequence[str] | None = None,
    *,
    operators: bool = False,
    low_precision: bool = False,
) -> tuple[UnitDescription, ...]:
    """Find the units of a model, real or on the meta device, plain or with `checkpoint_wrapper` around blocks.

    Return the root first (fqn `""`, with all remaining parameters, if any), then units in the order of their modules.
    Each parameter is in exactly one unit, under the first of its names.

    Args:
        model: any module.
        block_classes: class names of the blocks; outermost ones count, and absent names are ignored if one matches.
            None uses `_no_split_modules`, else the elements of homogeneous `nn.ModuleList`s; without repeated blocks,
            everything except embedding and head is one unit.
        operators: split every block into operator units (attention, MLP); blocks with operators in slices are always
            split.
        low_precision: training computes in less than the parameters' precision, so that batch norms become separate
            units.
    """
    modules, parameters = modules_by_name(model), _names_of_parameters(model)
    ties = _find_ties(modules, parameters)
    blocks = _find_blocks(model, modules, ties, block_classes)
    cut = [name for name, module in modules.items() if isinstance(module, LinearSlice)]
    parts: list[str] = []
    for block in blocks:
        split = operators or any(_is_within(name, block) for name in cut)
        # operators that share parameters with each other must stay together
        whole = not split or any(_inside_one(tie, [block]) for tie in ties)
        parts += [block] if whole else _operator_names(block, modules, cut)
    tied = {name for tie in ties for name in tie}
    ties = [tie for tie in ties if "" not in tie and not _inside_one(tie, blocks)]
    groups: dict[tuple[str, ...], GatherSpan] = {(name,): GatherSpan.USE for name in parts}
    groups |= {(name,): GatherSpan.USE for name in cut if name not in parts}
    groups |= {_outermost_owners(tie, blocks): GatherSpan.STEP for tie in ties}
    groups |= {(name,): GatherSpan.STEP for name in _shared_between(model, blocks)}
    grouped = {name for names in groups for name in names}
    ends = embedding_and_head(model)
    for name, module in modules.items():
        if name and module in ends and _numel(module) and not any(_is_within(name, other) for other in grouped):
            groups[(name,)] = GatherSpan.USE
    taken = tied | {name for names in groups for name in names}
    groups |= {(name,): GatherSpan.USE for name in _tables(modules, blocks, taken)}
    keeping = _batch_norm_groups(modules, parts, {name for tie in ties for name in tie}) if low_precision else ()
    groups |= dict.fromkeys(keeping, GatherSpan.STEP)
    order = {name: index for index, name in enumerate(modules)}
    spans = {("",): GatherSpan.STEP} | {
        names: groups[names] for names in sorted(groups, key=lambda names: order[names[0]])
    }
    return _describe_groups(modules, parameters, spans, keeping)


def _names_of_parameters(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """Return each parameter, in the model's order, with its name in each module that owns it."""
    parameters: dict[nn.Parameter, tuple[str, ...]] = {}
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(canonical_name(prefix), recurse=False, remove_duplicate=False):
            parameters[parameter] = (*parameters.get(parameter, ()), leaf)
    return parameters


def large_tables(model: nn.Module) -> tuple[str, ...]:
    """Return the names of modules outside of blocks that are units because of their size, as `find_units` finds
    them; the embedding and the head, which are units in any case, are among them.
    """
    modules = modules_by_name(model)
    ties = _find_ties(modules, _names_of_parameters(model))
    blocks = _find_blocks(model, modules, ties, None)
    return _tables(modules, blocks, {name for tie in ties for name in tie})


def _tables(modules: dict[str, nn.Module], blocks: Iterable[str], taken: Container[str]) -> tuple[str, ...]:
    """Return the modules without submodules that are large, outside of blocks and not taken: Gemma 3n's embeddings
    for each layer have a third of its parameters.
    """
    least = max(LEAST_TABLE, LEAST_SHARE * _numel(modules[""]))
    return tuple(
        name
        for name, module in modules.items()
        if name and not module._modules and _numel(module) >= least
        and not any(_is_within(name, block) for block in blocks)
        and not any(part in taken for part in (*_ancestors(name), name))
    )  # fmt: skip


def embedding_and_head(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the input embedding and the output head; None if the model does not name it, as some multi-modal ones, or
    if it is a list of several, as in MusicGen, which FSDP does not accept as a unit.
    """

    def get(getter: str) -> nn.Module | None:
        try:
            found: nn.Module | None = getattr(model, getter)()
        except (AttributeError, NotImplementedError, TypeError):
            return None
        return None if isinstance(found, (nn.ModuleList, nn.ModuleDict)) else found

    return get("get_input_embeddings"), get("get_output_embeddings")


def _operator_names(block: str, modules: dict[str, nn.Module], cut: Collection[str]) -> list[str]:
    """Return the units of a split block, in the model's order; the root holds the block's other parameters.

    A child with at least `LEAST_SHARE` of the block's parameters is a unit. Lists, and modules that contain parts,
    are searched further.
    """
    least = LEAST_SHARE * _numel(modules[block])
    found: list[str] = []

    def visit(name: str) -> None:
        module = modules[name]
        inside = any(other.startswith(f"{name}.") for other in cut)
        if name in cut:
            found.append(name)
        elif name == block or inside or isinstance(module, (nn.ModuleList, nn.Sequential)):
            for child in module._modules:
                if f"{name}.{child}" in modules:
                    visit(f"{name}.{child}")
        elif _numel(module) >= least:
            found.append(name)

    visit(block)
    return found or [block]


def _batch_norm_groups(
    modules: dict[str, nn.Module], blocks: Iterable[str], tied: Container[str]
) -> tuple[tuple[str, ...], ...]:
    """Return the names of batch norms that are gathered together: those of each block, and each other one alone;
    tied ones are left out.
    """
    groups: dict[str, list[str]] = {}
    for name, module in modules.items():
        if isinstance(module, _BatchNorm) and module.affine and name not in tied:
            block = next((block for block in blocks if _is_within(name, block)), name)
            groups.setdefault(block, []).append(name)
    return tuple(map(tuple, groups.values()))


def _describe_groups(
    modules: dict[str, nn.Module],
    parameters: dict[nn.Parameter, tuple[str, ...]],
    spans: dict[tuple[str, ...], GatherSpan],
    keeping: Container[tuple[str, ...]],
) -> tuple[UnitDescription, ...]:
    """Assign each parameter to the group of the innermost module around it; groups in `keeping` keep their dtype."""
    group_of = {name: names for names in spans for name in names}
    held: dict[tuple[str, ...], dict[tuple[str, ...], nn.Parameter]] = {names: {} for names in spans}
    for parameter, own in parameters.items():
        held[group_of[next((name for name in reversed(_ancestors(own[0])) if name in group_of), "")]][own] = parameter
    return tuple(
        UnitDescription(
            fqn="+".join(names),
            module_names=names,
            class_name="+".join(class_of(modules[name]).__name__ for name in names),
            span=span,
            parameters=tuple(
                _specification(own, parameter, modules, names in keeping) for own, parameter in held[names].items()
            ),
            shared=tuple(own for own in held[names] if len(own) > 1),
        )
        for names, span in spans.items()
        if names == ("",) or held[names]
    )


def _specification(
    names: tuple[str, ...], parameter: nn.Parameter, modules: Mapping[str, nn.Module], keeps_dtype: bool
) -> ParameterSpec:
    owner, _, leaf = names[0].rpartition(".")
    return ParameterSpec(
        name=names[0],
        shape=tuple(parameter.shape),
        dtype=dtype_of(parameter.dtype),
        requires_grad=parameter.requires_grad,
        keeps_dtype=keeps_dtype,
        packs=getattr(modules[owner], "packs", {}).get(leaf, 0),
        is_embedding=any(isinstance(modules[name.rpartition(".")[0]], nn.Embedding) for name in names),
    )


def _find_ties(modules: Iterable[str], parameters: dict[nn.Parameter, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the names of modules that share parameters, each group once; `_tied_weights_keys` is not used: it may
    name untied weights.
    """
    ties: list[tuple[str, ...]] = []
    for names in (names for names in parameters.values() if len(names) > 1):
        owners = {name.rpartition(".")[0] for name in names}
        joined = [tie for tie in ties if owners & set(tie)]
        ties = [tie for tie in ties if tie not in joined]
        owners.update(*joined)
        ties.append(tuple(name for name in modules if name in owners))
    return ties


def _shared_between(model: nn.Module, blocks: Container[str]) -> list[str]:
    """Return the outermost modules that are in several blocks, or in one and outside of blocks."""
    first: dict[nn.Module, str] = {}
    own: dict[str, str] = {}
    around: dict[str, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        name = canonical_name(name)
        own[name] = first.setdefault(unwrapped(module), name)
        around.setdefault(own[name], set()).add(
            next((own[part] for part in (*_ancestors(name), name) if own[part] in blocks), "")
        )
    shared = [name for name, places in around.items() if len(places) > 1]
    return [name for name in shared if not any(part in shared for part in _ancestors(name))]


def _outermost_owners(owners: tuple[str, ...], blocks: Iterable[str]) -> tuple[str, ...]:
    """Return the owners that are not inside another owner, or are inside a block between the two."""

    def covered(name: str, other: str) -> bool:
        between = any(_is_within(name, block) and _is_within(block, other) and block != other for block in blocks)
        return name != other and _is_within(name, other) and not between

    return tuple(name for name in owners if not any(covered(name, other) for other in owners))


def _find_blocks(
    model: nn.Module,
    modules: dict[str, nn.Module],
    ties: Sequence[tuple[str, ...]],
    block_classes: Sequence[str] | None,
) -> tuple[str, ...]:
    """Return the names of the outermost blocks that hold parameters and do not own tied ones themselves."""
    if block_classes is not None:
        found = _of_classes(modules, block_classes)
    else:
        hinted, listed = _hinted(model, modules), _listed(modules)
        found = listed if not hinted or _each_has_one(listed, hinted) else hinted
    owners = {name for tie in ties if not _inside_one(tie, found) for name in tie}
    blocks = [name for name in found if name and name not in owners and any(True for _ in modules[name].parameters())]
    if block_classes is None:
        blocks = [name for name in blocks if not any(_is_within(owner, name) for owner in owners)]
    elif not blocks:
        likely = [module for names in _lists(modules) for module in map(modules.__getitem__, names)]
        known = dict.fromkeys(
            class_of(module).__name__ for module in [*likely, *modules.values()] if module is not modules[""]
        )
        reason = "only modules that share their parameters with others" if found and owners else "nothing"
        raise DescriptionError(
            f"block_classes ({', '.join(block_classes) or 'no class'}) match {reason} in {class_of(model).__name__};"
            " use one of its"
            f" classes: {', '.join(list(known)[:20]) or 'no submodules'}."
        )
    return tuple(name for name in blocks if not any(ancestor in blocks for ancestor in _ancestors(name)))


def _of_classes(modules: dict[str, nn.Module], class_names: Container[str]) -> list[str]:
    return [name for name, module in modules.items() if class_of(module).__name__ in class_names]


def _hinted(model: nn.Module, modules: dict[str, nn.Module]) -> list[str]:
    """Return the modules of repeated classes in `_no_split_modules`, which also lists embeddings."""
    found = _of_classes(
        modules, {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    )
    elements = {name for names in _lists(modules) for name in names}
    classes = {name: class_of(modules[name]) for name in found}
    counts, in_lists = Counter(classes.values()), {cls for name, cls in classes.items() if name in elements}

    def embeds(name: str) -> bool:
        return any(isinstance(child, nn.Embedding) for child in modules[name].modules())

    return [name for name, cls in classes.items() if cls in in_lists or (counts[cls] > 1 and not embeds(name))]


def _each_has_one(outer: Sequence[str], inner: Sequence[str]) -> bool:
    """Whether each outer module contains exactly one inner module: Longformer's hint names its attention, without
    the MLP.
    """
    around = [[name for name in outer if _is_within(part, name) and part != name] for part in inner]
    return all(len(names) == 1 for names in around) and sorted(name for names in around for name in names) == sorted(
        outer
    )


def _listed(modules: dict[str, nn.Module]) -> list[str]:
    """Return the elements of lists of at least two modules of one class that have a forward; lists of single layers
    count only if there are no others.
    """
    homogeneous = [
        names
        for names in _lists(modules)
        if len(names) > 1 and len({class_of(modules[name]) for name in names}) == 1
        and not isinstance(modules[names[0]], (nn.ModuleList, nn.ModuleDict))
    ]  # fmt: skip
    composite = [names for names in homogeneous if modules[names[0]]._modules]
    return [name for names in composite or homogeneous for name in names]


def _lists(modules: dict[str, nn.Module]) -> list[tuple[str, ...]]:
    return [
        tuple(f"{name}.{key}".lstrip(".") for key in module._modules if f"{name}.{key}".lstrip(".") in modules)
        for name, module in modules.items()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
    ]


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_within(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(outer + ".")


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _inside_one(owners: tuple[str, ...], blocks: Iterable[str]) -> bool:
    return any(all(_is_within(owner, block) for owner in owners) for block in blocks)
