"""The GPU suite on the CPU: the page, the budget, steps that fail or take too long, and a rehearsal."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_memory, headline
from benchmarks.gpu_suite import __main__ as suite
from benchmarks.gpu_suite import runner
from benchmarks.gpu_suite.page import WIDTH, page, records_of
from benchmarks.gpu_suite.runner import RESULTS, run_step
from benchmarks.gpu_suite.step import STEPS

HEAD = {
    "hardware": "CPU, 2 cores", "versions": {"torch": "2.13.0"}, "commit": "abc",
    "command": "python -m benchmarks.gpu_suite --out x",
}  # fmt: skip


def results(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / RESULTS).read_text().splitlines()]


def test_the_documentation_has_every_step():
    text = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text(encoding="utf-8")
    rows = [f"| `{step.name}` | {step.proves} |" for step in STEPS.values()]
    assert [line for line in text.splitlines() if line.startswith("| `")] == rows


@pytest.fixture
def child(monkeypatch):
    """A step's process that writes a row, says something, and runs these lines of Python."""
    popen, found = runner.subprocess.Popen, json.dumps({"row": {"a": "1"}})
    finds = f"import sys; open(sys.argv[5] + '/found.jsonl', 'w').write({found!r}); print('said', flush=True); "

    def of(code: str) -> None:
        def started(command, **options):
            return popen([command[0], "-c", finds + code, *command[3:]], **options)

        monkeypatch.setattr(runner.subprocess, "Popen", started)

    return of


def test_failed_and_long_steps_keep_what_they_found(child, tmp_path):
    child("raise SystemExit(7)")
    one = run_step(STEPS["clock"], tmp_path, rehearses="cpu")
    assert (one["status"], one["rows"], one["tail"]) == ("failed", [{"a": "1"}], ["said"])
    assert "said" in page(records_of([tmp_path]), [HEAD]).split("```text")[1]
    child("import time; time.sleep(60)")
    began = time.monotonic()
    one = run_step(replace(STEPS["clock"], limit_s=1.0), tmp_path, rehearses="", limit_s=1e6)
    assert time.monotonic() - began < 20
    assert (one["status"], one["rows"], one["limit_s"]) == ("timed out", [{"a": "1"}], 1)
    assert "It was ended after 1 s" in page([one], [HEAD])


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_rehearsal_ends_well(tmp_path):
    assert suite.main(["--rehearse", "--minutes", "20", "--out", str(tmp_path)]) == 0
    found = {one["step"]: one["status"] for one in results(tmp_path)}
    assert list(found) == list(STEPS) and set(found.values()) == {"done", "needs a GPU"}
    text = (tmp_path / "results.md").read_text()
    assert "Rehearsal on the CPU; no GPU yet" in text and "| all-reduce | False | 1 | right |" in text
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_nothing_claimed_without_a_device(tmp_path, monkeypatch, capsys):
    assert suite.main(["--minutes", "1", "--out", str(tmp_path)]) == suite.NOTHING_MEASURED
    assert headline.main(["--device", "cuda"]) == headline.NOTHING_MEASURED
    assert capsys.readouterr().err.count("nothing was measured") == 2
    monkeypatch.setattr("sys.argv", ["gpu_memory.py", "--quick"])
    assert gpu_memory.main() == 0 and "nothing was measured" in capsys.readouterr().out
