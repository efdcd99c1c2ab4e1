"""Which errors end a script in one line or keep their traceback, and what the end of training waits for then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_osdp.distributed.stop import EXIT_CODE, Stopped
from hf_osdp.integrations.accelerator import OSDPAccelerator
from hf_osdp.integrations.launch import USER_ERROR, run_script
from hf_osdp.planner.plan import Plan
from hf_osdp.preparation.config import OSDPConfig


def refuse_in_script():
    raise ValueError("block_size=64 is too long;\nuse 32.")


@pytest.mark.parametrize(
    ("main", "line"),
    [
        (lambda: OSDPConfig(strategy="zero3"), "error: strategy='zero3' is not known"),
        (refuse_in_script, "error: block_size=64 is too long; use 32."),
        (lambda: Plan.load("nowhere.json"), "error: Cannot read the plan nowhere.json"),
    ],
)
def test_run_script_shows_refused_input_in_one_line(main, line, capsys):
    with pytest.raises(SystemExit) as stop:
        run_script(main)
    assert stop.value.code == USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith(line) and said.count("\n") == 1


@pytest.fixture
def watched() -> tuple[OSDPAccelerator, list[str]]:
    """An accelerator, and what its end waited for or finished."""
    accelerator, ends = OSDPAccelerator(cpu=True, osdp={}), []
    accelerator._writer = SimpleNamespace(wait=lambda: ends.append("waited"))
    accelerator.trackers = [SimpleNamespace(finish=lambda: ends.append("finished"))]
    return accelerator, ends


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError("lost"), ["finished"]),
        (KeyboardInterrupt(), ["finished"]),
        (SystemExit(EXIT_CODE), ["finished"]),
        (Stopped(EXIT_CODE), ["waited", "finished"]),
    ],
)
def test_end_training_waits_for_nobody_while_an_error_propagates(watched, error, expected):
    accelerator, ends = watched
    with pytest.raises(type(error)):
        try:
            raise error
        finally:
            accelerator.end_training()
    assert ends == expected
