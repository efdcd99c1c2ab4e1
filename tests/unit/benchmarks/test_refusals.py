"""Benchmarks refuse wrong options in one line, and claim nothing where nothing can be measured."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu_memory, headline
from benchmarks.gpu_suite import __main__ as suite
from benchmarks.two_machines import emulate, run

WRONG = [
    (headline.parse, ["--plan-only", "--device", "cpu"], "give --device cuda, --device cpu or --plan-only"),
    (headline.parse, ["--plan-only", "--experiments", "7"], "'7' is not an experiment; use one of 1, 2, 3, 4"),
    (headline.parse, ["--plan-only", "--json", "/nowhere/at/all.json"], "the folder /nowhere/at does not exist"),
    (suite.parse, [], "give --out"),
    (suite.parse, ["--out", "x", "--only", "clock", "--from", "walk"], "not both"),
    (suite.parse, ["--out", "x", "--minutes", "0"], "must be above 0"),
    (suite.parse, ["--out", "x", "--merge", "/no/such"], "is not a folder"),
    (run.parse, ["--rates", "100mbit,fast"], "'fast' is not a rate"),
    (run.parse, ["--limits", "600 elephants"], "is not a number of bytes"),
    (run.parse, ["--rounds", "0"], "at least 1"),
    (run.parse, ["--nodes", "1", "--ranks", "1"], "one rank sends nothing"),
    (
        run.parse,
        ["--rates", "50mbit/100mbit/200mbit"],
        "has 3 rates for 2 machines; give one, or one for each (--nodes)",
    ),
    (emulate.main, ["--rate=1e3mbit", "--", "x"], "is not a rate"),
    (emulate.main, ["--nodes=3", "--rate=50mbit/1gbit", "--", "x"], "50mbit/1gbit has 2 rates for 3 machines"),
]


@pytest.mark.parametrize(
    ("parse", "arguments", "message"), WRONG, ids=lambda value: value if isinstance(value, str) else ""
)
def test_options_refused_in_one_line(parse, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_nothing_claimed_without_a_device(tmp_path, monkeypatch, capsys):
    assert suite.main(["--minutes", "1", "--out", str(tmp_path)]) == suite.NOTHING_MEASURED
    assert headline.main(["--device", "cuda"]) == headline.NOTHING_MEASURED
    assert capsys.readouterr().err.count("nothing was measured") == 2
    monkeypatch.setattr("sys.argv", ["gpu_memory.py", "--quick"])
    assert gpu_memory.main() == 0 and "nothing was measured" in capsys.readouterr().out


def test_emulation_names_the_tool_that_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(emulate.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert emulate.main(["--", "x"]) == emulate.NOT_PERMITTED
    assert "tc (iproute2) not found" in capsys.readouterr().err
