"""What a plan may fill with tensors and communicators, under a limit."""

from __future__ import annotations

from dataclasses import dataclass

from .costs import Choice
from .hardware import Hardware
from .job import TrainingJob
from .memory import MemoryEstimate
from .solver import Solution, any_within, fastest
from .stations import Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    bytes: int
    communicator_bytes: int
    world_size: int

    @classmethod
    def of(cls, hardware: Hardware, limit_bytes: int) -> Room:
        """The room under a memory limit."""
        return cls.filling(hardware, hardware.room_bytes(limit_bytes) - hardware.device.reserved_bytes)

    @classmethod
    def filling(cls, hardware: Hardware, nbytes: int) -> Room:
        """A room of so many bytes."""
        return cls(bytes=nbytes, communicator_bytes=hardware.device.communicator_bytes, world_size=hardware.world_size)

    def beside(self) -> int:
        """Bytes for tensors beside the communicators of all ranks and of these meshes."""
        return self.bytes - self.communicator_bytes * (self.world_size > 1)

    def fits(self, memory: MemoryEstimate) -> bool:
        """Whether a plan's tensors and communicators fit."""
        return memory.peak_bytes + memory.communicators * self.communicator_bytes <= self.bytes


def fastest_in(line: Line, job: TrainingJob, room: Room, *, cutoff_s: float | None = None) -> Solution | None:
    free = line.keeping({g: {o for o in g.options if not o.meshes} for g in line.groups})
    if not line.communicator_bytes or not all(group.options for group in free.groups):
        return fastest(line, job, room.beside(), cutoff_s=cutoff_s)
    first = fastest(free, job, room.beside(), cutoff_s=cutoff_s)
    if first is not None and first.choices:
        cutoff_s = first.objective
    better = fastest(line, job, room.beside(), cutoff_s=cutoff_s)
    return better or first


def any_in(line: Line, job: TrainingJob, room: Room) -> dict[int, Choice] | None:
    return any_within(line, job, room.beside())
