"""Ranks at the start, and SIGTERM."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import Store, TCPStore

from hf_osdp.distributed.process_group import _forget_earlier_start, _meet_rank_zero, differences
from hf_osdp.distributed.stop import EXIT_CODE, StopSignal


@pytest.fixture
def store() -> Store:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def client_of(store: TCPStore) -> Store:
    return TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20))


def start(store: TCPStore, *ranks: int, of: int) -> list[threading.Thread]:
    """Let ranks come; those that still wait."""

    def come(rank: int) -> None:
        _meet_rank_zero(client_of(store), rank) if rank else _forget_earlier_start(client_of(store), of)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20 if 0 in ranks else 0.3)
    return [thread for thread in threads if thread.is_alive()]


def test_ranks_wait_for_this_starts_rank_zero_which_forgets_addresses_of_an_earlier_start(store):
    assert not start(store, 0, 1, of=2)
    store.set("default_pg/0//cpu//0/0", "the address of a process that has ended")
    late = start(store, 1, 2, of=3)
    assert len(late) == 2, "they do not take the answer of the earlier start"
    assert not start(store, 0, of=3)
    for thread in late:
        thread.join(20)
        assert not thread.is_alive()
    assert not store.check(["default_pg/0//cpu//0/0"])


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


def test_stop_signal_restores_handler_except_after_a_loop_that_it_ended(came):
    with StopSignal() as stop:
        terminate()
    assert stop.received and not came
    with pytest.raises(KeyError), StopSignal() as stop:
        terminate()
        assert stop.agreed()
        raise KeyError("saving failed")
    terminate()
    assert came
    came.clear()
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
