"""One micro-batch's forward and backward under fake tensors → what each segment saves, peaks at and computes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from ..errors import DescriptionError
from ..modeling.activation_offload import host_memory, offload, tensors_of
from ..modeling.batch import Inputs, Loss, output_of, same_random_numbers, without_packing
from ..modeling.build import checkpoint_blocks
from ..modeling.parameter_reads import ReadsOutside
from ..modeling.split.head import SplitHead
from ..modeling.units import canonical_name, modules_by_name, stretching_modules
from ..modeling.wrapping import cast_floating, forward_replaced, recompute, under_autocast
from ..planner.affine import Affine
from ..planner.description import AllocationTrace, GatherSpan, Segment, UnitDescription
from .allocation_log import AllocationLog
from .allocation_traces import with_allocations
from .attention import AttentionCall, Capability, Kernel
from .block_stub import CallRecord, block_key, call_key
from .borrowed import Borrowed
from .cuda_kernels import FusedKernels
from .fake_copy import fake_twin
from .known_values import KnownValues
from .live_bytes import CUDA_BLOCK_BYTES, LiveBytes
from .recorder import Recorder, Stretch
from .segments import bytes_line, is_idle, segments_of, with_offloaded, with_recomputed
from .stored import release_of_stored

SAMPLES = (1, 2, 3)
"""Micro-batch sizes that are traced: lines go through the last two, and are raised where the first lies above them.

A single sample is no good point for a line: expanding a dimension of size 1 copies nothing, so torch takes other paths.
"""

_TRACED_OF_EQUALS = 2
"""Of equal blocks, the first two are traced: the first one's input is held by the model's own forward, too."""


class Trace(NamedTuple):
    """What was seen of a model."""

    segments: tuple[Segment, ...]
    """In forward order, in bytes and FLOPs for each micro-batch; the loss alone outlives forward."""
    output_bytes: Affine
    """Of the other outputs, such as logits, which come on top where the training loop holds them."""
    read_outside: frozenset[int]
    """Units with a parameter that is read while none of their modules runs, as a loss reads the weight of a head."""
    kernels: Mapping[Kernel, AttentionCall]
    """The attention kernels of CUDA that would run, each with its first call."""
    allocations: tuple[AllocationTrace, ...]
    """What the segments allocate and free, each once."""


def trace_segments(
    model: nn.Module,
    units: Sequence[UnitDescription],
    inputs: Inputs,
    *,
    compute_dtype: torch.dtype | None,
    fused_kernels: bool,
    capability: Capability | None = None,
    autocast: torch.dtype | None = None,
    checkpointed_blocks: Sequence[str] | None = None,
    recomputable: Collection[int] = (),
    offloadable: Collection[int] = (),
    shortcut: bool = True,
    loss: Loss | None = None,
    samples: tuple[int, int, int] = SAMPLES,
) -> Trace:
    """Trace a model at three batch sizes and draw a line through each cost.

    Args:
        model: real or on the meta device; it is not modified.
        units: the model's units, as `find_units` gives them.
        inputs: keyword arguments of forward, or what `loss` takes, for a number of samples.
        compute_dtype: dtype of gathered parameters and of floating-point inputs; None leaves both.
        fused_kernels: allocate as CUDA's attention and dropout do, else as the CPU does.
        capability: of the CUDA device, see `FusedKernels`.
        autocast: run forward under autocast in this dtype, with parameters as they are.
        checkpointed_blocks: classes whose activations are recomputed in backward, see `checkpoint_blocks`; None for none.
        recomputable: indices of units, of one module each, that are traced once more as recomputed (`Segment.recomputed`).
        offloadable: indices of units, of one module each, of which what they save is traced as gone between forward and backward
            (`Segment.own_saved_bytes`), recomputed or not.
        shortcut: trace only the first two of equal blocks.
        loss: computes the loss from a model and a batch; None takes the model's output for the batch.
        samples: the batch sizes, rising by one after the first.

    Returns:
        The segments, the bytes of outputs, and which units are read from outside.

    Raises:
        DescriptionError: the traces do not run through the same units.
        Exception: whatever the model raises under fake tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    batches = [inputs(count) for count in samples]
    read_outside: set[int] = set()
    kernels: dict[Kernel, AttentionCall] = {}

    runs: dict[tuple[bool, bool], list[list[Stretch]]] = {}

    def traced(recomputed: Collection[int] = (), offloaded: Collection[int] = ()) -> tuple[list[Segment], Affine]:
        twin = fake_twin(model, mode, compute_dtype)
        if checkpointed_blocks is not None:
            checkpoint_blocks(twin, checkpointed_blocks)
        modules = modules_by_name(twin)
        for index in recomputed:
            recompute(modules[units[index].module_names[0]])
        for index in offloaded:
            offload(modules[units[index].module_names[0]])
        tracer = _Tracer(
            twin=twin, mode=mode, units=units, compute_dtype=compute_dtype, fused_kernels=fused_kernels, capability=capability,
            shortcut=shortcut, loss=loss,
        )  # fmt: skip
        with ExitStack() as stack:
            stack.enter_context(host_memory(lambda like: None))
            stack.enter_context(tracer.reads)
            if autocast is not None:
                stack.enter_context(forward_replaced(twin, under_autocast(twin.forward, autocast)))
            if loss is not None:  # which may call the model that it knows, as trainers do with `self.model`
                stack.enter_context(forward_replaced(model, twin.__call__))
            stretches = [tracer.run(batch) for batch in batches]
            segments = segments_of(stretches, samples)
            runs[bool(recomputed), bool(offloaded)] = stretches[1:]
        read_outside.update(tracer.reads.found)
        kernels.update(tracer.kernels)
        _refuse_fake_gradients(model)
        return segments, bytes_line(tracer.output_bytes, samples)

    segments, outputs = traced()
    if offloadable:
        segments = with_offloaded(segments, traced(offloaded=offloadable)[0], offloadable)
    if recomputable:
        again = traced(recomputable)[0]
        if offloadable:
            again = with_offloaded(again, traced(recomputable, offloadable)[0], offloadable)
        segments = with_recomputed(segments, again, recomputable)
    kept = [index for index, segment in enumerate(segments) if not is_idle(segment)]
    segments, allocations = with_allocations(segments, kept, runs, samples[1], is_block=lambda i: units[i].span is GatherSpan.USE)
    return Trace(segments, outputs, frozenset(read_outside), kernels, allocations)


