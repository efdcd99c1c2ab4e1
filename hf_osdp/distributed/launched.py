"""What the launcher says about this process, where the other ranks are met, and how long to wait for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..quantities import whole_number
from .rank_reports import TIMEOUT_VARIABLE

DEFAULT_TIMEOUT_S = 300.0
"""What torch's own stores wait, as `TCPStore` has it by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the launcher says about this process, and where ranks meet."""

    rank: int
    world_size: int
    ranks_per_machine: int | None
    """None where the launcher does not say."""
    address: str
    port: int
    hosts_store: bool
    """Whether this process opens the store: rank 0 does where no launcher has."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Launch | None:
        """The variables of `torchrun` and `accelerate launch`; None where they do not describe several processes.

        Args:
            environment: variables to read; None reads this process's.

        Raises:
            ValueError: a variable is not a number.
        """
        environment = os.environ if environment is None else environment
        if not all(environment.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
            return None
        rank, size, port = (whole_number(environment, name, 0) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        if size == 1:
            return None
        return cls(
            rank=rank,
            world_size=size,
            ranks_per_machine=whole_number(environment, "LOCAL_WORLD_SIZE", 1) if environment.get("LOCAL_WORLD_SIZE") else None,
            address=environment["MASTER_ADDR"],
            port=port,
            hosts_store=rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        )

    @property
    def place(self) -> str:
        """`address:port` of the store."""
        return f"{self.address}:{self.port}"


def launch_timeout_s(timeout_s: float | None = None) -> float:
    """Seconds to wait for ranks that were launched: what is given, else `OSDP_LAUNCH_TIMEOUT_S`, else 300.

    Raises:
        ValueError: it is not a number of seconds above 0.
    """
    given = os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S) if timeout_s is None else timeout_s
    try:
        limit = float(given)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        source = TIMEOUT_VARIABLE if timeout_s is None else "timeout_s"
        raise ValueError(f"{source}={given} is not a number of seconds above 0; give one, such as 300, or leave it out.")
    return limit


def local_rank(environment: Mapping[str, str] | None = None) -> int | None:
    """This process's number on its machine; None where the launcher does not say."""
    environment = os.environ if environment is None else environment
    return whole_number(environment, "LOCAL_RANK", 0) if environment.get("LOCAL_RANK") else None


def one_machine(world_size: int, address: str | None, environment: Mapping[str, str] | None = None) -> bool:
    """Whether the launcher has all ranks on this machine: it says so, or they meet at the loopback.

    Args:
        world_size: number of ranks.
        address: where they meet; None where the launcher does not say.
        environment: variables to read; None reads this process's.
    """
    environment = os.environ if environment is None else environment
    here = whole_number(environment, "LOCAL_WORLD_SIZE", 1) if environment.get("LOCAL_WORLD_SIZE") else None
    return here == world_size if here else address in ("127.0.0.1", "localhost", "::1")
