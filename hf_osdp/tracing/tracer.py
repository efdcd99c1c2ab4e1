"""Run a fake copy of a model, forward and backward of one micro-batch at a few batch sizes, with chosen treatments of
its blocks' activations.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from ..errors import DescriptionError
from ..modeling.activations import change_forward, host_memory, tensors_of
from ..modeling.batch import Inputs, loss_of, output_of
from ..modeling.build import checkpoint_blocks
from ..modeling.replaced import replaced
from ..modeling.units import canonical_name, modules_by_name, segment_modules
from ..modeling.wrapping import cast_floating
from ..planner.description import GatherSpan, UnitDescription
from ..planner.placement import Activations
from .attention import AttentionCall, Kernel
from .cuda_kernels import CudaKernels
from .equal_blocks import TRACED, RecordedCall, block_key, call_key
from .fake_model import OutsideReads, fake_copy, stored_tensors_releaser
from .known_values import KnownValues, on_fake_tensors
from .memory_tracker import CUDA_BLOCK_BYTES
from .options import DescribeOptions
from .recomputation import LoggedCall, OperatorLog
from .recorder import Recorder, SegmentRecord
from .segments import Samples

SAMPLES: Samples = (1, 2, 3)
"""Batch sizes. Costs are lines through the last two, which are consecutive, raised if the first is above the line.

A batch of one sample is no good point for a line: expanding a dimension of size 1 copies nothing, so torch runs other
code. Other choices than `SAVE` are traced at the last two.
"""


class Tracer:
    """Run a fake copy of a model, each time with other choices of its blocks' activations."""

    def __init__(
        self, model: nn.Module, units: Sequence[UnitDescription], inputs: Inputs, run: DescribeOptions,
        block_classes: Sequence[str],
    ) -> None:  # fmt: skip
        self._model, self._units, self._options = model, units, run
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._deadline_s = time.process_time() + run.seconds
        self._batches = {count: inputs(count) for count in SAMPLES}
        self._fake = fake_copy(model, self._mode, run.cast_dtype, untie=True).train(run.trains)
        if run.activation_checkpointing:
            checkpoint_blocks(self._fake, block_classes)
        self._modules = modules_by_name(self._fake)
        self._segments = segment_modules(self._modules, units)
        """The modules whose calls are segments, with the indices of their units."""
        blocks = [(i, module) for i, module in self._segments if units[i].span is GatherSpan.USE]
        self._keys = {} if run.split.operators else {i: block_key(module) for i, module in blocks}
        """Keys by which equal blocks are found, by unit; parts of a block keep inputs from other parts, copies do
        not.
        """
        self._step_names = _step_names(units)
        self._trains = run.trains and any(parameter.requires_grad for parameter in self._fake.parameters())
        """Whether a backward runs, for which a parameter must be trainable."""
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
        self._calls: dict[Hashable, list[RecordedCall]] = {}
        """The traced calls of equal blocks in the current batch."""
        self._cuda = CudaKernels(run.capability) if run.device_type == "cuda" else None
        self.kernels: Mapping[Kernel, AttentionCall] = {} if self._cuda is None else self._cuda.found
        self.reads = OutsideReads(self._modules, units)

    def run(self, samples: Samples, choices: Mapping[int, Activations] = {}) -> list[list[SegmentRecord]]:
        """Return the segment records of each batch size, with these choices of units' activations."""
        self._logs, self._equal_to, self.output_bytes = {}, {}, []
        running = self._options.running(self._fake, self._model)
        with host_memory(lambda like: None), self.reads, running, ExitStack() as stack:
            for index, choice in choices.items():
                block = self._modules[self._units[index].module_names[0]]
                fully = choice.recomputation is not None and not choice.recomputation.saved_calls
                stack.enter_context(replaced(block, forward=self._logged(index, block) if fully else block.forward))
                change_forward(block, choice)
            self._wrap(stack)
            records = [self._run(self._batches[count]) for count in samples]
        _refuse_fake_gradients(self._model)
        return records

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
        original, firsts = module.forward, list[OperatorLog]()

        def forward(*args: Any, **kwargs: Any) -> object:
            is_second = torch._C._current_graph_task_id() != -1
            log = OperatorLog(module, firsts.pop() if is_second and firsts else None)
            if torch.is_grad_enabled() and not is_second:
                firsts.append(log)
            self._logs.setdefault(unit, []).append(log.calls)
            with log:
                output = original(*args, **kwargs)
            log.returned(output)
            return output

        return forward

    def _run(self, batch: Mapping[str, Any]) -> list[SegmentRecord]:
        known = KnownValues(alone=True)
        recorder = self._recorder = Recorder(
            self._mode, known, deadline_s=self._deadline_s,
            block_bytes=1 if self._cuda is None else CUDA_BLOCK_BYTES,
            processors=None if self._cuda is None else self._cuda.processors,
        )  # fmt: skip
        self._calls = defaultdict(list)
        with on_fake_tensors(self._mode, known, gradients=self._options.trains), recorder, self._cuda or nullcontext():
            fakes = known.fakes_of(batch, self._mode, self._options.cast_dtype)
            output = output_of(self._fake, fakes, self._options.loss)
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
        unit_of = {parameter.name: index for index, unit in enumerate(self._units) for parameter in unit.parameters}
        for name, parameter in self._fake.named_parameters():
            if parameter.requires_grad:
                own = canonical_name(name)
                note = functools.partial(self._note_gradient, name=self._step_names.get(own), unit=unit_of.get(own))
                stack.callback(parameter.register_post_accumulate_grad_hook(note).remove)

    def _note_gradient(self, parameter: nn.Parameter, *, name: str | None, unit: int | None) -> None:
        if unit is not None and torch._C._autograd._get_current_graph_task_keep_graph():
            self.reads.found.add(unit)  # a reversible block, which runs its parts and their backward in backward
        self._recorder.note_gradient(parameter, name)

    def _recording(self, unit: int, module: nn.Module) -> Callable[..., Any]:
        """Wrap a unit's forward, so that its call is a segment; after two equal calls, the next ones are only
        replayed.
        """
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
            if len(traced := self._calls[key]) == TRACED:
                recorder.enter(unit, copy_of=traced[-1].note)
                self._equal_to[unit] = equal = traced[-1].note.unit
                self.changing |= {unit} if equal in self.changing else set()
                output = traced[-1].replay(args, kwargs, anchor)
                recorder.leave()
                return output
            record, buffers = recorder.enter(unit), _stored_buffers(module)
            record.release = stored_tensors_releaser(module)
            args, kwargs = cast_floating((args, kwargs), self._options.cast_dtype)
            output = original(*args, **kwargs)
            recorder.leave()
            if any(a is not b or v != w for (a, v), (b, w) in zip(buffers, _stored_buffers(module), strict=True)):
                self.changing.add(unit)
            record.sent_bytes = getattr(original, "sent_bytes", 0)
            if key is not None and (call := RecordedCall.of(args, kwargs, output, record)) is not None:
                traced.append(call)
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
