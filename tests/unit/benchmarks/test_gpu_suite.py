"""The GPU suite on the CPU: the page, the budget, steps that fail or take too long, and a rehearsal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_memory
from benchmarks.gpu_suite import __main__ as suite
from benchmarks.gpu_suite.memory import TINY
from benchmarks.gpu_suite.page import WIDTH
from benchmarks.gpu_suite.runner import RESULTS
from benchmarks.gpu_suite.step import STEPS
from benchmarks.headline import __main__ as headline
from tests.helpers.fake_step import fake_process_group


def results(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / RESULTS).read_text().splitlines()]


def test_the_documentation_names_steps_that_exist():
    text = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text(encoding="utf-8")
    table = text[text.index("| question | answer | step |") :].split("\n\n")[0].splitlines()[2:]
    named = {step.strip("` ") for row in table for step in row.split("|")[-2].split(",")}
    assert named and named <= set(STEPS)


def test_layouts_of_the_memory_benchmark_keep_everything_on_the_device():
    with fake_process_group(gpu_memory.WORLD):
        setting = gpu_memory.setting_of("tiny", TINY, "bf16", torch.device("cpu"))
    plans = {layout: gpu_memory.plan_of(setting, layout) for layout in gpu_memory.LAYOUTS}
    assert not [name for name, plan in plans.items() if any(unit.uses_host for unit in plan.units)]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_rehearsal_ends_well(tmp_path):
    assert suite.main(["--rehearse", "--minutes", "20", "--out", str(tmp_path)]) == 0
    found = {one["step"]: one["status"] for one in results(tmp_path)}
    assert list(found) == list(STEPS) and set(found.values()) == {"done", "needs a GPU"}
    text = (tmp_path / "results.md").read_text()
    assert "Rehearsal on the CPU; no GPU yet" in text
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_nothing_claimed_without_a_device(tmp_path, monkeypatch, capsys):
    assert suite.main(["--minutes", "1", "--out", str(tmp_path)]) == suite.NOTHING_MEASURED
    assert headline.main(["--device", "cuda"]) == headline.NOTHING_MEASURED
    assert capsys.readouterr().err.count("nothing was measured") == 2
    monkeypatch.setattr("sys.argv", ["gpu_memory.py", "--quick"])
    assert gpu_memory.main() == 0 and "nothing was measured" in capsys.readouterr().out
