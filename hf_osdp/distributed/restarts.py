"""Whether this process goes on from where another was interrupted: what launchers and clusters say of it."""

from __future__ import annotations

import os
from collections.abc import Mapping

RESTART_VARIABLES = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "OSDP_RESTART_COUNT")
"""Counted by torchrun, by SLURM when it requeues a job, and by hf_osdp after running out of memory."""


def restart_count(environment: Mapping[str, str] | None = None) -> int:
    """How many times this run was started before, as the one who started it again counts.

    Args:
        environment: variables to read; None reads this process's.
    """
    environment = os.environ if environment is None else environment
    counts = (environment.get(name, "") for name in RESTART_VARIABLES)
    return max((int(count) for count in counts if count.isdecimal()), default=0)
