"""When a run can start again under a lower limit, and how the limit reaches the next start."""

from __future__ import annotations

import psutil
import pytest

from hf_osdp.distributed import restart
from hf_osdp.distributed.restart import limit_after_oom, note_limit, reason_not_to_restart

UNDER_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RESTART_COUNT": "1"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch, tmp_path):
    for name in (*UNDER_TORCHRUN, "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(restart.tempfile, "gettempdir", lambda: str(tmp_path))


@pytest.fixture
def under_torchrun(monkeypatch):
    for name, value in UNDER_TORCHRUN.items():
        monkeypatch.setenv(name, value)


def test_limit_reaches_next_start_of_same_user_and_launcher_alone(monkeypatch, under_torchrun):
    note_limit(80)
    note_limit(70)
    assert limit_after_oom(100) == 70 and limit_after_oom(60) == 60
    note = restart._limit_file()
    with monkeypatch.context() as other_user:
        other_user.setattr(restart, "_limit_file", lambda: note)
        other_user.setattr(restart.os, "getuid", lambda: note.stat().st_uid + 1)
        assert limit_after_oom(100) == 100
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert limit_after_oom(100) == 100, "a first start has no limit from before"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with monkeypatch.context() as damaged:
        note.write_text("half a numb")
        damaged.setattr(restart, "_limit_file", lambda: note)
        assert limit_after_oom(100) == 100
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 1.0)
    assert limit_after_oom(100) == 100, "another launcher, which has the same process number"


def test_hindrance_names_how_to_be_started_again(monkeypatch, under_torchrun):
    assert reason_not_to_restart() is None
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert "no restarts left; start it with --max-restarts 3" in reason_not_to_restart()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert "use that memory_limit, or torchrun --max-restarts 3" in reason_not_to_restart()
