"""When a run can start again under a lower limit, and how the limit reaches the next start."""

from __future__ import annotations

import multiprocessing
import os
import sys

import psutil
import pytest

from hf_osdp.distributed import restart
from hf_osdp.distributed.restart import COUNT_VARIABLE, LIMIT_VARIABLE, hindrance, limit_after_oom, restart_count
from hf_osdp.planning.config import OSDPConfig

UNDER_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RESTART_COUNT": "1", "WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch, tmp_path):
    for name in (*UNDER_TORCHRUN, LIMIT_VARIABLE, COUNT_VARIABLE, "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(restart.tempfile, "gettempdir", lambda: str(tmp_path))


@pytest.mark.parametrize(("text", "limit"), [("", 100), ("70", 70), ("170", 100)])
def test_limit_only_falls(monkeypatch, text, limit):
    monkeypatch.setenv(LIMIT_VARIABLE, text)
    assert limit_after_oom(100) == limit


@pytest.mark.parametrize("text", ["-1", "0", "1e3", "8GiB", "9" * 30])
def test_limit_that_is_no_number_of_bytes_is_refused(monkeypatch, text):
    monkeypatch.setenv(LIMIT_VARIABLE, text)
    with pytest.raises(ValueError, match=r"OSDP_MEMORY_LIMIT_AFTER_OOM='.*' is not a number of bytes"):
        limit_after_oom(100)


def test_limit_reaches_the_next_start_of_the_same_launcher_alone(monkeypatch):
    for name, value in UNDER_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    restart.restart(80, "not printed")
    restart.restart(70, "not printed")
    assert limit_after_oom(100) == 70
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert limit_after_oom(100) == 100, "a first start has no limit from before"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 1.0)
    assert limit_after_oom(100) == 100, "another launcher, which has the same process number"


def test_limit_of_another_user_is_not_read(monkeypatch):
    for name, value in UNDER_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    restart.restart(70, "not printed")
    note = restart._note()
    monkeypatch.setattr(restart, "_note", lambda: note)
    monkeypatch.setattr(restart.os, "getuid", lambda: note.stat().st_uid + 1)
    assert limit_after_oom(100) == 100


def test_single_process_replaces_itself_with_its_first_environment(monkeypatch, capsys):
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


def test_hindrance_of_a_launcher_that_starts_no_more():
    assert hindrance(UNDER_TORCHRUN) is None
    assert "--max-restarts 3" in hindrance({**UNDER_TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "1"})
    assert "torchrun --max-restarts 3" in hindrance({"WORLD_SIZE": "2"})


def test_hindrance_of_a_single_process(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert hindrance({}) is None and hindrance({COUNT_VARIABLE: "2"}) is None
    assert hindrance({COUNT_VARIABLE: "3"}) == "it did so 3 times"
    with monkeypatch.context() as fork:
        fork.setattr(multiprocessing, "parent_process", lambda: object())
        assert "a notebook, or another program, holds this process" in hindrance({})
    for unknown in (["python"], ["python", "-"]):
        monkeypatch.setattr(sys, "orig_argv", unknown)
        assert hindrance({}) == "the command line that started it is not known"


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", COUNT_VARIABLE])
def test_restart_count_takes_the_largest(name):
    assert restart_count({}) == 0 and restart_count({name: "2"}) == 2 and restart_count({name: "x"}) == 0


def test_on_oom_is_checked():
    with pytest.raises(ValueError, match=r"on_oom='retry' is not known; use one of raise, replan\."):
        OSDPConfig(on_oom="retry")
    with pytest.raises(ValueError, match="plan runs a given plan as it is"):
        OSDPConfig(plan="plan.json", on_oom="replan")
    assert OSDPConfig(on_oom="replan").on_oom == "replan"
