"""Which errors end a script in one line, which keep their traceback, and what the end of training waits for on their way."""

from __future__ import annotations

import json

import pytest

from hf_osdp.distributed.stop import EXIT_CODE, Stopped
from hf_osdp.errors import PlanError
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.exits import USER_ERROR, run_script
from hf_osdp.planning.config import OSDPConfig


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


class Ends:
    """A writer and a tracker whose ends are counted."""

    def __init__(self):
        self.waited = self.finished = 0

    def wait(self):
        self.waited += 1

    def finish(self):
        self.finished += 1


def watched() -> tuple[OSDPAccelerator, Ends]:
    accelerator, ends = OSDPAccelerator(cpu=True, osdp={}), Ends()
    accelerator._writer, accelerator.trackers = ends, [ends]
    return accelerator, ends


@pytest.mark.parametrize(
    ("error", "waited"), [(KeyError("lost"), 0), (KeyboardInterrupt(), 0), (SystemExit(EXIT_CODE), 0), (Stopped(EXIT_CODE), 1)]
)
def test_the_end_of_training_waits_for_nobody_while_an_error_is_on_its_way(error, waited):
    accelerator, ends = watched()
    with pytest.raises(type(error)):
        try:
            raise error
        finally:
            accelerator.end_training()
    assert (ends.waited, ends.finished) == (waited, 1)


def test_the_end_of_training_is_a_whole_one_where_another_training_failed_before_it():
    try:
        raise MemoryError
    except MemoryError:
        accelerator, ends = watched()
        accelerator.end_training()
    assert (ends.waited, ends.finished) == (1, 1)
