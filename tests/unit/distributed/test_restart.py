"""When a run can start again under a lower limit, and how the limit reaches the next start."""

from __future__ import annotations

import multiprocessing
import os
import sys

import psutil
import pytest

from hf_osdp.distributed import restart
from hf_osdp.distributed.restart import COUNT_VARIABLE, LIMIT_VARIABLE, limit_after_oom, reason_not_to_restart, restart_count
from hf_osdp.planning.config import OSDPConfig

UNDER_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RESTART_COUNT": "1", "WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch, tmp_path):
    for name in (*UNDER_TORCHRUN, LIMIT_VARIABLE, COUNT_VARIABLE, "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(restart.tempfile, "gettempdir", lambda: str(tmp_path))


def test_limit_after_oom_only_falls_and_is_a_number_of_bytes(monkeypatch):
    for text, limit in (("", 100), ("70", 70), ("170", 100)):
        monkeypatch.setenv(LIMIT_VARIABLE, text)
        assert limit_after_oom(100) == limit
    for text in ("-1", "0", "1e3", "8GiB", "9" * 30):
        monkeypatch.setenv(LIMIT_VARIABLE, text)
        with pytest.raises(ValueError, match=r"OSDP_MEMORY_LIMIT_AFTER_OOM='.*' is not a number of bytes"):
            limit_after_oom(100)


def test_limit_reaches_next_start_of_same_user_and_launcher_alone(monkeypatch):
    for name, value in UNDER_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    restart.restart(80, "not printed")
    restart.restart(70, "not printed")
    assert limit_after_oom(100) == 70
    note = restart._note()
    with monkeypatch.context() as other_user:
        other_user.setattr(restart, "_note", lambda: note)
        other_user.setattr(restart.os, "getuid", lambda: note.stat().st_uid + 1)
        assert limit_after_oom(100) == 100
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert limit_after_oom(100) == 100, "a first start has no limit from before"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 1.0)
    assert limit_after_oom(100) == 100, "another launcher, which has the same process number"


def test_restart_replaces_single_process_with_its_first_environment(monkeypatch, capsys):
    calls: list[tuple] = []
    monkeypatch.setattr(restart.os, "execve", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(restart.os, "set_inheritable", lambda *arguments: None)
    monkeypatch.setenv("SET_BY_A_LIBRARY", "1")
    here = os.getcwd()
    restart.restart(70, "out of memory")
    os.chdir(here)
    ((program, command, environment),) = calls
    assert program == sys.executable and command == [sys.executable, *sys.orig_argv[1:]]
    assert (environment[LIMIT_VARIABLE], environment[COUNT_VARIABLE]) == ("70", "1") and "SET_BY_A_LIBRARY" not in environment
    assert capsys.readouterr().err == "out of memory\n"


def test_hindrance_names_launcher_that_starts_no_more(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun --max-restarts 3" in reason_not_to_restart()
    for name, value in UNDER_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert reason_not_to_restart() is None
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert "--max-restarts 3" in reason_not_to_restart()


def test_hindrance_names_why_single_process_cannot_restart(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setenv(COUNT_VARIABLE, "2")
    assert reason_not_to_restart() is None
    with monkeypatch.context() as fork:
        fork.setattr(multiprocessing, "parent_process", lambda: object())
        assert "a notebook, or another program, holds this process" in reason_not_to_restart()
    for unknown in (["python"], ["python", "-"]):
        monkeypatch.setattr(sys, "orig_argv", unknown)
        assert reason_not_to_restart() == "the command line that started it is not known"
    monkeypatch.setenv(COUNT_VARIABLE, "3")
    assert reason_not_to_restart() == "it did so 3 times"


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", COUNT_VARIABLE])
def test_restart_count_takes_largest(monkeypatch, name):
    for text, count in (("", 0), ("2", 2), ("x", 0)):
        monkeypatch.setenv(name, text)
        assert restart_count() == count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_oom": "retry"}, r"on_oom='retry' is not known; use one of raise, replan\."),
        ({"plan": "plan.json", "on_oom": "replan"}, "plan runs a given plan as it is"),
    ],
)
def test_on_oom_is_checked(options, message):
    with pytest.raises(ValueError, match=message):
        OSDPConfig(**options)
