"""Ranks at the start, and SIGTERM."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from contextlib import nullcontext

import pytest

from hf_osdp.distributed.process_group import differences, prepare_group
from hf_osdp.distributed.stop import EXIT_CODE, StopSignal
from hf_osdp.errors import LaunchError


def test_restarts_with_a_store_that_torchrun_keeps_are_refused(monkeypatch):
    given = {"WORLD_SIZE": 2, "RANK": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500,
             "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    for restarts in (0, 3):
        for name, value in {**given, "TORCHELASTIC_MAX_RESTARTS": restarts}.items():
            monkeypatch.setenv(name, str(value))
        refused = pytest.raises(LaunchError, match="start it by TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun")
        with refused if restarts else nullcontext():
            prepare_group()


def test_differences_name_values_and_ranks():
    assert differences({0: {"plan": "x"}, 1: {"plan": ""}, 2: {"plan": "x"}}) is None, "an empty text agrees with all"
    line = differences({0: {"plan": "x", "model": "m"}, 1: {"plan": "y", "model": "m"}, 2: {"plan": "x"}})
    assert line == "plan is x on ranks 0, 2, y on rank 1; model is m on ranks 0-1, not known on rank 2"


@pytest.fixture
def came():
    """How often SIGTERM reached whoever had it before."""
    calls = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    yield calls
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_stop_signal_ends_loops_and_restores_handler_otherwise(came):
    with StopSignal() as stop:
        terminate()
    assert stop.received and not came
    terminate()
    assert came
    with pytest.raises(KeyError), StopSignal() as stop:
        terminate()
        assert stop.agreed()
        raise KeyError("saving failed")
    terminate()
    assert len(came) == 2


def test_stop_signal_ignores_sigterm_after_loop_that_it_ended(came):
    with StopSignal() as stop:
        terminate()
        assert stop.agreed()
    terminate()
    with pytest.raises(SystemExit) as end:
        stop.exit()
    stop.abandon()
    terminate()
    assert end.value.code == EXIT_CODE and not came
    with stop:  # somebody went on in spite of it
        pass
    terminate()
    assert came


def test_stop_signal_leaves_forks_to_sigterm(came):
    """Such as a worker that multiprocessing ends, and waits for."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with StopSignal() as stop:
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        worker.start()
        time.sleep(0.3)  # Python drops signals that come while it forks
        worker.terminate()
        worker.join(5.0)
        code = worker.exitcode
        worker.kill()
        assert code == -signal.SIGTERM
        terminate()
        assert stop.received