_Traced = tuple[Stretch, CallRecord]


class _Tracer:
    """Runs a fake twin, with the modules of its units wrapped."""

    def __init__(
        self,
        *,
        twin: nn.Module,
        mode: FakeTensorMode,
        units: Sequence[UnitDescription],
        compute_dtype: torch.dtype | None,
        fused_kernels: bool,
        capability: Capability | None,
        shortcut: bool,
        loss: Loss | None,
    ) -> None:
        self._twin, self._mode, self._loss = twin, mode, loss
        self.kernels: dict[Kernel, AttentionCall] = {}
        """Attention kernels of CUDA that would run."""
        self.output_bytes: list[int] = []
        """Of each run: bytes of what forward returned, the loss left out."""
        self._compute_dtype, self._fused_kernels, self._capability = compute_dtype, fused_kernels, capability
        modules = modules_by_name(twin)
        self.reads = ReadsOutside(modules, units)
        self._modules = stretching_modules(modules, units)
        unit_of = {module: i for i, module in self._modules}
        self._modules += [(unit_of[shared], own) for own, shared in _untied_slices(twin).items()]
        blocks = {i for i, unit in enumerate(units) if unit.span is GatherSpan.USE}
        self._whole_step = _whole_step_names(units)
        self._keys = {i: block_key(module) for i, module in self._modules if i in blocks} if shortcut else {}

    def run(self, batch: Mapping[str, Any]) -> list[Stretch]:
        """One forward and backward pass."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(without_packing())
            stack.enter_context(same_random_numbers())
            stack.enter_context(self._mode)
            known = stack.enter_context(KnownValues(alone=True))
            fakes = known.fakes_of(batch, self._mode, self._compute_dtype)
            block_bytes = CUDA_BLOCK_BYTES if self._fused_kernels else 1
            live = stack.enter_context(LiveBytes(block_bytes=block_bytes, log=AllocationLog()))
            recorder = stack.enter_context(Recorder(live))
            if self._fused_kernels:
                fused = stack.enter_context(FusedKernels(recorder.count_flops, self._capability))
                stack.callback(lambda: self.kernels.update(fused.kernels))
            stack.enter_context(Borrowed(self._mode, known))
            stack.enter_context(self._wrapped(recorder))
            output = output_of(self._twin, fakes, self._loss)
            loss = loss_of(output)
            self.output_bytes.append(_bytes_beside(output, loss))
            del output
            recorder.begin_backward()
            loss.backward()
            del loss
            recorder.finish()
        return recorder.stretches

    @contextmanager
    def _wrapped(self, recorder: Recorder) -> Iterator[None]:
        """Put recording forwards on the twin's units and gradient hooks on its parameters, and take them off again."""
        with ExitStack() as stack:
            known: dict[Any, list[_Traced]] = {}
            for unit, module in self._modules:
                recording = self._recording(module.forward, unit, module, recorder, known)
                stack.enter_context(forward_replaced(module, self.reads.inside(unit, recording)))
            for place, (name, parameter) in enumerate(self._twin.named_parameters()):
                if parameter.requires_grad:
                    note = functools.partial(recorder.note_gradient, name=self._whole_step.get(canonical_name(name)), place=place)
                    handle = parameter.register_post_accumulate_grad_hook(note)
                    stack.callback(handle.remove)
            yield

    def _recording(
        self,
        original: Callable[..., Any],
        unit: int,
        module: nn.Module,
        recorder: Recorder,
        known: dict[Any, list[_Traced]],
    ) -> Callable[..., Any]:
        anchor = next((p for p in module.parameters() if p.requires_grad), None)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if recorder.inside or torch._C._current_graph_task_id() != -1:
                return original(*args, **kwargs)  # a call inside another, or recomputed in backward
            key = (self._keys[unit], call_key(args, kwargs)) if unit in self._keys else None
            if len(known.get(key, ())) == _TRACED_OF_EQUALS:
                stretch, record = known[key][-1]
                recorder.enter(unit, copy_of=stretch)
                output = record.replay(args, kwargs, anchor)
                recorder.leave()
                return output
            stretch = recorder.enter(unit)
            stretch.release = release_of_stored(module)
            args, kwargs = cast_floating((args, kwargs), self._compute_dtype)
            output = original(*args, **kwargs)
            recorder.leave()
            stretch.sent_bytes = getattr(original, "sent_bytes", 0)
            record = CallRecord.of(args, kwargs, output)
            if record is not None and key is not None:
                known.setdefault(key, []).append((stretch, record))
            return output

        return forward


