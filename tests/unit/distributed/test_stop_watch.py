"""SIGTERM at a rank that waits in one call, as on a device whose peer has died, and at one that works."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from hf_osdp.distributed.stop import EXIT_CODE

PROGRAM = """
import ctypes, multiprocessing, os, signal, sys, time
from hf_osdp.distributed import stop
stop.may_wait_on_device, stop._PATIENCE_S = lambda: True, 1.0
with stop.StopSignal() as watched:
    print("ready", flush=True)
    if sys.argv[1] == "waits":  # without the GIL and without an end, as in cudaStreamSynchronize
        lock = ctypes.create_string_buffer(64)
        ctypes.CDLL(None).pthread_mutex_lock(lock)
        ctypes.CDLL(None).pthread_mutex_lock(lock)
    if sys.argv[1] == "saves":
        while not watched.agreed():
            time.sleep(0.1)
        time.sleep(3)
    if sys.argv[1] == "evaluates":
        watched.is_between_steps = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(3)
    if sys.argv[1] == "has a worker":
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        time.sleep(0.5)
        worker.terminate()  # by SIGTERM, as a pool does at its end
        worker.join()
        time.sleep(3)
        assert not watched.received
        os.kill(os.getpid(), signal.SIGTERM)
    end = time.monotonic() + 3 * (sys.argv[1] in ("works", "has a worker"))
    while time.monotonic() < end:
        pass
    assert watched.received
print("went on")
"""


@pytest.mark.parametrize("case", ["waits", "works", "saves", "evaluates", "has a worker"])
def test_sigterm_ends_a_rank_that_waits_in_one_call_and_no_other(case):
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, case], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.5)
            if case not in ("evaluates", "has a worker"):
                process.send_signal(signal.SIGTERM)
            said, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    if case == "waits":
        assert process.returncode == EXIT_CODE and "exits without a checkpoint" in errors
    else:
        assert process.returncode == 0 and said == "went on\n", errors
