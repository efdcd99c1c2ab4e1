"""A model or its configuration → what the planner needs to know of it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..errors import CheckpointingError, DescriptionError
from ..modeling.batch import Inputs, Loss, check_sequence_length, plain_batch, training_batch
from ..modeling.batch_norm import has_running_statistics
from ..modeling.build import build_on_meta, is_checkpointed
from ..modeling.split.candidates import split_copy
from ..modeling.units import class_of, find_units, modules_by_name
from ..planner.description import Affine, DType, GatherSpan, ModelDescription, Segment, UnitDescription
from ..planner.split import WHOLE_BLOCKS, ModelSplit
from .attention import ASSUMED_CAPABILITY, AttentionCall, Capability, Kernel, capability_here, warning_of_math
from .formula import SOURCE, TransformerShape, formula_segments
from .trace import Trace, trace_segments

_log = logging.getLogger(__name__)


def describe(
    model_or_config: Any,
    *,
    sequence_length: int,
    block_classes: Sequence[str] | None = None,
    compute_dtype: DType | None = None,
    autocast: bool = False,
    device_type: str = "cpu",
    capability: Capability | None = None,
    auto_class: Any = None,
    inputs: Inputs | None = None,
    activation_checkpointing: bool = False,
    recomputation: bool = True,
    split: ModelSplit = WHOLE_BLOCKS,
    loss: Loss | None = None,
) -> ModelDescription:
    """Describe a model for the planner: its units, and what each costs in memory and work.

    Nothing is allocated and no weight is touched: a fake copy of the model runs forward and backward. The loss alone is
    taken to outlive forward; a loop that keeps the logits through backward needs their bytes on top.

    Args:
        model_or_config: a module, real or on the meta device, or a transformers configuration.
        sequence_length: tokens of one sample.
        block_classes: class names of the blocks, see `find_units`.
        compute_dtype: dtype of gathered parameters and activations; None keeps the parameters' own.
        autocast: compute in it under `torch.autocast`, as one process does (`Precision.autocast`), and leave the parameters as they are.
        device_type: `"cpu"` or `"cuda"`: whose attention and dropout kernels, and whose allocation granularity, count.
        capability: compute capability of the CUDA device (`DeviceSpec.capability`), which decides on the attention kernel; None takes
            that of this machine's GPU, or where there is none (8, 6), whose rules are the narrowest from Ampere on.
        auto_class: for a configuration, which class to build, see `build_on_meta`.
        inputs: from a number of samples to forward's keyword arguments, labels included, or to what `loss` takes; None makes a
            training batch for a transformers model.
        activation_checkpointing: the blocks will be recomputed in backward. A model that has it switched on already needs
            no word of it here.
        recomputation: also trace each block as recomputed in backward, and for CUDA with what it saves on the host, so that the search
            can choose; of no use where all are checkpointed anyway. Parts of blocks (`split.operators`) are not traced as offloaded.
        split: describe the model as it is when split so.
        loss: `loss(model, batch)` gives the loss, or an output that holds it, as `Trainer.compute_loss` does; None runs
            `model(**batch)`. It may call the model more than once; collectives in it are not sent.

    Returns:
        The description; its `trace` says how the costs were found.

    Raises:
        ValueError: `sequence_length` exceeds the model's positions, or `device_type` is neither of the two.
        DescriptionError: no blocks were found, the model can neither be traced nor be described by formula, or its
            activations cannot be checkpointed; or it does not run when split so.
    """
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"device_type={device_type!r} is not known; use cpu or cuda.")
    model = model_or_config if isinstance(model_or_config, nn.Module) else build_on_meta(model_or_config, auto_class)
    check_sequence_length(model, sequence_length)
    if split.sliced:
        model = split_copy(model, split)
    cast_dtype = None if autocast else _torch_dtype(compute_dtype)  # of parameters and inputs, as FSDP2 casts them
    units = find_units(model, block_classes, operators=split.operators, low_precision=cast_dtype is not None)
    if inputs is None:
        inputs = _default_inputs(model, sequence_length)
    dtype = compute_dtype or _main_dtype(units)
    found_classes = _block_classes(units, model, block_classes)
    if activation_checkpointing or is_checkpointed(model):
        _refuse_running_statistics(model, units, found_classes)
    recomputation = recomputation and not activation_checkpointing and not is_checkpointed(model)
    choosable = _choosable(model, units, found_classes) if recomputation else frozenset()
    again = _running_again(model, units, choosable)
    offloadable = choosable if device_type == "cuda" and not split.operators else frozenset()

    def traced(recomputable: frozenset[int], offloadable: frozenset[int]) -> Trace:
        trace = partial(
            trace_segments, model, units, inputs, compute_dtype=cast_dtype, fused_kernels=device_type == "cuda",
            capability=capability, autocast=_torch_dtype(compute_dtype) if autocast else None,
            checkpointed_blocks=found_classes if activation_checkpointing else None, recomputable=recomputable, offloadable=offloadable,
            shortcut=not split.operators,  # parts of a block keep what others hand them, which stand-ins do not
            loss=loss,
        )  # fmt: skip
        try:
            return trace()
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            return trace(samples=(2, 3, 4))  # batch norm of pooled features trains on no single sample

    try:
        segments, outputs, read_outside, kernels, allocations = _traced_or_plain(traced, again, offloadable)
        trace = _how_traced(model, device_type, capability, kernels, autocast, activation_checkpointing)
    except CheckpointingError:
        raise
    except Exception as error:  # a model may raise anything under fake tensors
        if not split.is_none:
            raise DescriptionError(
                f"{class_of(model).__name__} split into {split.describe()} does not run: {error}. Leave it whole."
            ) from error
        outputs, read_outside, allocations = Affine(), frozenset(), ()
        segments = _segments_by_formula(model, units, found_classes, sequence_length, dtype, error, activation_checkpointing)
        trace = f"{_FORMULA} ({SOURCE}); the trace failed with {type(error).__name__}"
    else:
        if Kernel.MATH in kernels and split.is_none:
            _log.warning(warning_of_math(kernels[Kernel.MATH], capability or capability_here() or ASSUMED_CAPABILITY))
    units = _never_freed(units, segments, read_outside)
    given, cast = _input_lines(inputs, cast_dtype)
    return ModelDescription(
        model_name=getattr(getattr(model, "config", None), "_name_or_path", "") or class_of(model).__name__,
        model_class=class_of(model).__name__,
        block_classes=found_classes,
        split=split,
        sequence_length=sequence_length,
        compute_dtype=dtype,
        units=units,
        segments=_with_casts_alive(segments, cast),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        input_bytes=given,
        output_bytes=outputs,
        trace=trace,
        allocations=allocations,
        recomputed_by_others=activation_checkpointing or is_checkpointed(model),
    )


_FORMULA = "formula"


def is_by_formula(description: ModelDescription) -> bool:
    """Whether a formula stands in for the trace of a model that could not be traced."""
    return description.trace.startswith(_FORMULA)


def _traced_or_plain(
    traced: Callable[[frozenset[int], frozenset[int]], Trace],
    recomputable: frozenset[int],
    offloadable: frozenset[int],
) -> Trace:
    """A trace with all that may be chosen for blocks, or where the model cannot run so, with less."""
    for choices in dict.fromkeys([(recomputable, offloadable), (recomputable, frozenset())]):
        if choices != _NOTHING:
            try:
                return traced(*choices)
            except Exception:  # as a plainer model it may run
                _log.debug("Blocks cannot be traced as recomputed or offloaded.", exc_info=True)
    return traced(*_NOTHING)


_NOTHING: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())


def _choosable(model: nn.Module, units: Sequence[UnitDescription], block_classes: Sequence[str]) -> frozenset[int]:
    """Blocks, or the parts that they are cut into: units of one module, with others inside, that run once."""
    modules = modules_by_name(model)
    return frozenset(
        index
        for index, unit in enumerate(units)
        if unit.span is GatherSpan.USE and unit.class_name in block_classes and modules[unit.module_names[0]]._modules
    )


def _refuse_running_statistics(model: nn.Module, units: Sequence[UnitDescription], block_classes: Sequence[str]) -> None:
    """Refuse to recompute blocks whose forward counts what it sees.

    Raises:
        CheckpointingError: one of the blocks does.
    """
    modules = modules_by_name(model)
    blocks = (name for unit in units if unit.class_name in block_classes for name in unit.module_names)
    if (name := next((name for name in blocks if has_running_statistics(modules[name])), None)) is not None:
        raise CheckpointingError(
            f"{name} has batch normalisation, whose running statistics activation checkpointing would update twice;"
            " leave activation checkpointing off."
        )


def _running_again(model: nn.Module, units: Sequence[UnitDescription], choosable: frozenset[int]) -> frozenset[int]:
    """Those whose forward may run again in backward."""
    modules = modules_by_name(model)
    return frozenset(index for index in choosable if not has_running_statistics(modules[units[index].module_names[0]]))


def _never_freed(
    units: tuple[UnitDescription, ...], segments: tuple[Segment, ...], read_outside: frozenset[int]
) -> tuple[UnitDescription, ...]:
    """A unit that runs several times, as ALBERT's one layer does, or is read while it does not run, stays gathered for the whole step,
    unless it is made for calls."""
    runs = Counter(segment.unit for segment in segments)
    stays = ((runs[i] > 1 or i in read_outside) and unit.span is GatherSpan.USE for i, unit in enumerate(units))
    return tuple(replace(unit, span=GatherSpan.STEP) if stay else unit for stay, unit in zip(stays, units, strict=True))


def _segments_by_formula(
    model: nn.Module,
    units: tuple[UnitDescription, ...],
    block_classes: tuple[str, ...],
    sequence_length: int,
    dtype: DType,
    error: Exception,
    checkpointed: bool,
) -> tuple[Segment, ...]:
    """What stands in for a trace that failed with `error`."""
    name, config = class_of(model).__name__, getattr(model, "config", None)
    reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}".rstrip(".")
    if config is None:
        raise DescriptionError(f"{name} could not be traced ({reason}); pass inputs that its forward accepts.") from error
    shape = TransformerShape.of(config, tokens=sequence_length, itemsize=dtype.itemsize)
    _log.warning(
        "%s could not be traced (%s); its activations are estimated by formula (%s), and recomputing blocks in backward is not offered,"
        " for its costs are not known without a trace.", name, reason, SOURCE,
    )  # fmt: skip
    return formula_segments(units, block_classes, shape, checkpointed=checkpointed)


def _how_traced(
    model: nn.Module,
    device_type: str,
    capability: Capability | None,
    kernels: Mapping[Kernel, AttentionCall],
    autocast: bool,
    checkpointed: bool,
) -> str:
    """A line for tables, which names the attention kernels of CUDA that were estimated."""
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    parts = [f"fake tensors, device {device_type}"]
    if kernels:
        assumed = capability is None and capability_here() is None
        where = f" (compute capability {ASSUMED_CAPABILITY[0]}.{ASSUMED_CAPABILITY[1]} assumed)" if assumed else ""
        saves = ", which saves every score" if Kernel.MATH in kernels else ""
        parts += [f"attention {attention or 'sdpa'} by {' and '.join(sorted(kernels))} kernel{where}{saves}"]
    elif attention:
        parts += [f"attention {attention}"]
    parts += ["under autocast"] if autocast else []
    parts += ["blocks checkpointed"] if checkpointed or is_checkpointed(model) else []
    return ", ".join(parts)


def _torch_dtype(dtype: DType | None) -> torch.dtype | None:
    return None if dtype is None else getattr(torch, dtype.value)


def _default_inputs(model: nn.Module, sequence_length: int) -> Inputs:
    if not hasattr(model, "config"):
        raise DescriptionError(
            f"{class_of(model).__name__} is not a transformers model, so its inputs are not known;"
            " pass inputs, a function from samples to keyword arguments."
        )
    return training_batch(model, sequence_length)


def _main_dtype(units: Sequence[UnitDescription]) -> DType:
    """The dtype that most parameter elements have."""
    elements: dict[DType, int] = {}
    for unit in units:
        for parameter in unit.parameters:
            elements[parameter.dtype] = elements.get(parameter.dtype, 0) + parameter.numel
    return max(elements, key=lambda dtype: elements[dtype], default=DType.FLOAT32)


def _block_classes(units: Sequence[UnitDescription], model: nn.Module, asked: Sequence[str] | None) -> tuple[str, ...]:
    found = {unit.class_name for unit in units if unit.span is GatherSpan.USE}
    if asked is not None:
        return tuple(name for name in dict.fromkeys(asked) if name in found)
    embeddings = {name for getter in ("get_input_embeddings", "get_output_embeddings") for name in _class_from(model, getter)}
    in_order = dict.fromkeys(unit.class_name for unit in units if unit.class_name in found)
    return tuple(name for name in in_order if name not in embeddings)


def _class_from(model: nn.Module, getter: str) -> tuple[str, ...]:
    try:
        module = getattr(model, getter)()
    except (AttributeError, NotImplementedError, TypeError):
        return ()
    return () if module is None else (class_of(module).__name__,)


def _with_casts_alive(segments: tuple[Segment, ...], cast: Affine) -> tuple[Segment, ...]:
    """Inputs that were cast for the root stay alive in its frame until forward ends."""
    if cast == Affine():
        return segments
    return tuple(replace(s, forward=replace(s.forward, peak_bytes=s.forward.peak_bytes.plus(cast))) for s in segments)


def _input_lines(inputs: Inputs, compute_dtype: torch.dtype | None) -> tuple[Affine, Affine]:
    """Bytes of a batch throughout a step, and beside them in forward.

    FSDP2 casts floating-point inputs to the compute dtype for the root. Vision models of transformers cast them back to the
    dtype of their sharded parameters, and FSDP2 casts these again for the unit that uses them, which saves the last copy.
    """
    pairs = [_input_bytes(inputs, samples, compute_dtype) for samples in (1, 2)]
    first, second = (Affine(constant=2 * one - two, per_sample=two - one) for one, two in zip(*pairs, strict=True))
    return first, second


def _input_bytes(inputs: Inputs, samples: int, compute_dtype: torch.dtype | None) -> tuple[int, int]:
    given = cast = transient = 0
    for leaf in tree_leaves(plain_batch(inputs(samples))):
        if isinstance(leaf, torch.Tensor):
            given += leaf.numel() * leaf.element_size()
            if compute_dtype is not None and leaf.is_floating_point() and leaf.dtype is not compute_dtype:
                cast += leaf.numel() * compute_dtype.itemsize
                transient += leaf.numel() * (compute_dtype.itemsize + leaf.element_size())
    return given + cast, transient
