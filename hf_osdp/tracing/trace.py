"""Trace a model: what each segment saves and computes, its peaks, and the same under other treatments of the blocks'
activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from ..errors import DescriptionError
from ..modeling.batch import Inputs
from ..planner.affine import Affine
from ..planner.description import Recomputation, RecomputedSegment, Segment, UnitDescription
from ..planner.placement import Activations
from .attention import AttentionCall, Kernel
from .recomputation import LoggedCall, recomputations, with_modes, worthwhile
from .segments import (
    held_by_recomputed,
    is_idle,
    linear_bytes,
    segments_of,
    with_first_sample,
    with_sent,
)
from .tracer import TraceOptions, Tracer


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
    tracer, samples = Tracer(model, units, inputs, options), options.samples
    try:
        records = tracer.run(samples)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        samples = samples[-2:]  # batch norm of pooled features cannot train on a single sample
        records = tracer.run(samples)
    first, plain = segments_of(records, samples), segments_of(records[-2:], samples[-2:])
    output_bytes = linear_bytes(tracer.output_bytes, samples)

    def traced(choices: Mapping[int, Activations]) -> list[Segment]:
        again = segments_of(tracer.run(samples[-2:], choices), samples[-2:])
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
    plain: list[Segment], traced: Callable[[Mapping[int, Activations]], list[Segment]], tracer: Tracer,
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
    return plain if full is None else _with_recomputed(plain, full, fully, logs, traced, options)


def _with_recomputed(
    plain: list[Segment], full: list[Segment], fully: Mapping[int, Activations],
    logs: Mapping[int, Sequence[LoggedCall]], traced: Callable[[Mapping[int, Activations]], list[Segment]],
    options: TraceOptions,
) -> list[Segment]:  # fmt: skip
    """Return the segments, each with the traced policies to recompute it that are worth their bytes.

    `full` are those of the fully recomputed units, `fully`, whose operators are in `logs`.
    """
    device_type, samples = options.run.device_type, options.samples[-2]
    partly = options.run.partial_recomputation and not options.run.compile
    policies: dict[int, tuple[Recomputation, ...]] = {}
    for segment, recomputed in zip(plain, full, strict=True) if partly else ():
        if segment.unit in logs and segment.unit in fully:
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
        found.append(replace(segment, recomputed=tuple(forms[i] for i in kept)))
    return found
