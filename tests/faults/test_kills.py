"""Killed at random moments, or stopped by the cluster, a training loses nothing but steps, with the same command.

`python -m tests.faults.kills` is the long version of the first test.
"""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.kills import run, uninterrupted
from tests.faults.training import FINAL, SAVE_EVERY, STEPS, Training, marks
from tests.helpers.distributed import ROOT, TORCHRUN, environment, run_program
from tests.helpers.output import ends_of

ENDS_WITHIN_S = 150.0


def command(loop: str, folder: Path, *words: object, restarts: int = 0) -> list[str]:
    folder.mkdir(exist_ok=True)
    options = ("--standalone", "--nproc-per-node", 2, "--max-restarts", restarts, "-m", "tests.faults.training")
    return [str(word) for word in (*TORCHRUN, *options, loop, folder, *words)]


def assert_as_uninterrupted(loop: str, folder: Path, tmp_path: Path) -> None:
    want, got = uninterrupted(Training(loop=loop, sharded=True), tmp_path), load_file(folder / FINAL)
    assert want.keys() == got.keys() and all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_nothing_is_lost_when_ranks_are_killed(tmp_path, kills):
    outcome = run(kills, 1, tmp_path)
    assert outcome.kills.total() >= kills and not outcome.problems, outcome


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["plain", "trainer"])
def test_ranks_that_torchrun_starts_again_go_on(tmp_path, loop):
    folder = tmp_path / "run"
    # TrainingArguments form the group before hf_osdp can clear torchrun's store: docs/fault_tolerance.md
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if loop == "trainer" else {}
    done = run_program(command(loop, folder, 6, restarts=1), timeout_s=ENDS_WITHIN_S, **own_store)
    assert done.returncode == 0, ends_of(done.stderr)
    assert "resume checkpoint-4" in marks(folder) and marks(folder)[-1] == "done"
    assert_as_uninterrupted(loop, folder, tmp_path)


@pytest.mark.slow
def test_job_with_sigterm_saves_and_requeued_goes_on(tmp_path):
    folder = tmp_path / "run"
    words, env = command("trainer", folder), environment()
    with subprocess.Popen(words, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + ENDS_WITHIN_S
        while marks(folder).count("step") < 2:
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(0.01)
        job.send_signal(signal.SIGTERM)
        errors = job.communicate(timeout=ENDS_WITHIN_S)[1]
    assert job.returncode != 0, "the launcher must know that the run is not over"
    saved = sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))
    assert saved and saved[-1] < STEPS, ends_of(errors)
    assert "SIGTERM: training saves checkpoint-" in errors
    requeued = run_program(command("trainer", folder), timeout_s=ENDS_WITHIN_S, SLURM_RESTART_COUNT="1")
    assert requeued.returncode == 0 and f"resume checkpoint-{saved[-1]}" in marks(folder)
    assert saved[-1] % SAVE_EVERY or marks(folder).count("step") < 2 * STEPS
    assert_as_uninterrupted("trainer", folder, tmp_path)
