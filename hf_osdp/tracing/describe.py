"""Describe a model or its configuration for the planner: build it, split it, find its units, trace it."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from traceback import walk_tb
from typing import Any

from torch import nn

from ..errors import CheckpointingError, DescriptionError, DescriptionTimeoutError, first_line
from ..modeling.activations import tensors_of
from ..modeling.batch import check_sequence_length, plain_batch
from ..modeling.build import build_on_meta, is_checkpointed
from ..modeling.quantized import packed_copy, restored_elements
from ..modeling.split.apply import split_copy
from ..modeling.units import class_of, dtype_of, embedding_and_head, find_units, large_tables, modules_by_name
from ..modeling.wrapping import has_running_statistics
from ..planner.affine import Affine
from ..planner.block_forms import COUNTED_AS_EAGER
from ..planner.description import DType, GatherSpan, ModelDescription, UnitDescription, shown_name
from ..planner.grouping import grouped
from ..planner.placement import Activations
from .attention import ASSUMED_CAPABILITY, AttentionCall, Kernel, capability_here, math_kernel_warning
from .options import DescribeOptions
from .pictures import UsualBatch
from .trace import Trace, trace_segments

_log = logging.getLogger(__name__)


def describe(model_or_config: object, **options: Any) -> ModelDescription:
    """Describe a model for the planner: its units, and the memory and computation of each.

    No memory is allocated and no weight is changed: a fake copy of the model runs forward and backward. Only the loss
    is assumed to outlive forward; a loop that keeps the logits through backward also needs their bytes.

    Args:
        model_or_config: a module, real or on the meta device, or a transformers configuration.
        options: the fields of `DescribeOptions`; `sequence_length` is required.

    Returns:
        The description; its `trace` says how the costs were found.

    Raises:
        ValueError: `sequence_length` exceeds the model's positions, or `device_type` is neither of the two.
        DescriptionError: no blocks were found, the model cannot be traced or checkpointed, or it does not run when
            split.
    """
    asked = DescribeOptions(**options)
    chosen = replace(asked, split=asked.split.of_single_blocks)
    model = (
        model_or_config
        if isinstance(model_or_config, nn.Module)
        else build_on_meta(model_or_config, chosen.auto_class)
    )
    model = packed_copy(model)
    check_sequence_length(model, chosen.sequence_length)
    if chosen.split.changes_modules:
        model = split_copy(model, chosen.split)
    return grouped(_Describer(model, chosen).describe(), asked.split.blocks_per_unit)


class _Describer:
    """Describe one model, which is split already."""

    def __init__(self, model: nn.Module, options: DescribeOptions) -> None:
        self._model, self._options = model, options
        self._name = class_of(model).__name__
        self._modules = modules_by_name(model)
        self._units = find_units(
            model,
            options.block_classes,
            operators=options.split.operators,
            low_precision=options.cast_dtype is not None,
        )
        self._blocks = self._block_classes()
        self._checkpointed = options.activation_checkpointing or is_checkpointed(model)
        self._dtype = options.compute_dtype or self._main_dtype()
        self._inputs = options.inputs or UsualBatch(model, options.sequence_length, options.images)

    def describe(self) -> ModelDescription:
        if self._checkpointed:
            self._refuse_running_statistics()
        found = self._traced()
        units, (batch_bytes, cast_bytes) = self._units_with_spans(found), self._input_bytes()
        compiled = self._compiled_classes(units)
        return ModelDescription(
            model_name=getattr(getattr(self._model, "config", None), "_name_or_path", "") or self._name,
            model_class=self._name,
            block_classes=self._blocks,
            split=self._options.split,
            sequence_length=self._options.sequence_length,
            compute_dtype=self._dtype,
            units=units,
            segments=tuple(
                # the root's frame keeps inputs that FSDP2 cast for it alive until forward ends
                replace(one, forward=replace(one.forward, peak_bytes=one.forward.peak_bytes.plus(cast_bytes)))
                for one in found.segments
            ),
            buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in self._model.buffers()),
            input_bytes=batch_bytes,
            output_bytes=found.output_bytes,
            trace=self._trace_summary(found.kernels, compiled),
            recomputed_by_others=self._checkpointed,
            compiled_classes=compiled,
        )

    def _block_classes(self) -> tuple[str, ...]:
        found = {unit.class_name: None for unit in self._units if unit.span is GatherSpan.USE}
        asked = self._options.block_classes
        if asked is not None:
            return tuple(name for name in dict.fromkeys(asked) if name in found)
        outside = [module for module in embedding_and_head(self._model) if module is not None]
        outside += [self._modules[name] for name in large_tables(self._model)]
        classes = {class_of(module).__name__ for module in outside}
        return tuple(name for name in found if name not in classes)

    def _compiled_classes(self, units: Sequence[UnitDescription]) -> tuple[str, ...]:
        """Return the classes of blocks that are compiled, if that is asked for; warn if there are none."""
        if not self._options.compile:
            return ()
        alone = {unit.class_name for unit in units if unit.span is GatherSpan.USE}
        if not (found := tuple(name for name in self._blocks if name in alone)):
            _log.warning(
                "%s has no blocks to compile; name their classes with block_classes, or leave compile out.", self._name
            )
        return found

    def _main_dtype(self) -> DType:
        """Return the floating-point dtype that most parameter elements have."""
        elements: Counter[DType] = Counter()
        parameters = (one for unit in self._units for one in unit.parameters if one.dtype.is_floating)
        held = [(parameter.dtype, parameter.numel) for parameter in parameters]
        for dtype, numel in (*held, *((dtype_of(dtype), numel) for dtype, numel in restored_elements(self._model))):
            elements[dtype] += numel
        return max(elements, key=lambda dtype: elements[dtype], default=DType.FLOAT32)

    def _refuse_running_statistics(self) -> None:
        """Raise CheckpointingError if a block's forward updates running statistics: recomputation would update them
        twice.
        """
        blocks = (name for unit in self._units if unit.class_name in self._blocks for name in unit.module_names)
        if (name := next((name for name in blocks if has_running_statistics(self._modules[name])), None)) is not None:
            raise CheckpointingError(
                f"{name} has batch normalisation, whose running statistics activation checkpointing would update"
                " twice;"
                " leave activation checkpointing off."
            )

    def _traced(self) -> Trace:
        """Trace the model; if it does not run on fake tensors, raise DescriptionError with the error and the
        module.
        """
        split = self._options.split
        try:
            trace = self._trace_choices()
        except CheckpointingError:
            raise
        except DescriptionTimeoutError as error:
            raise DescriptionTimeoutError(
                f"Describing {self._name} takes more than {self._options.seconds:.0f} s of CPU time at"
                f" sequence_length={self._options.sequence_length}, {error} in one pass{_where(error)}, as a loop over"
                " tokens runs them: use a shorter sequence_length, or install the kernels that replace the loop."
            ) from None
        except Exception as error:  # under fake tensors a model can raise any exception
            if self._labels_left_out(error):
                return self._traced()
            if not split.is_none:
                raise DescriptionError(
                    f"{self._name} split into {split.describe()} does not run: {error}. Leave it whole."
                ) from error
            if isinstance(error, DescriptionError):
                raise
            if self._options.cast_dtype is not None and (others := _other_dtypes(error, self._dtype)):
                raise DescriptionError(
                    f"{self._name} computes in {others} inside a block{_where(error)}, whose weights FSDP2 gathers in"
                    f" {self._dtype.value} ({first_line(error)}). Train it without mixed precision, or in one process,"
                    " which computes under autocast."
                ) from error
            remedy = (
                "A module holds tensors with a gradient's history, as of an earlier call: detach them."
                if "deepcopy" in str(error)
                else "Pass inputs that its forward accepts; a custom operator needs a fake kernel (PyTorch's"
                " register_fake)."
            )
            raise DescriptionError(
                f"{self._name} cannot be traced on fake tensors{_where(error)}: {first_line(error)}. {remedy}"
            ) from error
        if not (split.is_none and self._options.trains):
            return trace
        self._warn_of_idle_units(trace)
        if Kernel.MATH in trace.kernels:
            capability = self._options.capability or capability_here() or ASSUMED_CAPABILITY
            _log.warning(math_kernel_warning(trace.kernels[Kernel.MATH], capability))
        return trace

    def _labels_left_out(self, error: Exception) -> bool:
        """Leave out labels that are mappings, such as the boxes of detection: their losses match boxes by value.
        Return whether there were any.
        """
        inputs = self._inputs
        batch = inputs(1)
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not (isinstance(labels, (list, tuple)) and labels and isinstance(labels[0], Mapping)):
            return False
        self._inputs = lambda samples: {name: value for name, value in inputs(samples).items() if name != "labels"}
        self._options = replace(self._options, loss=None)
        _log.warning(
            "The loss of %s depends on values that a trace does not have (%s): the estimate has the model's work, and"
            " that of its outputs' means in place of the loss.", self._name, first_line(error),
        )  # fmt: skip
        return True

    def _warn_of_idle_units(self, trace: Trace) -> None:
        """Log the units that would train, but did not run: nothing of them is in the estimate but their states."""
        idle = [
            unit
            for index, unit in enumerate(self._units)
            if unit.span is GatherSpan.USE and index not in trace.called | trace.outside_reads
            and any(parameter.requires_grad for parameter in unit.parameters)
        ]  # fmt: skip
        if not idle:
            return
        share = sum(unit.numel for unit in idle) / sum(unit.numel for unit in self._units)
        _log.warning(
            "%d units with trainable parameters (%s%s; %.0f %% of %s's parameters) do not run in the traced batch, so"
            " the estimate has only their states, not their work: pass inputs that run them, or freeze them.",
            len(idle), idle[0].label, f" to {idle[-1].label}" if len(idle) > 1 else "", 100 * share, self._name,
        )  # fmt: skip

    def _trace_choices(self) -> Trace:
        """Trace the model under every choice of its blocks; if it does not run so, under fewer."""
        problem, blocks = "", self._plain_blocks()
        for lost, choices in self._choices(blocks).items():
            try:
                trace = trace_segments(
                    self._model, self._units, self._inputs, self._options,
                    block_classes=self._blocks, blocks=blocks, choices=choices,
                )  # fmt: skip
                if lost:
                    _log.warning("No block of %s can %s: %s.", self._name, lost, problem)
                break
            except Exception as error:  # with fewer options the model may run
                if not choices or isinstance(error, DescriptionTimeoutError):
                    raise
                _log.debug("The trace failed.", exc_info=True)
                problem = first_line(error)
        return trace

    def _choices(self, blocks: Collection[int]) -> Mapping[str, Sequence[Activations]]:
        """Return the choices of activations to trace, by what no block then does: first all, then those on the device,
        then none; without blocks there are none. Compiled blocks are not offloaded.
        """
        options, on_device = self._options, Activations.BASIC[1:2]
        if not options.recomputation or self._checkpointed or not blocks:
            return {"": ()}
        if options.device_type != "cuda" or options.split.operators or options.compile:
            return {"": on_device, "recompute": ()}
        return {"": Activations.BASIC[1:], "offload activations": on_device, "recompute or offload activations": ()}

    def _plain_blocks(self) -> frozenset[int]:
        """Return blocks, or the parts that blocks are split into: units of one module with submodules, which runs
        once.
        """
        return frozenset(
            index
            for index, unit in enumerate(self._units)
            if unit.span is GatherSpan.USE
            and unit.class_name in self._blocks
            and self._modules[unit.module_names[0]]._modules
        )

    def _units_with_spans(self, trace: Trace) -> tuple[UnitDescription, ...]:
        """Gather units for the whole step if they run several times, like ALBERT's layer, or are read while they do
        not run; of others that train, note which end late.
        """
        runs = Counter(segment.unit for segment in trace.segments)
        return tuple(
            replace(unit, span=GatherSpan.STEP)
            if unit.span is GatherSpan.USE and (runs[i] > 1 or i in trace.outside_reads)
            else replace(unit, ends_late=i in trace.ends_late and runs[i] > 0 and unit.can_end_late)
            for i, unit in enumerate(self._units)
        )

    def _trace_summary(self, kernels: Mapping[Kernel, AttentionCall], compiled: tuple[str, ...]) -> str:
        """Return how the costs were found, with the CUDA attention kernels that were estimated; tables show it."""
        options, attention = self._options, getattr(getattr(self._model, "config", None), "_attn_implementation", None)
        parts = [f"fake tensors, device {options.device_type}"]
        if kernels:
            assumed = options.capability is None and capability_here() is None
            note = f" (compute capability {ASSUMED_CAPABILITY[0]}.{ASSUMED_CAPABILITY[1]} assumed)" if assumed else ""
            saves = ", which saves every score" if Kernel.MATH in kernels else ""
            parts += [f"attention {attention or 'sdpa'} by {' and '.join(sorted(kernels))} kernel{note}{saves}"]
        elif attention:
            parts += [f"attention {attention}"]
        parts += [content] if (content := getattr(self._inputs, "content", "")) else []
        parts += ["under autocast"] if options.autocast else []
        parts += [f"{' and '.join(compiled)} {COUNTED_AS_EAGER}"] if compiled else []
        parts += ["blocks checkpointed"] if self._checkpointed else []
        return ", ".join(parts)

    def _input_bytes(self) -> tuple[Affine, Affine]:
        """Return the bytes of a batch throughout a step, and the additional bytes in forward.

        FSDP2 casts floating-point inputs to the compute dtype for the root. Vision models of transformers cast them
        back to the dtype of their sharded parameters, and FSDP2 casts these again for the unit that uses them, which
        saves the last copy.
        """
        pairs, dtype = [], self._options.cast_dtype
        for samples in (1, 2):
            tensors = tensors_of(plain_batch(self._inputs(samples)))
            wide = [one for one in tensors if dtype is not None and one.is_floating_point() and one.dtype is not dtype]
            copied = sum(one.numel() for one in wide) * (0 if dtype is None else dtype.itemsize)
            pairs.append((sum(one.nbytes for one in tensors) + copied, sum(one.nbytes for one in wide) + copied))
        batch, cast = (Affine(constant=2 * one - two, per_sample=two - one) for one, two in zip(*pairs, strict=True))
        return batch, cast


def _other_dtypes(error: Exception, dtype: DType) -> str:
    """Return the floating-point dtypes, other than `dtype`, in an error that names both; empty for other errors."""
    names = {"float": "float32", "Float": "float32", "half": "float16", "Half": "float16", "BFloat16": "bfloat16"}
    words = re.findall(r"\b(?:float(?:16|32|64)?|Float|[hH]alf|BFloat16|bfloat16|double|Double)\b", str(error))
    found = {names.get(word, word) for word in words}
    return " and ".join(sorted(found - {dtype.value})) if dtype.value in found else ""


def _where(error: Exception) -> str:
    """Return the innermost module that ran when an error was raised, such as ` in h.0.mlp (GPT2MLP)`; empty if none
    ran.
    """
    owners = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
    if not (running := [owner for owner in owners if isinstance(owner, nn.Module)]):
        return ""
    name = next((name for name, module in running[0].named_modules() if module is running[-1]), "")
    return f" in {shown_name(name)} ({class_of(running[-1]).__name__})" if name else ""
