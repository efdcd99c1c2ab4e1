"""Trace forward and backward of one micro-batch on fake tensors, at a few batch sizes: what each segment saves and
computes, its peaks.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from ..errors import DescriptionError
from ..modeling.activations import change_forward, host_memory, tensors_of
from ..modeling.batch import Inputs, loss_of, output_of, same_random_numbers, traceable
from ..modeling.build import checkpoint_blocks
from ..modeling.replaced import replaced
from ..modeling.split.apply import untied_parts
from ..modeling.units import canonical_name, modules_by_name, segment_modules
from ..modeling.wrapping import cast_floating
from ..planner.affine import Affine
from ..planner.block_forms import AS_WRITTEN, BlockForms
from ..planner.description import GatherSpan, Recomputation, RecomputedSegment, Segment, UnitDescription
from ..planner.placement import Activations
from .attention import AttentionCall, Kernel
from .block_forms import change_blocks, forms_in_trace, policies_of_form
from .cuda_kernels import CudaKernels
from .equal_blocks import RecordedCall, block_key, call_key
from .fake_model import OutsideReads, fake_copy, stored_tensors_releaser
from .known_values import KnownValues
from .memory_tracker import CUDA_BLOCK_BYTES
from .options import DescribeOptions
from .recomputation import LoggedCall, OperatorLog, recomputations, with_modes, with_share, worthwhile
from .recorder import Recorder, SegmentRecord
from .segments import (
    Samples,
    held_by_recomputed,
    is_idle,
    linear_bytes,
    segments_of,
    with_first_sample,
    with_sent,
)

_TRACED_EQUAL_BLOCKS = 2
"""Number of equal blocks that are traced: the first one differs, because the model's own forward also holds its
input.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Options of a trace: how the model runs, and what is done to which blocks."""

    run: DescribeOptions
    checkpointed_blocks: Sequence[str] | None = None
    """Classes whose activations are recomputed in backward, see `checkpoint_blocks`; None for none."""
    blocks: Collection[int] = ()
    """Indices of units, of one module each, that are also traced under each of the `choices`."""
    choices: Sequence[Activations] = ()
    """Choices of activations beside `SAVE`: one that recomputes stands for each policy to recompute
    (`Segment.recomputed`), one on the host comes after the same on the device (`Segment.own_saved_bytes`).
    """
    forms: BlockForms = AS_WRITTEN
    """The forms of the blocks; those that it changes are not traced as offloaded."""
    most_operators: float = math.inf
    """Operators that a unit may run in forward or backward, see `Recorder`."""
    is_short: bool = False
    """The trace is one of those that are extended to longer samples: sizes are not rounded, and peaks keep a moment
    for each operator.
    """
    samples: Samples = (1, 2, 3)
    """Batch sizes. Costs are lines through the last two, which are consecutive, raised if the first of three is above
    the line.

    A batch of one sample is no good point for a line: expanding a dimension of size 1 copies nothing, so torch runs
    other code. Other choices than `SAVE` are traced at the last two.
    """


class Trace(NamedTuple):
    """The result of a trace."""

    segments: tuple[Segment, ...]
    """In forward order, with bytes and FLOPs of one micro-batch; only the loss outlives forward."""
    output_bytes: Affine
    """Bytes of the other outputs, such as logits, which are additional if the training loop holds them."""
    outside_reads: frozenset[int]
    """Units with a parameter that is read while none of their modules runs, for example the head's weight by a
    loss.
    """
    kernels: Mapping[Kernel, AttentionCall]
    """The CUDA attention kernels that would run, each with its first call."""
    called: frozenset[int]
    """Units of which a module ran."""
    ends_late: frozenset[int]
    """Units whose first call has no input that needs a gradient."""


def trace_segments(model: nn.Module, units: Sequence[UnitDescription], inputs: Inputs, options: TraceOptions) -> Trace:
    """Trace a model at a few batch sizes, and fit each cost as a linear function of the batch size.

    Args:
        model: real or on the meta device; it is not modified.
        units: the model's units, as `find_units` returns them.
        inputs: a function from a number of samples to keyword arguments of forward, or to the batch of the loss.
        options: how the model runs.

    Raise DescriptionError if the traces do not run the same units. Exceptions of the model under fake tensors are
    passed on.
    """
    tracer, samples = _Tracer(model, units, inputs, options), options.samples
    try:
        records = tracer.run(samples)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        samples = samples[-2:]  # batch norm of pooled features cannot train on a single sample
        records = tracer.run(samples)
    fitted = functools.partial(segments_of, every_moment=options.is_short)
    first, plain = fitted(records, samples), fitted(records[-2:], samples[-2:])
    output_bytes = linear_bytes(tracer.output_bytes, samples)

    def traced(choices: Mapping[int, Activations]) -> list[Segment]:
        again = fitted(tracer.run(samples[-2:], choices), samples[-2:])
        if [segment.unit for segment in again] != [segment.unit for segment in plain]:
            raise DescriptionError("The model runs other units under other treatments of its activations.")
        return again

    found = _with_choices(plain, traced, tracer, options)
    return Trace(
        segments=tuple(
            with_first_sample(segment, single)
            for segment, single in zip(found, first, strict=True)
            if not is_idle(single)
        ),
        output_bytes=output_bytes,
        outside_reads=frozenset(tracer.reads.found),
        kernels=tracer.kernels,
        called=frozenset(segment.unit for segment in plain),
        ends_late=frozenset(unit for unit, needs_gradient in tracer.first_inputs.items() if not needs_gradient),
    )


def _with_choices(
    plain: list[Segment], traced: Callable[[Mapping[int, Activations]], list[Segment]], tracer: _Tracer,
    options: TraceOptions,
) -> list[Segment]:  # fmt: skip
    """Return the segments under each choice of activations."""
    found, fully, logs = {Activations.SAVE: plain}, dict[int, Activations](), dict[int, Sequence[LoggedCall]]()
    for choice in options.choices:
        choices = {unit: tracer.able(unit, choice) for unit in options.blocks}
        if choice not in choices.values():
            continue
        segments = traced(choices)
        if choice.kept in found:
            found[choice.kept] = with_sent(found[choice.kept], segments)
        else:
            found[choice], fully, logs = segments, choices, tracer.recomputed_calls
    plain, full = found[Activations.SAVE], found.get(Activations.RECOMPUTE)
    fully = {unit: choice for unit, choice in fully.items() if choice.recomputes}
    return plain if full is None else _with_recomputed(plain, full, fully, logs, tracer.own_policies, traced, options)


def _with_recomputed(
    plain: list[Segment], full: list[Segment], fully: Mapping[int, Activations],
    logs: Mapping[int, Sequence[LoggedCall]], own: Mapping[int, tuple[Recomputation, ...]],
    traced: Callable[[Mapping[int, Activations]], list[Segment]], options: TraceOptions,
) -> list[Segment]:  # fmt: skip
    """Return the segments, each with the traced policies to recompute it that are worth their bytes.

    `full` are those of the fully recomputed units, `fully`, whose operators are in `logs`; `own` are policies of units
    that recompute by themselves.
    """
    device_type, samples = options.run.device_type, options.samples[-2]
    policies: dict[int, tuple[Recomputation, ...]] = {}
    for segment, recomputed in zip(plain, full, strict=True) if options.run.partial_recomputation else ():
        if segment.unit in own and segment.unit in fully:
            policies[segment.unit] = own[segment.unit]
        elif segment.unit in logs and segment.unit in fully:
            saved_bytes = segment.saved_bytes.bytes(samples) - recomputed.saved_bytes.bytes(samples)
            policies[segment.unit] = recomputations(logs[segment.unit], saved_bytes, device_type)[1:]
    traces = [full]
    for number in range(max(map(len, policies.values()), default=0)):
        partially = {
            unit: Activations(recomputation=some[min(number, len(some) - 1)])
            for unit, some in policies.items()
            if some
        }
        traces.append(traced({**fully, **partially}))
    found = []
    for index, segment in enumerate(plain):
        if segment.unit not in fully:
            found.append(replace(segment, held_bytes=held_by_recomputed(segment, full[index])))
            continue
        tried = (Recomputation(), *policies.get(segment.unit, ()))
        forms = [
            RecomputedSegment(recomputation=policy, costs=with_modes(run[index], policy))
            for policy, run in zip(tried, traces, strict=False)
        ]
        kept = worthwhile(segment, [form.costs for form in forms], device_type, samples)
        found.append(
            replace(
                segment, recomputed=tuple(with_share(forms[i], forms[0], segment, device_type, samples) for i in kept)
            )
        )
    return found


@contextmanager
def _forwards_restored(model: nn.Module) -> Iterator[None]:
    """Restore forwards that are replaced inside the context when it ends."""
    before = {module: module.__dict__.get("forward") for module in model.modules()}
    try:
        yield
    finally:
        for module, forward in before.items():
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward


class _Tracer:
    """Run a fake copy of a model, each time with other choices of its blocks' activations."""

    def __init__(
        self, model: nn.Module, units: Sequence[UnitDescription], inputs: Inputs, options: TraceOptions
    ) -> None:
        self._model, self._units, self._options = model, units, options
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._deadline_s = time.process_time() + options.run.seconds
        self._batches = {count: inputs(count) for count in options.samples}
        self._fake = fake_copy(model, self._mode, options.run.cast_dtype, untie=True)
        if options.checkpointed_blocks is not None:
            checkpoint_blocks(self._fake, options.checkpointed_blocks)
        self._modules = modules_by_name(self._fake)
        untied = untied_parts(self._fake)
        self._segments = segment_modules(self._modules, units)
        """The modules whose calls are segments, with the indices of their units."""
        blocks = [(i, module) for i, module in self._segments if units[i].span is GatherSpan.USE]
        self._keys = {} if options.run.split.operators else {i: block_key(module) for i, module in blocks}
        """Keys by which equal blocks are found, by unit; parts of a block keep inputs from other parts, copies do
        not.
        """
        unit_of = {module: i for i, module in self._segments}
        self._segments += [(unit_of[shared], own) for own, shared in untied]
        self._step_names = _step_names(units)
        self._trains = any(parameter.requires_grad for parameter in self._fake.parameters())
        """Whether any parameter is trainable; else no backward runs."""
        self._logs: dict[int, list[list[LoggedCall]]] = {}
        """Operators of recomputed units in the last run: for each batch those of forward, then those of its second
        run.
        """
        self._equal_to: dict[int, int] = {}
        """For each unit that was not traced in the last run, the equal unit that was."""
        self.changing: set[int] = set()
        """Units whose forward changes buffers that are saved with the model, such as running statistics."""
        self.first_inputs: dict[int, bool] = {}
        """For each unit whether an input of its first call needs a gradient."""
        self.output_bytes: list[int] = []
        """Bytes of outputs for each batch of the last run."""
        self._recorder: Recorder
        """The recorder of the current batch."""
        self._calls: dict[Hashable, list[tuple[SegmentRecord, RecordedCall]]] = {}
        """The traced calls of equal blocks in the current batch."""
        self._cuda = CudaKernels(options.run.capability) if options.run.device_type == "cuda" else None
        self.kernels: Mapping[Kernel, AttentionCall] = {} if self._cuda is None else self._cuda.found
        of_units = ((i, policies_of_form(options.forms, unit)) for i, unit in enumerate(units))
        self.own_policies = {i: policies for i, policies in of_units if policies}
        """Policies to recompute the blocks whose form recomputes by itself."""
        self.reads = OutsideReads(self._modules, units)

    def run(self, samples: Samples, choices: Mapping[int, Activations] = {}) -> list[list[SegmentRecord]]:
        """Return the segment records of each batch size, with these choices of units' activations."""
        self._logs, self._equal_to, self.output_bytes = {}, {}, []
        with _forwards_restored(self._fake), ExitStack() as stack:
            self._forms = stack.enter_context(forms_in_trace(self._mode, self._cuda))
            self._transform_blocks(choices)
            stack.enter_context(host_memory(lambda like: None))
            stack.enter_context(self.reads)
            stack.enter_context(self._options.run.running(self._fake, self._model))
            self._wrap(stack)
            records = [self._run(self._batches[count]) for count in samples]
        _refuse_fake_gradients(self._model)
        return records

    def able(self, unit: int, choice: Activations) -> Activations:
        """Return the part of a choice that a unit can do: a second forward would change some buffers twice, and
        blocks in another form are not offloaded.
        """
        again = replace(choice, recomputation=None) if unit in self.changing else choice
        return again.kept if unit in self.own_policies else again

    def _transform_blocks(self, choices: Mapping[int, Activations]) -> None:
        """Give the blocks their forms, and treat their activations as chosen."""
        change_blocks(self._fake, self._options.forms, self._units)
        for index, choice in choices.items():
            block, policy = self._modules[self._units[index].module_names[0]], choice.recomputation
            if index not in self.own_policies and policy is not None and not policy.saved_calls:
                block.forward = self._logged(index, block)
            change_forward(block, choice)

    @property
    def recomputed_calls(self) -> dict[int, Sequence[LoggedCall]]:
        """Operators of fully recomputed units that run again in backward, at the smaller batch size.

        Torch stops recomputing once backward has all tensors that it needs. Which outputs can be saved is known from
        forward.
        """
        traced: dict[int, Sequence[LoggedCall]] = {}
        for unit, logs in self._logs.items():
            if len(logs) >= 4:  # forward and its second run, for at least two batches
                first_run, second_run = logs[:2]
                forward = {op.call: op for op in first_run}
                traced[unit] = [forward[op.call] for op in second_run if op.call in forward]
        return traced | {unit: traced[other] for unit, other in self._equal_to.items() if other in traced}

    def _logged(self, unit: int, module: nn.Module) -> Callable[..., Any]:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> object:
            log = OperatorLog(module)
            self._logs.setdefault(unit, []).append(log.calls)
            with log:
                output = original(*args, **kwargs)
            log.returned(output)
            return output

        return forward

    def _run(self, batch: Mapping[str, Any]) -> list[SegmentRecord]:
        with ExitStack() as stack:
            for context in (
                torch.inference_mode(False),
                torch.enable_grad(),
                traceable(),
                same_random_numbers(),
                self._mode,
            ):
                stack.enter_context(context)
            known = stack.enter_context(KnownValues(alone=True))
            fakes = known.fakes_of(batch, self._mode, self._options.run.cast_dtype)
            recorder = self._recorder = Recorder(
                self._mode, known, deadline_s=self._deadline_s, most_operators=self._options.most_operators,
                block_bytes=CUDA_BLOCK_BYTES if self._cuda is not None and not self._options.is_short else 1,
                processors=None if self._cuda is None else self._cuda.processors,
            )  # fmt: skip
            self._calls.clear()
            stack.enter_context(recorder)
            self._forms.memory = recorder
            if self._cuda is not None:
                stack.enter_context(self._cuda)
            output = output_of(self._fake, fakes, self._options.run.loss)
            loss = loss_of(output)
            storages = {
                storage._cdata: storage.nbytes() for storage in map(torch.Tensor.untyped_storage, tensors_of(output))
            }
            self.output_bytes.append(sum(storages.values()) - storages.get(loss.untyped_storage()._cdata, 0))
            del output
            recorder.begin_backward()
            if self._trains:
                loss.backward()
            del loss
            recorder.close_backward()
        return recorder.records

    def _wrap(self, stack: ExitStack) -> None:
        """Record the forwards of the copy's units and hook the gradients of its parameters, until the stack is
        closed.
        """
        for unit, module in self._segments:
            stack.enter_context(replaced(module, forward=self.reads.wrap_forward(unit, self._recording(unit, module))))
        for name, parameter in self._fake.named_parameters():
            if parameter.requires_grad:
                note = functools.partial(self._note_gradient, name=self._step_names.get(canonical_name(name)))
                stack.callback(parameter.register_post_accumulate_grad_hook(note).remove)

    def _note_gradient(self, parameter: nn.Parameter, *, name: str | None) -> None:
        self._recorder.note_gradient(parameter, name)

    def _recording(self, unit: int, module: nn.Module) -> Callable[..., Any]:
        """Wrap a unit's forward, so that its call is a segment; after two equal calls, the next ones are only
        replayed.
        """
        calls = self._calls
        original = module.forward
        anchor = next((p for p in module.parameters() if p.requires_grad), None)

        def forward(*args: Any, **kwargs: Any) -> object:
            recorder = self._recorder
            if recorder.inside or torch._C._current_graph_task_id() != -1:
                return original(*args, **kwargs)  # a call inside another, or recomputed in backward
            self.first_inputs.setdefault(
                unit, any(getattr(one, "requires_grad", False) for one in tree_leaves((args, kwargs)))
            )
            key = (self._keys[unit], call_key(args, kwargs)) if unit in self._keys else None
            if len(calls.get(key, ())) == _TRACED_EQUAL_BLOCKS:
                record, call = calls[key][-1]
                recorder.enter(unit, copy_of=record)
                self._equal_to[unit] = record.unit
                self.changing |= {unit} if record.unit in self.changing else set()
                output = call.replay(args, kwargs, anchor)
                recorder.leave()
                return output
            record, buffers = recorder.enter(unit), _stored_buffers(module)
            record.release = stored_tensors_releaser(module)
            args, kwargs = cast_floating((args, kwargs), self._options.run.cast_dtype)
            output = original(*args, **kwargs)
            recorder.leave()
            if any(a is not b or v != w for (a, v), (b, w) in zip(buffers, _stored_buffers(module), strict=True)):
                self.changing.add(unit)
            record.sent_bytes = getattr(original, "sent_bytes", 0)
            if key is not None and (recorded := RecordedCall.of(args, kwargs, output)) is not None:
                calls.setdefault(key, []).append((record, recorded))
            return output

        return forward


def _stored_buffers(module: nn.Module) -> list[tuple[torch.Tensor, int]]:
    """Return the buffers that are saved with the model, each with the number of changes in place."""
    return [
        (buffer, buffer._version)
        for inner in module.modules()
        for name, buffer in inner._buffers.items()
        if buffer is not None and name not in inner._non_persistent_buffers_set
    ]


def _step_names(units: Sequence[UnitDescription]) -> dict[str, str]:
    """Return the names of parameters gathered for the whole step, shared ones included, each with the name in its
    unit.
    """
    whole = [unit for unit in units if unit.span is GatherSpan.STEP]
    names = {p.name: p.name for unit in whole for p in unit.parameters}
    return names | {name: shared[0] for unit in whole for shared in unit.shared for name in shared}


def _refuse_fake_gradients(model: nn.Module) -> None:
    """Remove gradients that a trace left on the original model, and raise DescriptionError if any were found."""
    found = [
        (name, parameter) for name, parameter in model.named_parameters() if isinstance(parameter.grad, FakeTensor)
    ]
    for _, parameter in found:
        parameter.grad = None
    if found:
        raise DescriptionError(
            f"The loss uses {found[0][0]} of a model that it stores; use the model that is passed to it."
        )
