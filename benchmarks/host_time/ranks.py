"""The processes of one variant."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.shared import Forks

from .variants import Variant

STEPS = 6
"""Steps of a variant before it is the next one's turn."""


def start(variant: Variant, model: str) -> Forks:
    """Start ranks that train a model; asked for steps of so many micro-steps, each answers by their CPU seconds."""
    return Forks(
        _serve, variant, model, world_size=variant.ranks, title=variant.title, launched=variant.launched
    )  # fmt: skip


def is_ready(ranks: Forks) -> bool:
    """Wait until all ranks have taken their first steps; return False if one fails."""
    try:
        return all(ranks.answers())
    except EOFError:
        return False


def _serve(pipe: Connection, rank: int, variant: Variant, model: str) -> None:
    torch.cuda.set_device(rank)
    if variant.launched:
        dist.init_process_group("cpu:gloo,cuda:nccl")
    training = variant.make(model)
    for _ in range(training.untimed):
        training.step(1)
    ctypes.CDLL(os.environ["LD_PRELOAD"], mode=os.RTLD_GLOBAL).be_quiet()
    gc.collect()
    gc.freeze()
    pipe.send(True)
    while True:
        micro_steps, seconds = pipe.recv(), []
        training.step(micro_steps)
        for _ in range(STEPS):
            before_s = cpu_seconds()
            training.step(micro_steps)
            seconds.append(cpu_seconds() - before_s)
            torch.cuda.synchronize()
        pipe.send(seconds)


def cpu_seconds() -> float:
    """Return the CPU time of this thread and of autograd's."""
    total_ns = time.thread_time_ns()
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("pt_autograd"):
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9
