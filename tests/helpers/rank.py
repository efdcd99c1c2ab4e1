"""One rank of `run_ranks`."""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

EXIT_ERROR = 3


def main(task_path: Path, rank: int) -> int:
    """Run the task and write `result<rank>` or `error<rank>` beside it."""
    task = pickle.loads(task_path.read_bytes())
    faulthandler.enable()
    faulthandler.dump_traceback_later(task["timeout_s"], exit=True)
    threading.Thread(target=_end_with_parent, args=(int(os.environ["OSDP_TEST_PARENT"]),), daemon=True).start()
    sys.path[:] = task["path"]
    try:
        result = pickle.dumps(_call(task))
    except BaseException as error:
        content = {"time": time.time(), "type": type(error).__name__, "traceback": traceback.format_exc()}
        _write(task_path.with_name(f"error{rank}"), pickle.dumps(content))
        return EXIT_ERROR
    _write(task_path.with_name(f"result{rank}"), result)
    return 0


def _call(task: dict):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    fn, args = pickle.loads(task["fn"]), pickle.loads(task["args"])
    if task["init"]:
        # Longer than the task's limit: the stacks of all ranks tell more than gloo's own time-out on one of them.
        dist.init_process_group("gloo", timeout=timedelta(seconds=task["timeout_s"] + 60))
    result = fn(*args)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return result


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


def _end_with_parent(parent: int) -> None:
    """A test run that was killed must not leave ranks waiting in a collective."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(EXIT_ERROR)


def leave(code: int) -> None:
    """Without interpreter shutdown: a failed rank may hold a collective that never ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_code = EXIT_ERROR
    try:
        exit_code = main(Path(sys.argv[1]), int(sys.argv[2]))
    finally:
        leave(exit_code)
