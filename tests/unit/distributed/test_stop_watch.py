"""SIGTERM at a rank that waits in one call, as on a device whose peer has died, and at ranks that work."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time

from hf_osdp.distributed import stop
from tests.helpers.distributed import ranks_of

CASES = ("waits", "works", "saves", "evaluates", "has a worker")
PATIENCE_S, WORK_S = 0.7, 2.0


def program() -> str:
    """Each rank is in a case of its own."""
    case = CASES[int(os.environ["RANK"])]
    stop.may_wait_on_device, stop._PATIENCE_S = lambda: True, PATIENCE_S
    with stop.StopSignal() as watched:
        print("ready", flush=True)
        match case:
            case "waits":  # without the GIL and without an end, as in cudaStreamSynchronize
                lock = ctypes.create_string_buffer(64)
                ctypes.CDLL(None).pthread_mutex_lock(lock)
                ctypes.CDLL(None).pthread_mutex_lock(lock)
            case "saves":
                while not watched.agreed():
                    time.sleep(0.1)
                time.sleep(WORK_S)
            case "evaluates":
                watched.is_between_steps = True
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(WORK_S)
            case "has a worker":
                worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
                worker.start()
                time.sleep(0.5)
                worker.terminate()  # by SIGTERM, as a pool does at its end
                worker.join()
                time.sleep(WORK_S)
                assert not watched.received
                os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + WORK_S * (case in ("works", "has a worker"))
        while time.monotonic() < end:
            pass
        assert watched.received
    return "went on"


def test_sigterm_ends_a_rank_that_waits_in_one_call_and_no_other():
    with ranks_of(program, len(CASES), init=False, timeout_s=60.0) as ranks:
        while not all("ready" in rank.output for rank in ranks):
            time.sleep(0.05)
        time.sleep(0.5)
        for case, rank in zip(CASES, ranks, strict=True):
            if case not in ("evaluates", "has a worker"):
                os.kill(rank.pid, signal.SIGTERM)
        while any(rank.poll() is None for rank in ranks):
            time.sleep(0.05)
        for case, rank in zip(CASES, ranks, strict=True):
            if case == "waits":
                assert rank.returncode == stop.EXIT_CODE and "exits without a checkpoint" in rank.output
            else:
                assert rank.returncode == 0 and rank.result == "went on", (case, rank.output, rank.error)
