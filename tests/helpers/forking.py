"""Starts ranks as forks of one process that has imported the slow packages once: `python -m tests.helpers.forking`.

It has one thread, forms no group and imports nothing of this repository but the ranks' first lines, so that a fork is what a fresh
process would be after the same imports.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from pathlib import Path
from types import TracebackType

from . import rank as rank_module


def preload() -> None:
    """What nearly every rank imports, in seconds. Not `transformers.Trainer`: it brings packages that start threads. Whoever runs
    hundreds of ranks that need more names it in OSDP_TEST_PRELOAD, with commas."""
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401
    from transformers import BertForMaskedLM, GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401

    for name in filter(None, os.environ.get("OSDP_TEST_PRELOAD", "").split(",")):
        importlib.import_module(name)


def serve() -> None:
    """Answer each line of JSON by one: `{"task": path, "rank": 0, "env": {...}}` by a process id, `{"pid": 1}` by its exit code or
    null while it runs. Ends with whoever asks."""
    preload()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer = _exit_code(request["pid"]) if "pid" in request else _fork(Path(request["task"]), request["rank"], request["env"])
        os.write(1, json.dumps(answer).encode() + b"\n")


def _exit_code(pid: int) -> int | None:
    """As subprocess gives it: negative for a signal."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _fork(task: Path, rank: int, env: dict[str, str]) -> int:
    pid = os.fork()
    if pid == 0:
        code = rank_module.EXIT_ERROR
        try:
            _become(task, rank, env)
            code = rank_module.main(task, rank)
        except BaseException:
            sys.excepthook(*_current())
        finally:
            rank_module.leave(code)
    return pid


def _become(task: Path, rank: int, env: dict[str, str]) -> None:
    """A session, environment, output and random state of its own."""
    os.setsid()
    files = {0: os.open(os.devnull, os.O_RDONLY), 1: os.open(task.with_name(f"output{rank}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)}
    for number, file in (*files.items(), (2, files[1])):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(env, OSDP_TEST_PARENT=str(os.getppid()))
    sys.argv[1:] = [str(task), str(rank)]
    import numpy

    random.seed()
    numpy.random.seed()


def _current() -> tuple[type[BaseException], BaseException, TracebackType | None]:
    kind, error, trace = sys.exc_info()
    assert kind is not None and error is not None
    return kind, error, trace


if __name__ == "__main__":
    serve()
