"""A loop as `StopSignal` shows it, under a launcher that ends the other ranks as soon as one has ended."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch.distributed as dist

from hf_osdp import last_checkpoint
from hf_osdp.checkpoint import writer
from hf_osdp.distributed.stop import EXIT_CODE, StopSignal
from hf_osdp.sharding.environment import form_process_group
from tests.helpers.distributed import ranks_of
from tests.helpers.rank import as_script


def stopped_while_it_writes(folder: str) -> None:
    form_process_group(needed=True)
    complete = writer.complete

    def slow(*args: object, **kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # as torchrun does where another rank has ended
        time.sleep(0.5)
        complete(*args, **kwargs)
        print("complete")

    writer.complete = slow
    writes = writer.CheckpointWriter(in_background=True)
    with StopSignal() as stop:
        for step in range(10):
            if step == 3 and dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.agreed():
                with writes.new(Path(folder) / f"checkpoint-{step}"):
                    pass
                break
    stop.exit()


def test_checkpoint_in_background_is_complete_before_any_rank_ends(tmp_path):
    with ranks_of(as_script, 2, stopped_while_it_writes, str(tmp_path), init=False, timeout_s=30) as ranks:
        while any(rank.poll() is None for rank in ranks):
            time.sleep(0.01)
        assert [(rank.returncode, rank.output) for rank in ranks] == [(EXIT_CODE, "complete\n"), (EXIT_CODE, "")]
    assert last_checkpoint(tmp_path).name == "checkpoint-4"
