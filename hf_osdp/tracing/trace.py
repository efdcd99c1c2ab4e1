"""Trace a model: what each segment saves and computes, its peaks, and the same under other treatments of the blocks'
activations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from ..errors import DescriptionError
from ..modeling.batch import Inputs
from ..planner.affine import Affine
from ..planner.description import Recomputation, RecomputedSegment, Segment, UnitDescription
from ..planner.placement import Activations
from .attention import AttentionCall, Kernel
from .options import DescribeOptions
from .recomputation import LoggedCall, recomputations, with_modes, worthwhile
from .segments import excess, is_idle, linear_bytes, segments_of, with_sent
from .tracer import SAMPLES, Tracer


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


def trace_segments(
    model: nn.Module, units: Sequence[UnitDescription], inputs: Inputs, run: DescribeOptions, *,
    block_classes: Sequence[str] = (), blocks: Collection[int] = (), choices: Sequence[Activations] = (),
) -> Trace:  # fmt: skip
    """Trace a model at a few batch sizes, and fit each cost as a linear function of the batch size.

    Args:
        model: real or on the meta device; it is not modified.
        units: the model's units, as `find_units` returns them.
        inputs: a function from a number of samples to keyword arguments of forward, or to the batch of the loss.
        run: how the model runs.
        block_classes: classes of which the blocks are checkpointed, if the run does that.
        blocks: indices of units, of one module each, that are also traced under each of the `choices`.
        choices: of activations beside `SAVE`: `RECOMPUTE` stands for each policy to recompute
            (`Segment.recomputed`), `OFFLOAD` for all that are saved (`Segment.own_saved_bytes`).

    Raise DescriptionError if the traces do not run the same units. Exceptions of the model under fake tensors are
    passed on.
    """
    tracer, samples = Tracer(model, units, inputs, run, block_classes), SAMPLES
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

    found, full, logs = plain, None, dict[int, Sequence[LoggedCall]]()
    fully = dict.fromkeys((unit for unit in blocks if unit not in tracer.changing), Activations.RECOMPUTE)
    if fully and Activations.RECOMPUTE in choices:
        full, logs = traced(fully), tracer.recomputed_calls
    if Activations.OFFLOAD in choices:
        away = dict.fromkeys(blocks, Activations.OFFLOAD)
        found = with_sent(plain, traced(away))
        if full is not None:
            full = with_sent(full, traced(away | dict.fromkeys(fully, Activations.RECOMPUTE_OFFLOAD)))
    if full is not None:
        found = _with_recomputed(found, full, fully, logs, traced, run)
    return Trace(
        segments=tuple(
            replace(  # costs by all batch sizes
                single,
                held_bytes=segment.held_bytes,
                recomputed=segment.recomputed,
                own_saved_bytes=segment.own_saved_bytes,
                sent_bytes=segment.sent_bytes,
            )
            for segment, single in zip(found, first, strict=True)
            if not is_idle(single)
        ),
        output_bytes=output_bytes,
        outside_reads=frozenset(tracer.reads.found),
        kernels=tracer.kernels,
        called=frozenset(segment.unit for segment in plain),
        ends_late=frozenset(unit for unit, needs_gradient in tracer.first_inputs.items() if not needs_gradient),
    )


def _with_recomputed(
    plain: list[Segment], full: list[Segment], fully: Mapping[int, Activations],
    logs: Mapping[int, Sequence[LoggedCall]], traced: Callable[[Mapping[int, Activations]], list[Segment]],
    run: DescribeOptions,
) -> list[Segment]:  # fmt: skip
    """Return the segments, each with the traced policies to recompute it that are worth their bytes.

    `full` are those of the fully recomputed units, `fully`, whose operators are in `logs`.
    """
    partly, samples = run.partial_recomputation and not run.compile, SAMPLES[-2]
    policies: dict[int, tuple[Recomputation, ...]] = {}
    for segment, recomputed in zip(plain, full, strict=True) if partly else ():
        if segment.unit in logs and segment.unit in fully:
            saved_bytes = segment.saved_bytes.bytes(samples) - recomputed.saved_bytes.bytes(samples)
            policies[segment.unit] = recomputations(logs[segment.unit], saved_bytes, run.device_type)[1:]
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
            # what only recomputed blocks hold, as their input: for example T5's position bias
            found.append(replace(segment, held_bytes=excess(full[index].saved_bytes, segment.saved_bytes)))
            continue
        tried = (Recomputation(), *policies.get(segment.unit, ()))
        forms = [
            RecomputedSegment(recomputation=policy, costs=with_modes(again[index], policy))
            for policy, again in zip(tried, traces, strict=False)
        ]
        kept = worthwhile(segment, [form.costs for form in forms], run.device_type, samples)
        found.append(replace(segment, recomputed=tuple(forms[i] for i in kept)))
    return found
