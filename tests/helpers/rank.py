"""Ranks of `run_ranks`, as forks of one process that has imported the slow packages once (`python -m
tests.helpers.rank serve`), or each a new process (`python -m tests.helpers.rank FOLDER RANK`).

The process that forks has one thread of Python's, forms no group and sets nothing, so that a fork is what a new
process would be after the same imports.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import itertools
import json
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

EXIT_ERROR = 3
TASK = "task"
SLOW_PACKAGES = (
    "torch.distributed.checkpoint", "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama", "transformers.trainer", "datasets", "pytest",
    "hf_osdp.integrations.plain_loop",
    "hf_osdp.integrations.trainer", "hf_osdp.cli.app", "ortools.sat.python.cp_model", "pydantic", "torch.profiler",
)  # fmt: skip
"""What ranks import, which takes one some seconds."""
_WATCHED = ("torch", "torch.cuda", "torch.distributed", "torch.optim", "random")
"""Packages of others whose functions tests replace."""


def serve() -> None:
    """Answer each line of JSON by one: `{"folder": path, "rank": 0, "env": {...}}` by a process id, `{"pid": 1}` by
    its exit code or null while it runs. Ends with whoever asks. OSDP_TEST_PRELOAD names further packages, with
    commas."""
    for name in (*SLOW_PACKAGES, *filter(None, os.environ.get("OSDP_TEST_PRELOAD", "").split(","))):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each rank's first collections go through all of it, and copy its pages
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer = (
            _exit_code(request["pid"])
            if "pid" in request
            else _fork(Path(request["folder"]), request["rank"], request["env"])
        )
        os.write(1, json.dumps(answer).encode() + b"\n")


def _exit_code(pid: int) -> int | None:
    """As subprocess gives it: negative for a signal."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _fork(folder: Path, rank: int, env: dict[str, str]) -> int:
    pid = os.fork()
    if pid == 0:
        code = EXIT_ERROR
        try:
            _become(folder, rank, env)
            code = main(folder, rank)
        except BaseException:
            traceback.print_exc()
        finally:
            leave(code)
    return pid


def _become(folder: Path, rank: int, env: dict[str, str]) -> None:
    """A session, environment, output and random state of its own."""
    os.setsid()
    output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(env, OSDP_TEST_PARENT=str(os.getppid()))
    sys.argv[1:] = [str(folder), str(rank)]
    import numpy

    random.seed()
    numpy.random.seed()


def main(folder: Path, rank: int) -> int:
    """Run the task and write `result<rank>` or `error<rank>` beside it."""
    task = pickle.loads((folder / TASK).read_bytes())
    faulthandler.enable()
    faulthandler.dump_traceback_later(task["timeout_s"], exit=True)
    threading.Thread(target=_end_with_parent, args=(int(os.environ["OSDP_TEST_PARENT"]),), daemon=True).start()
    sys.path[:] = task["path"]
    try:
        result = pickle.dumps(_call(task))
    except BaseException as error:
        found = {
            "time": time.time(),
            "type": type(error).__name__,
            "traceback": traceback.format_exc() + _values(error),
        }
        write(folder / f"error{rank}", pickle.dumps(found))
        return EXIT_ERROR
    write(folder / f"result{rank}", result)
    return 0


def _call(task: dict[str, Any]) -> Any:
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


def serve_calls(folder: str) -> None:
    """Call, on each of several ranks, the functions in `call0`, `call1`, ... of the folder as the bell rings, and
    write `done0.<rank>`, ... after each: the result, and whatever the function has replaced. An error ends the rank.
    """
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState, PartialState

    end_groups = _share_meshes()
    rank, random_state, folder_before, own = dist.get_rank(), torch.get_rng_state(), os.getcwd(), dict(os.environ)
    bell = os.open(Path(folder) / f"bell{rank}", os.O_RDWR)
    for number in itertools.count():
        faulthandler.cancel_dump_traceback_later()
        os.read(bell, 1)  # a dozen ranks that looked for files would take a core
        timeout_s, environment, fn, args = pickle.loads((Path(folder) / f"call{number}").read_bytes())
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        if number == 0:  # what makes a rank of it stays
            own = {name: value for name, value in own.items() if environment.get(name) != value}
        os.environ.clear()
        os.environ.update({**environment, **own})
        os.chdir(folder_before)
        torch.set_rng_state(random_state)
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        call = pickle.loads(fn)  # imports the test's module
        _forget()
        before = _replaceable()
        result = pickle.dumps(call(*pickle.loads(args)))
        dist.barrier()
        end_groups()
        gc.collect()
        after = _replaceable()
        # torch wraps `step` of a class of optimizers when the first of them is made.
        changed = [f"{place}.{name}" for place, names in before.items() for name, value in names.items()
                   if (new := after.get(place, {}).get(name)) is not value
                   and not getattr(new, "hooked", False)]  # fmt: skip
        write(Path(folder) / f"done{number}.{rank}", pickle.dumps((result, changed)))


