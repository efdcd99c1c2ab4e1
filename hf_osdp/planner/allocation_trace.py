"""What a segment allocates and frees in the order in which it does, for any micro-batch size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """An allocation of another segment, by the place among those that outlive the phase in which they were made."""

    segment: int
    """How many segments further in forward order, negative for back; or the segment's index where it is `absolute`."""
    absolute: bool
    """There is one such segment, as the one that embeds. Else it is found at the same distance from every segment with this trace."""
    backward: bool
    """Made in its backward."""
    place: int
    """1 for the last one that was made, 2 for the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationTrace:
    """Allocations and frees of a segment's forward and backward; equal segments share one.

    In `forward` and `backward`, n ≥ 0 makes allocation n; ~n (below 0) frees allocation n, or, where n is beyond the own ones,
    `others[n - len(sizes)]`.
    """

    sizes: tuple[tuple[int, int], ...]
    """Bytes of each own allocation, in the order in which they are made: a constant, and bytes a sample."""
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    gradients: tuple[int, ...]
    """Own allocations that are gradients of the segment's parameters, in their order: they stay until they are reduced."""
    others: tuple[Handed, ...] = ()

    def __post_init__(self) -> None:
        most = len(self.sizes) + len(self.others)
        if any(not -most <= step < len(self.sizes) for step in (*self.forward, *self.backward)):
            raise ValueError("An allocation trace names an allocation that it does not have.")
        if any(not 0 <= number < len(self.sizes) for number in self.gradients):
            raise ValueError("An allocation trace names a gradient that it does not have.")

    def handed(self, *, backward: bool) -> tuple[int, ...]:
        """Own allocations of a phase that neither it nor the segment's later phase frees, gradients of parameters left out."""
        freed = {~step for step in (*self.forward, *self.backward) if step < 0} | set(self.gradients)
        return tuple(step for step in (self.backward if backward else self.forward) if step >= 0 and step not in freed)

    def bytes(self, samples: int) -> list[int]:
        """Bytes of each own allocation at a micro-batch size."""
        return [max(0, constant + per_sample * samples) for constant, per_sample in self.sizes]
