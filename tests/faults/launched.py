"""A training under torchrun that kills one of its own ranks in its first start: `python -m tests.faults.launched trainer FOLDER [STEP]`."""

from __future__ import annotations

import os
import signal
import sys

import torch

from hf_osdp.distributed.restart import restart_count
from hf_osdp.sharding.environment import form_process_group
from tests.faults import training


def main(loop: str, folder: str, step: str | None = None) -> None:
    """Train; rank 1 is killed before the given update, unless this is a restart."""
    torch.set_num_threads(1)
    if step is not None and os.environ["RANK"] == "1" and not restart_count():
        _killed_in_step(int(step))
    if loop == "plain":
        form_process_group(needed=True)
    training.train(training.Training(loop=loop, sharded=True), folder)


def _killed_in_step(step: int) -> None:
    steps = iter(range(1, step))
    update = torch.optim.AdamW.step

    def counted(self: torch.optim.Optimizer, *args: object, **kwargs: object) -> object:
        if next(steps, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, *args, **kwargs)

    torch.optim.AdamW.step = counted


if __name__ == "__main__":
    main(*sys.argv[1:])
