"""Take a model's policies to recompute and offload its blocks from the description of another with the same blocks."""

from __future__ import annotations

from dataclasses import replace

from .affine import Affine
from .description import ModelDescription, Segment


def with_policies_of(base: ModelDescription, changed: ModelDescription) -> ModelDescription | None:
    """Return `changed`, which was traced without policies to recompute and offload its blocks, with those of `base`.

    Return None unless all from the first to the last block costs the same in both. Of the other segments only the
    first one after the blocks, and the last one of the step, may hold what recomputed blocks need.
    """
    blocks = [i for i, segment in enumerate(base.segments) if segment != _plain(segment)]
    segments, last = list(changed.segments), len(base.segments) - 1
    if blocks[-1:] == [last] and last - 1 not in blocks:
        segments[-1] = replace(segments[-1], held_bytes=base.segments[blocks.pop()].held_bytes)
    names, changed_names = ([one.units[segment.unit].fqn for segment in one.segments] for one in (base, changed))
    if not blocks or names[blocks[0]] not in changed_names:
        return None
    first, stop = blocks[0], blocks[-1] + 1
    offset = changed_names.index(names[first]) - first
    if changed_names[first + offset : stop + offset] != names[first:stop]:
        return None
    for i in range(first, stop):
        one, other = segments[i + offset], base.segments[i]
        if other.recomputed:
            policies = tuple(
                replace(policy, costs=replace(policy.costs, unit=one.unit)) for policy in other.recomputed
            )
            other = replace(other, recomputed=policies)
        elif i == stop - 1:  # it belongs to the root, and begins what follows the blocks
            other = replace(one, held_bytes=other.held_bytes)
        if replace(_plain(other), unit=one.unit) != one:
            return None
        segments[i + offset] = replace(other, unit=one.unit)
    return replace(changed, segments=tuple(segments))


def _plain(segment: Segment) -> Segment:
    """Return the segment without what only other ways to run the blocks show."""
    return replace(segment, recomputed=(), held_bytes=Affine(), own_saved_bytes=Affine(), sent_bytes=Affine())
