"""What every rank must call, because it gathers a sharded model's parameters: an error on the ranks that do, instead of a hang."""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist

from ..errors import OSDPError
from .stores import are_several, start_space, wait_for

TOGETHER_S = 300.0
"""How long the ranks that came wait for the others, in seconds: longer than one of them logs or writes beforehand, less than NCCL waits."""


def require_all(what: str) -> None:
    """Go on once every rank has called this for the same thing. It uses the store and no collective, so that one rank alone can tell.

    Args:
        what: is being called, for example `GPT2LMHeadModel.generate`.

    Raises:
        OSDPError: ranks did not come within `TOGETHER_S`, or called something else.
    """
    if not are_several():
        return
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    space = start_space("together")
    call = space.add(f"calls_of/{rank}", 1)
    keys = [f"{call}/{other}" for other in ranks]
    space.set(keys[rank], what)
    came = wait_for(space, keys, TOGETHER_S)
    called = {other: space.get(key).decode() for other, key in zip(ranks, keys, strict=True) if came or space.check([key])}
    with suppress(NotImplementedError):  # of stores that keep what they have
        space.delete_key(f"{call - 2}/{rank}" if came else keys[rank])  # all have seen those of two calls before
    if not came:
        space.add(f"calls_of/{rank}", -1)
    if not came or set(called.values()) != {what}:
        alike = [other for other in called if called[other] == what]
        missing = [other for other in ranks if other not in alike]
        raise OSDPError(
            f"{what} gathers a sharded model and must be called on every rank, but ranks {alike} called it and, within"
            f" {TOGETHER_S:.0f} s, ranks {missing} did not; call it on all, and use the result on one."
        )