def _forget() -> None:
    """Forget the groups that earlier calls formed, which ranks form together, and the searches that they made."""
    for module, name in (
        ("hf_osdp.distributed.process_group", "_gloo_groups"),  # its count of calls names keys of the store
        ("hf_osdp.distributed.mesh", "_topologies"),
    ):
        if module in sys.modules:
            getattr(sys.modules[module], name).clear()
    if module := sys.modules.get("hf_osdp.planner.search.search"):
        module._searched.cache_clear()


def _share_meshes() -> Callable[[], None]:
    """Let calls have the meshes of earlier calls, which torch keeps in what it works out for operators; return what
    destroys all other groups that a call has formed: each has threads.
    """
    import torch.distributed as dist

    from hf_osdp.distributed import mesh

    kept: set[dist.ProcessGroup] = set()
    form = functools.cache(mesh.init_device_mesh)

    def formed(*args: Any, **kwargs: Any) -> Any:
        found = form(*args, **kwargs)
        kept.update(found.get_all_groups())
        return found

    mesh.init_device_mesh = formed

    def end_others() -> None:
        _forget()
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD and group not in kept:
                dist.destroy_process_group(group)

    return end_others


def _replaceable() -> dict[str, dict[str, Any]]:
    """What a test may have replaced for all that come after it: by place, names and their values."""
    import torch
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    from hf_osdp.modeling import step_hooks

    held = {
        f"{name} of {owner.__name__}": value
        for owner in (modules, optimizers)
        for name, value in vars(owner).items()
        if name.startswith("_global_") and hasattr(value, "values")
    }
    # Ours stays with torch's, and runs these.
    ours = step_hooks.StepHooks
    hooks = {name: sum(not isinstance(getattr(hook, "__self__", None), ours) for hook in value.values())
             for name, value in held.items()}  # fmt: skip
    hooks |= {name: sum("<locals>" in getattr(hook, "__qualname__", "<locals>") for hook in getattr(step_hooks, name))
              for name in ("before_step", "after_step")}  # fmt: skip
    found: dict[str, dict[str, Any]] = {
        "torch's state": {
            "dtype": torch.get_default_dtype(),
            "grad": torch.is_grad_enabled(),
            "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "SIGTERM": signal.getsignal(signal.SIGTERM),
            **hooks,
        }
    }
    for name, module in list(sys.modules.items()):
        if name in _WATCHED or name.startswith(("hf_osdp", "tests.")):
            found[name] = dict(vars(module))
            for own in [value for value in found[name].values() if isinstance(value, type)]:
                if own.__module__ == name or own is torch.Tensor:
                    found[f"{name}.{own.__name__}"] = dict(vars(own))
    return found


def _values(error: BaseException) -> str:
    """The values where an assertion failed, which pytest shows of its own process only."""
    if not isinstance(error, AssertionError):
        return ""
    tests = str(Path(__file__).parents[1])
    frames = [
        frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename.startswith(tests)
    ]
    return "".join(f"    {name} = {repr(value)[:300]}\n" for name, value in frames[-1].f_locals.items())


def write(path: Path, content: bytes) -> None:
    """All of it or nothing, for who waits for the file."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


def _end_with_parent(parent: int) -> None:
    """A test run that was killed must not leave ranks waiting in a collective."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(EXIT_ERROR)


def as_script(fn: Callable[..., Any], *args: Any) -> None:
    """End as the interpreter ends a script: with what it wrote, its exit code, and what multiprocessing registers
    with atexit.
    """
    from multiprocessing import util

    code: object = 0
    try:
        fn(*args)
    except SystemExit as stop:
        code = stop.code
    util._exit_function()
    leave(code if isinstance(code, int) else 1)


def leave(code: int) -> None:
    """Without interpreter shutdown: a failed rank may hold a collective that never ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
        sys.exit()
    exit_code = EXIT_ERROR
    try:
        exit_code = main(Path(sys.argv[1]), int(sys.argv[2]))
    finally:
        leave(exit_code)
