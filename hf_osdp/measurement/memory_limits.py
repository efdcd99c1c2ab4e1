"""Memory of this machine as the kernel lets this process have it: control groups may allow less than is built in.

Limits of control groups hold for a group with all groups in it, so that each one from the process's own up to the root counts
(docs.kernel.org: admin-guide/cgroup-v2, cgroup-v1/memory): `memory.max` and `memory.high`, above which a group is throttled, of
version 2; `memory.limit_in_bytes` of version 1. File pages that the kernel can drop (`inactive_file`) are counted as free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from ..quantities import format_bytes

_STEPS = 16
"""What others hold counts in so many parts of a limit, so that the same start gives the same plan though their use moves a little."""
_FILES = {2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
          1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")}  # fmt: skip
"""By version: limits, what is used, and what of that can be dropped, in `memory.stat`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """The machine's memory, or what a control group may take of it."""

    name: str
    """`this machine`, or the group's path and the file that says so."""
    total_bytes: int
    free_bytes: int

    def share_bytes(self, ranks: int) -> int:
        """Return an equal share of what others leave, which is rounded to whole sixteenths."""
        taken = -(-(self.total_bytes - self.free_bytes) * _STEPS // self.total_bytes)
        return self.total_bytes * max(1, _STEPS - taken) // _STEPS // ranks


def memory_limits(root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """Return the machine's memory first, then each control group below `root` that allows less, the innermost first."""
    memory = psutil.virtual_memory()
    machine = MemoryLimit(name="this machine", total_bytes=memory.total, free_bytes=memory.available)
    groups = (limit for folder, version in _groups(root) for limit in _limits(folder, version, root))
    return (machine, *(limit for limit in groups if 0 < limit.total_bytes < machine.total_bytes))


def tightest(limits: Sequence[MemoryLimit]) -> MemoryLimit:
    """Return what the process can have of them all: the least total, and the least that is free."""
    least = min(limits, key=lambda limit: limit.total_bytes)
    free = min(limit.free_bytes for limit in limits)
    return MemoryLimit(name=least.name, total_bytes=least.total_bytes, free_bytes=min(free, least.total_bytes))


def rank_share(limits: Sequence[MemoryLimit], node: Sequence[Sequence[str]]) -> tuple[int, str]:
    """Return the bytes that one rank may take, and where they come from; `node` has the names of the limits of each rank here."""
    shares = []
    for limit in limits:
        ranks = sum(limit.name in names for names in node)
        among = f", among {ranks} ranks" if ranks > 1 else ""
        shares.append((limit.share_bytes(ranks), f"{format_bytes(limit.total_bytes)} of {limit.name} less what others hold{among}"))
    return min(shares)


def _groups(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield folders of this process's control groups that govern memory, each up to the root of its mount, with their version."""
    with suppress(OSError, ValueError):
        own = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (root / "proc/self/mountinfo").read_text().splitlines()]
        for _, controllers, path in own:
            version = 1 if "memory" in controllers.split(",") else 2
            if controllers and version == 2:
                continue  # another controller of version 1
            for fields in mounts:
                kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
                if kind == ("cgroup" if version == 1 else "cgroup2") and (version == 2 or "memory" in options):
                    yield from ((folder, version) for folder in _ancestors(root / fields[4].lstrip("/"), fields[3], path))


def _ancestors(mount: Path, mounted: str, path: str) -> Iterator[Path]:
    """Yield folders from a group's own up to its mount; `mounted` is the group that the mount shows, the root or a container's own."""
    with suppress(ValueError):  # a path beside what is mounted: the mount itself is all that can be seen
        inside = PurePosixPath(path).relative_to(mounted)
        if ".." not in inside.parts and (mount / inside).is_dir():
            yield from (mount / part for part in (inside, *inside.parents) if part.parts)
    yield mount


def _limits(folder: Path, version: int, root: Path) -> Iterator[MemoryLimit]:
    """Read a group's files; a group without a limit says `max`, or a number above all memory."""
    names, used_file, droppable = _FILES[version]
    for name in names:
        with suppress(OSError, ValueError):
            total = int((folder / name).read_text())
            used = int((folder / used_file).read_text())
            with suppress(OSError, ValueError, StopIteration):
                stat = (folder / "memory.stat").read_text().splitlines()
                used -= next(int(line.split()[1]) for line in stat if line.split()[0] == droppable)
            yield MemoryLimit(name=f"{folder.relative_to(root) / name}", total_bytes=total, free_bytes=max(0, min(total, total - used)))
