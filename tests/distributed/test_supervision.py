"""Faults of ranks under real launchers (cases of tests/faults/supervision.py): which line names them, and when."""

from __future__ import annotations

import sys

import psutil
import pytest

from benchmarks.two_machines import emulate
from tests.faults.supervision import run_case
from tests.helpers.distributed import free_port, run_program

BUSY_S = 25.0
"""What a case may take on cores that others use: starting a launcher anew takes most of it."""


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = {process.pid for process in psutil.process_iter()}
    yield
    left = [
        process
        for process in psutil.process_iter()
        if process.pid not in before and "--as-rank" in command_of(process)
    ]
    assert not left


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "message", "within_s"),
    [
        ("killed", "SIGKILL", BUSY_S),
        ("raises", "KeyError: 'the reason'", BUSY_S),
        ("sigterm-rank", "SIGTERM: saves after step", BUSY_S),
        ("versions", "Ranks are about to run different things: transformers is", BUSY_S),
        ("raises-accelerate", "KeyError: 'the reason'", BUSY_S),
        ("killed-none", "by peer", BUSY_S),
        ("sigterm-launcher", "SIGTERM: saves after step", BUSY_S),
        ("restart", "Restarted and trained to the end", 60.0),
        ("oom", "Restarted and trained to the end, limit 1073741824", 60.0),
        ("interface", "nowhere0", BUSY_S),
        ("models", "Ranks are about to run different things: the model is Linear", BUSY_S),
        ("alone", "must be called on every rank, but ranks [0] called it and, within 20 s, ranks [1] did not", 60.0),
    ],
)
def test_fault_is_named_and_all_ranks_end(case, message, within_s):
    outcome = run_case(case, "ours", within_s)
    assert message in outcome["message"] and not outcome["seconds"].startswith(">"), outcome


@pytest.mark.slow
@pytest.mark.parametrize("case", ["cut-off", "partition"])
def test_cut_network_ends_all_at_the_timeout_of_the_group(case):
    try:
        emulate.ways_in(emulate.UNLIMITED)
    except emulate.NotPermitted as error:
        pytest.skip(f"machines cannot be emulated here: {error}")
    outcome = run_case(case, "ours", 100.0)
    assert "Timed out waiting" in outcome["output"] and not outcome["seconds"].startswith(">"), outcome


IN_A_NOTEBOOK = """
from accelerate import notebook_launcher

def train(fails):
    import time
    import torch.distributed as dist
    from hf_osdp import OSDPAccelerator
    accelerator = OSDPAccelerator(cpu=True, osdp={})
    if fails and accelerator.process_index == 1:
        raise KeyError("the reason")
    time.sleep(60 if fails else 0.5 * accelerator.process_index)
    print("trained", flush=True)

notebook_launcher(train, (False,), num_processes=2, use_port="PORT")
notebook_launcher(train, (True,), num_processes=2, use_port="PORT")
"""


@pytest.mark.slow
def test_error_of_a_notebooks_rank_surfaces(tmp_path):
    (tmp_path / "script.py").write_text(IN_A_NOTEBOOK.replace("PORT", free_port()))
    done = run_program([sys.executable, tmp_path / "script.py"], timeout_s=100, ACCELERATE_USE_CPU="true")
    assert done.stdout.count("trained") == 2 and "KeyError: 'the reason'" in done.stderr
