"""Who has SIGTERM: while a loop listens, in its forks, and once it has ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from hf_osdp.distributed.stop import EXIT_CODE, StopSignal


@pytest.fixture(autouse=True)
def came():
    """How often SIGTERM reached whoever had it before."""
    calls = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    yield calls
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_fork_ends_by_sigterm_while_a_loop_listens():
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


def test_sigterm_does_what_it_did_after_a_loop_that_it_did_not_end(came):
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


def test_after_a_loop_that_it_ended_sigterm_does_nothing_until_the_process_ends(came):
    with StopSignal() as stop:
        terminate()
        assert stop.agreed()
    terminate()
    with pytest.raises(SystemExit) as end:
        stop.exit()
    stop.abandon()
    terminate()
    assert end.value.code == EXIT_CODE and not came
    with pytest.raises(SystemExit), StopSignal() as stop:  # somebody went on in spite of it
        terminate()
        assert stop.agreed()
        stop.exit()
    terminate()
    assert not came
    with StopSignal():
        pass
    terminate()
    assert came
