"""pytest in forks of a process that has imported the slow packages, so that a mutant costs its tests and not their
imports.

    python -m tests.mutation.warm serve SOCKET &
    python -S tests/mutation/warm.py ask SOCKET ARGUMENTS OF PYTEST

Nothing of hf_osdp is imported before the fork: each sees the mutant that lies there then.
"""

import os
import signal
import socket
import sys
import time

MOST_S = 180.0
"""Mutants may never end."""


def serve(path: str) -> None:
    """Answer one question after the other, until killed."""
    import hypothesis
    import ortools.sat.python.cp_model  # noqa: F401
    import pydantic  # noqa: F401
    import pytest
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    found = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.shrink]
    # one example that fails is enough
    hypothesis.settings.register_profile("mutants", phases=found, report_multiple_bugs=False)
    hypothesis.settings.load_profile("mutants")
    if os.path.exists(path):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as lines:
                pid = os.fork()
                if pid == 0:
                    os._exit(_tests(pytest, lines.readline().split("\0")))
                lines.write(f"{_code_of(pid)}\n")


def _code_of(pid: int) -> int:
    """As subprocess gives it, when the process has ended or was given up."""
    deadline = time.monotonic() + MOST_S
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            deadline += MOST_S
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(ended[1])


def _tests(pytest, arguments: list[str]) -> int:
    assert not any(name.split(".")[0] == "hf_osdp" for name in sys.modules)
    os.setsid()
    sys.stdout = sys.stderr = open(os.devnull, "w")
    try:
        return int(pytest.main([argument.rstrip("\n") for argument in arguments]))
    except BaseException:
        return 3


def ask(path: str, arguments: list[str]) -> int:
    """The exit code of pytest with these arguments.

    Without an answer there is none: a mutant is not noticed by a server that is gone.
    """
    with socket.socket(socket.AF_UNIX) as asking:
        while asking.connect_ex(path):
            time.sleep(0.1)
        with asking.makefile("rw") as lines:
            lines.write("\0".join(arguments) + "\n")
            lines.flush()
            return int(lines.readline())


if __name__ == "__main__":
    command, place, *given = sys.argv[1:]
    sys.exit(serve(place) if command == "serve" else ask(place, given))
