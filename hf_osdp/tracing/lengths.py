"""Extend descriptions of short samples to long ones, for models that loop over tokens in Python.

A loop runs tens of operators for each token, each of which takes 0.1 ms to trace. Costs are polynomials in the number
of tokens: of degree 1 for a loop, 2 for masks and scores of other blocks. Lengths that differ from the
asked one by a multiple of the step have the same rest in chunks of the step's size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ..errors import DescriptionError
from ..planner.affine import Envelope, ScratchMoment
from ..planner.description import ModelDescription

SHORTEST = 512
"""Fewest tokens for which a description is extended; fewer are traced in seconds."""
_STEPS = (16, 64)
"""Differences of the short lengths, in tokens; the second suits models that compute in chunks of up to 64."""
_CHECKED = 256
"""Tokens at which the extension of short descriptions is compared with a trace, at least."""
_SAMPLES = (1, 2, 3, 8, 64)
"""Batch sizes at which peaks are compared."""


def extended(describe_at: Callable[..., ModelDescription], tokens: int) -> ModelDescription | None:
    """Return the description at a length, extended from three short ones; None if nothing grows with the tokens, or
    if a trace at a fourth length has other costs.

    Args:
        describe_at: describes the model at a number of tokens (`TraceOptions.is_short`), with `plain` without
            recomputation, with `warns` with its warnings.
        tokens: the length of a sample.
    """
    for step in _STEPS:
        lengths = [tokens % step + step * n for n in (1, 2, 3)]
        try:
            checked = describe_at(tokens % step + max(_CHECKED, 8 * step), plain=True)
            if _operators(describe_at(lengths[0], plain=True)) == _operators(checked):
                return None
            short = [describe_at(length, warns=length == lengths[-1]) for length in lengths]
            if _same(_plain(_at(short, checked.sequence_length)), _plain(checked)):
                text = f"{short[0].trace}, extended from {', '.join(map(str, lengths))} tokens"
                return replace(_at(short, tokens), trace=text)
        except (DescriptionError, _OtherFormError):  # what is wrong with the model itself, its own length says
            continue
    return None


class _OtherFormError(Exception):
    """Descriptions differ in more than their numbers."""


def _at(short: Sequence[ModelDescription], tokens: int) -> ModelDescription:
    first, second = (one.sequence_length for one in short[:2])
    found: ModelDescription = _extended(short, (tokens - first) // (second - first))
    return found


def _extended(values: Sequence[Any], steps: int) -> Any:  # noqa: ANN401
    """Return the value after this number of steps from the first of three: each number follows a parabola."""
    first = values[0]
    if all(value == first for value in values):
        return first
    if isinstance(first, Envelope):
        return _envelope(values, steps)
    if isinstance(first, ScratchMoment) and all(
        moment.least for moment in values
    ):  # a number of rows by those of a sample
        inverse = _number([1 / moment.least for moment in values], steps)
        values = [replace(moment, least=1 / inverse) for moment in values]
        first = values[0]
    if is_dataclass(first):
        named = {field.name: [getattr(value, field.name) for value in values] for field in fields(first)}
        return replace(first, **{name: _extended(parts, steps) for name, parts in named.items()})  # type: ignore[type-var]
    if isinstance(first, tuple) and len({*map(len, values)}) == 1:
        return tuple(_extended(parts, steps) for parts in zip(*values, strict=True))
    if isinstance(first, (int, float)):
        return _number(values, steps)
    raise _OtherFormError


def _number(values: Sequence[float], steps: int) -> float:
    one, two, three = values
    return one + steps * (two - one) + steps * (steps - 1) // 2 * (three - 2 * two + one)


def _envelope(peaks: Sequence[Envelope], steps: int) -> Envelope:
    """Return the highest of the extended moments: of each operator, or where a loop adds operators of those that are
    highest for some number of samples, the steepest first: the others are so only for few samples of few tokens.
    """
    moments = [peak.pieces for peak in peaks]
    if len({*map(len, moments)}) > 1:
        moments = [Envelope.above(pieces).pieces[::-1] for pieces in moments]
        found = [_extended(each, steps) for each in zip(*moments, strict=False)]
        if any(one.plus(three) != two.scaled(2, constants=True) for one, two, three in zip(*moments, strict=False)):
            raise _OtherFormError  # others may be highest among more tokens
    else:
        found = [_extended(each, steps) for each in zip(*moments, strict=True)]
    is_other = any(peak.single is not None for peak in peaks)
    return replace(
        Envelope.above(found),
        single=_number([peak.bytes(1) for peak in peaks], steps) if is_other else None,
        scratch=_extended([peak.scratch for peak in peaks], steps),
    )


def _operators(description: ModelDescription) -> float:
    return sum(phase.operators(1) for segment in description.segments for phase in (segment.forward, segment.backward))


def _plain(description: ModelDescription) -> Any:  # noqa: ANN401
    """Return the costs that do not depend on recomputation and offloading."""
    segments = [(s.unit, s.saved_bytes, s.gradient_bytes, s.forward, s.backward) for s in description.segments]
    return tuple(segments), description.input_bytes, description.output_bytes


def _same(one: Any, other: Any) -> bool:  # noqa: ANN401
    """Return whether costs are the same."""
    if isinstance(one, Envelope):
        return all(one.bytes(samples) == other.bytes(samples) for samples in _SAMPLES)
    if is_dataclass(one):
        return all(_same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
