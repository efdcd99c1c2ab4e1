"""Where ranks wait for one that works long: on the host, where no device's watchdog counts the seconds."""

from __future__ import annotations

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

_LONGEST = timedelta(hours=24)
"""Above any save or search. A rank that ends closes its connections, which ends the others' waiting at once."""
_formed: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def waiting_group() -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks in which one may be waited for; None where no other rank is real.

    NCCL ends ranks that wait in a collective for 600 s, gloo's own default is 1800 s (`torch/distributed/constants.py`); a checkpoint or
    a search may take longer. Collective the first time; it is formed once for each process group.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    world = dist.group.WORLD
    if world not in _formed:
        _formed[world] = dist.new_group(backend="gloo", timeout=_LONGEST)
    return _formed[world]


def wait_for_ranks() -> None:
    """Return when every rank is here. Collective."""
    if (group := waiting_group()) is not None:
        dist.barrier(group=group)
