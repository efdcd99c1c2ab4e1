"""SIGTERM at a rank that waits in one call, as on a device whose peer has died, and at one that works."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from hf_osdp.distributed.stop import EXIT_CODE

PROGRAM = """
import ctypes, sys, time
from hf_osdp.distributed import stop
stop.may_wait_on_device, stop._PATIENCE_S = lambda: True, 1.0
with stop.StopSignal() as watched:
    print("ready", flush=True)
    if sys.argv[1] == "waits":  # without the GIL and without an end, as in cudaStreamSynchronize
        lock = ctypes.create_string_buffer(64)
        ctypes.CDLL(None).pthread_mutex_lock(lock)
        ctypes.CDLL(None).pthread_mutex_lock(lock)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        pass
    assert watched.received
print("went on")
"""


@pytest.mark.parametrize("case", ["waits", "works"])
def test_sigterm_ends_a_rank_that_waits_in_one_call_and_no_other(case):
    with subprocess.Popen([sys.executable, "-c", PROGRAM, case], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            said, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    if case == "waits":
        assert process.returncode == EXIT_CODE and "exits without a checkpoint" in errors
    else:
        assert process.returncode == 0 and said == "went on\n", errors
