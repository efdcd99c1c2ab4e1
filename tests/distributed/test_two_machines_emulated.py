"""Emulated machines for real: bytes over their link against theory, and nothing left behind.

Skipped where not permitted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.two_machines import emulate

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("net", "pid", "mnt", "uts")


@pytest.fixture(scope="module", autouse=True)
def permitted():
    try:
        emulate.ways_in("100mbit")
    except emulate.NotPermitted as error:
        pytest.skip(f"machines cannot be emulated here: {error}")


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "benchmarks/two_machines/emulate.py"), *arguments]


@pytest.mark.slow
def test_bytes_over_the_link_are_those_of_theory():
    done = subprocess.run(
        command("--rate=1gbit", "--timeout=200", "--", "-m", "tests.helpers.emulated_rank"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0
    for name, row in json.loads(done.stdout.splitlines()[-1]).items():
        for sent in row["sent"]:
            assert sent == pytest.approx(row["theory"], rel=0.015), name


SENDS = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
message = torch.zeros(2**19)
for source in (0, 1, 0, 1):  # connections first
    dist.barrier()
    began = time.monotonic()
    dist.send(message, 1 - source) if dist.get_rank() == source else dist.recv(message, source)
    dist.barrier()
    if dist.get_rank() == 0:
        print(time.monotonic() - began, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rate", ["20mbit/80mbit", "unlimited/20mbit"])
def test_a_link_between_machines_of_two_rates_runs_at_the_lower_in_both_directions(rate, tmp_path):
    (tmp_path / "sends.py").write_text(SENDS)
    done = subprocess.run(
        command(f"--rate={rate}", "--ranks=1", "--timeout=100", "--", str(tmp_path / "sends.py")),
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds = [float(line) for line in done.stdout.splitlines()]
    at_the_lower = 8 * 2**21 / 20e6
    assert seconds[2:] == [pytest.approx(at_the_lower, rel=0.2)] * 2


@pytest.mark.slow
def test_a_failing_rank_ends_all_with_its_code():
    done = subprocess.run(
        command("--ranks=1", "--timeout=100", "--", "--no-python", "false"), capture_output=True, text=True
    )
    assert done.returncode == 1


@pytest.mark.parametrize(
    "how",
    [
        "SIGKILL of the caller",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("SIGKILL", "SIGINT", "SIGTERM")),
    ],
)
def test_nothing_is_left_of_what_was_interrupted(how):
    number = getattr(signal, how.split()[0])
    caller = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"] if "caller" in how else []
    with emulating(caller) as (process, marked):
        wait_for(lambda: len(sleeping(marked)) == 2)
        namespaces = {name for pid in sleeping(marked) for name in namespaces_of(pid)} - namespaces_of("self")
        assert len(namespaces) == 2 + 2 + 2  # pid and mount are common to the nodes, network and UTS are not
        process.send_signal(number)
        wait_for(lambda: not sleeping(marked) and not in_namespaces(namespaces))
    assert process.returncode != 0


@contextmanager
def emulating(caller: list[str]) -> Iterator[tuple[subprocess.Popen, str]]:
    """Two machines that sleep; yields the started process, and the argument by which the sleepers are known."""
    marked = f"{100_000 + os.getpid()}.{time.monotonic_ns()}"
    process = subprocess.Popen(
        [*caller, *command("--ranks=1", "--", "--no-python", "sleep", marked)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process, marked
    finally:
        process.kill()
        process.wait()


def sleeping(marked: str) -> list[str]:
    """Processes `sleep MARKED`, wherever they are."""
    return [pid for pid in processes() if read(f"/proc/{pid}/cmdline") == f"sleep\0{marked}\0"]


def in_namespaces(namespaces: set[str]) -> list[str]:
    """Processes that live in one of them: while there is one, it exists."""
    return [pid for pid in processes() if namespaces_of(pid) & namespaces]


def processes() -> list[str]:
    return [entry for entry in os.listdir("/proc") if entry.isdigit()]


def namespaces_of(pid: str) -> set[str]:
    try:
        return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in KINDS}
    except OSError:  # it has ended, or is another user's
        return set()


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def wait_for(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)
