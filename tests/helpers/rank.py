"""What a rank of `run_ranks` does in its process: it calls functions, and tells what they returned or raised."""

from __future__ import annotations

import faulthandler
import functools
import gc
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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_WATCHED = ("torch", "torch.cuda", "torch.distributed", "torch.optim", "random")
"""Packages of others whose functions tests replace."""


def main(connection: Connection, output: str, env: dict[str, str], group_s: float, shared: bool) -> None:
    """Take a call from the connection, or, `shared`, one after the other until one fails. A process group with the
    time-out `group_s` is formed before the first, unless that is 0.
    """
    _become(output, env)
    try:
        _serve(connection, group_s) if shared else _call_once(connection, group_s)
    except SystemExit:
        raise  # as a script ends
    except BaseException as error:
        trace = traceback.format_exc() + _values(error)
        _say(connection, type=type(error).__name__, traceback=trace, time=time.time())
    # Without interpreter shutdown: a failed rank may hold a collective that never ends.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _become(output: str, env: dict[str, str]) -> None:
    """Take a session, output, environment and random state of its own."""
    os.setsid()
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, written), (2, written)):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    sys.argv[1:] = []
    import numpy

    random.seed()
    numpy.random.seed()
    faulthandler.enable()
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _say(connection: Connection, **content: Any) -> None:
    connection.send_bytes(pickle.dumps(content))


def _form_group(group_s: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if group_s:
        dist.init_process_group("gloo", timeout=timedelta(seconds=group_s))


def _call_once(connection: Connection, group_s: float) -> None:
    import torch.distributed as dist

    timeout_s, _, fn, args = pickle.loads(connection.recv_bytes())
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    _form_group(group_s)
    result = pickle.dumps(pickle.loads(fn)(*pickle.loads(args)))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    _say(connection, result=result)


def _serve(connection: Connection, group_s: float) -> None:
    """Also tell after each call what the function has replaced. An error ends the rank."""
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState, PartialState

    _form_group(group_s)
    end_groups, random_state, own = _share_meshes(), torch.get_rng_state(), dict(os.environ)
    is_first = True
    while True:
        faulthandler.cancel_dump_traceback_later()
        timeout_s, environment, fn, args = pickle.loads(connection.recv_bytes())
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        if is_first:  # what makes a rank of it stays
            own, is_first = {name: value for name, value in own.items() if environment.get(name) != value}, False
        os.environ.clear()
        os.environ.update({**environment, **own})
        os.chdir(ROOT)
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
        _say(connection, result=result, changed=changed)


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
    frames = [f for f, _ in traceback.walk_tb(error.__traceback__) if f.f_code.co_filename.startswith(tests)]
    return "".join(f"    {name} = {repr(value)[:300]}\n" for name, value in frames[-1].f_locals.items())


def _end_with_parent(parent: int) -> None:
    """A test run that was killed must not leave ranks waiting in a collective."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
