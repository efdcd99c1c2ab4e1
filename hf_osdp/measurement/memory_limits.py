"""Find the memory that this process may use: control groups (cgroups) may allow less than the machine has.

A limit applies to a group and all groups in it, so every limit from the process's own group up to the root counts: in
version 2 `memory.max` and `memory.high`, above which a group is throttled; in version 1 `memory.limit_in_bytes`. File
pages that the kernel can drop (`inactive_file`) count as free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ..distributed.mesh import find_topology, rank
from ..distributed.process_group import all_gather_objects
from ..quantities import format_bytes

_STEPS = 16
"""Memory of other processes is rounded to this many steps of a limit, so that small changes of it do not change the
plan.
"""

_FILES = {
    "": (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "memory": (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}
"""By controller (none in version 2): files of the limits, file of the used bytes, and the key of droppable bytes in
`memory.stat`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """The machine's memory, or a control group's limit."""

    name: str
    total_bytes: int
    free_bytes: int

    def share_bytes(self, ranks: int) -> int:
        """Return an equal share of what other processes leave, rounded down to sixteenths of the total."""
        taken = -(-(self.total_bytes - self.free_bytes) * _STEPS // self.total_bytes)
        return self.total_bytes * max(1, _STEPS - taken) // _STEPS // ranks


def memory_limits(root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """Return the machine's memory first, then each control group below `root` that allows less, the innermost
    first.
    """
    memory = psutil.virtual_memory()
    machine = MemoryLimit(name="this machine", total_bytes=memory.total, free_bytes=memory.available)
    return (machine, *(limit for limit in _group_limits(root) if 0 < limit.total_bytes < machine.total_bytes))


def tightest(limits: Sequence[MemoryLimit]) -> MemoryLimit:
    """Return the combined limit: the least total, and the least free bytes."""
    least = min(limits, key=lambda limit: limit.total_bytes)
    return replace(least, free_bytes=min(least.total_bytes, *(limit.free_bytes for limit in limits)))


def memory_of_rank() -> tuple[int, str]:
    """Return this rank's share of its machine's memory, and the source of rank 0's share. Collective."""
    limits, local = memory_limits(), find_topology().ranks_per_node
    first = rank() // local * local
    share, source = rank_share(limits, all_gather_objects([limit.name for limit in limits])[first : first + local])
    return share, all_gather_objects(source)[0]


def rank_share(limits: Sequence[MemoryLimit], node: Sequence[Sequence[str]]) -> tuple[int, str]:
    """Return the bytes that one rank may use and their source; `node` holds the names of each local rank's limits."""
    shares = []
    for limit in limits:
        ranks = sum(limit.name in names for names in node)
        among = f", among {ranks} ranks" if ranks > 1 else ""
        shares.append(
            (
                limit.share_bytes(ranks),
                f"{format_bytes(limit.total_bytes)} of {limit.name} less what others hold{among}",
            )
        )
    return min(shares)


def _group_limits(root: Path) -> Iterator[MemoryLimit]:
    """Yield the limits of this process's control groups, from its own up to the mount."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                mount = root / "sys/fs/cgroup" / controllers
                # a container may see its own group as the mount, or no part of the path
                parts = () if "/../" in path else Path(path).parts[1:]
                own = next(
                    (parts[start:] for start in range(len(parts)) if mount.joinpath(*parts[start:]).is_dir()), ()
                )
                for depth in range(len(own), -1, -1):
                    yield from _limits(mount.joinpath(*own[:depth]), root, _FILES[controllers])


def _limits(folder: Path, root: Path, files: tuple[tuple[str, ...], str, str]) -> Iterator[MemoryLimit]:
    """Yield the limits in a group's files; without a limit they hold `max`, or a number above all memory."""
    names, used_file, droppable_key = files
    for name in names:
        with suppress(OSError, ValueError):
            total = int((folder / name).read_text())
            used = int((folder / used_file).read_text())
            with suppress(OSError, ValueError, KeyError):
                used -= int(
                    dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())[
                        droppable_key
                    ]
                )
            yield MemoryLimit(
                name=f"{folder.relative_to(root) / name}",
                total_bytes=total,
                free_bytes=max(0, min(total, total - used)),
            )