def _whole_step_names(units: Sequence[UnitDescription]) -> dict[str, str]:
    """Every name of each parameter that is gathered for the whole step, with the one that its unit lists."""
    whole = [unit for unit in units if unit.span is GatherSpan.STEP]
    names = {p.name: p.name for unit in whole for p in unit.parameters}
    return names | {name: shared[0] for unit in whole for shared in unit.shared for name in shared}


def _untied_slices(twin: nn.Module) -> dict[nn.Module, nn.Module]:
    """Give heads in slices parameters of their own; each slice with the embedding's that it was."""
    return {own: shared for head in list(twin.modules()) if isinstance(head, SplitHead) for own, shared in head.untie().items()}


def loss_of(output: Any) -> torch.Tensor:
    """The loss in an output: `.loss`, `["loss"]`, a scalar itself or the first of a tuple, else the mean of all that is differentiable.

    Raises:
        DescriptionError: nothing in the output can be differentiated.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor) and output[0].dim() == 0:
        loss = output[0]
    if loss is None and isinstance(output, torch.Tensor):
        loss = output if output.dim() == 0 else output.mean()
    if loss is None:
        found: list[torch.Tensor] = []
        tree_map_only(torch.Tensor, found.append, dict(output) if isinstance(output, Mapping) else output)
        parts = [tensor.mean() for tensor in found if tensor.requires_grad]
        if not parts:
            raise DescriptionError("The model's output holds no loss and nothing differentiable; pass inputs that include labels.")
        loss = sum(parts[1:], parts[0])
    return loss


def _refuse_fake_gradients(model: nn.Module) -> None:
    """Take off gradients that a trace has left on the model itself.

    Raises:
        DescriptionError: there are some.
    """
    graded = [(name, parameter) for name, parameter in model.named_parameters() if isinstance(parameter.grad, FakeTensor)]
    for _, parameter in graded:
        parameter.grad = None
    if graded:
        raise DescriptionError(f"The loss uses {graded[0][0]} of a model that it keeps; use the model that is passed to it.")


def _bytes_beside(output: Any, loss: torch.Tensor) -> int:
    storages = _storages(tensors_of(output))
    storages.pop(loss.untyped_storage()._cdata, None)
    return sum(storages.values())


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each storage."""
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
