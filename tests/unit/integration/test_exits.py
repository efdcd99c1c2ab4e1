"""Which errors end a script in one line, and which keep their traceback."""

from __future__ import annotations

import json

import pytest

from hf_osdp.errors import PlanError
from hf_osdp.integration.config import OSDPConfig
from hf_osdp.integration.exits import USER_ERROR, run_script


def refused_by_the_package():
    OSDPConfig(strategy="zero3")


def refused_by_the_script():
    raise ValueError("block_size=64 is too long;\nuse 32.")


def of_our_domain():
    raise PlanError("The plan is for 2 processes.")


@pytest.mark.parametrize(
    ("main", "line"),
    [
        (refused_by_the_package, "error: strategy='zero3' is not known"),
        (refused_by_the_script, "error: block_size=64 is too long; use 32."),
        (of_our_domain, "error: The plan is for 2 processes."),
    ],
)
def test_input_that_is_refused_is_one_line(main, line, capsys):
    with pytest.raises(SystemExit) as stop:
        run_script(main)
    assert stop.value.code == USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith(line) and said.count("\n") == 1


def fails_in_a_library():
    json.loads("{")


def lacks_a_file():
    open("/nowhere/at/all").close()


def is_a_bug():
    raise KeyError("lost")


@pytest.mark.parametrize(("main", "kind"), [(fails_in_a_library, ValueError), (lacks_a_file, FileNotFoundError), (is_a_bug, KeyError)])
def test_other_errors_keep_their_traceback(main, kind):
    with pytest.raises(kind):
        run_script(main)
