"""No code runs from a file that is read: by what the source calls, and by what plans hold."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

from hf_osdp.planner.search.search import search
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.report.plan_file import PlanInputs, plan_file_content, read_plan_file, write_json
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem

ROOT = Path(__file__).parents[2]
RUNS = re.compile(
    r"""^\s*(?:import|from)\s+(?:_?pickle|dill|joblib|marshal|shelve|runpy)\b
      | ^\s*from\s+(?:torch(?:\.serialization)?|yaml|os|pandas)\s+import\b[^\n]*\b(?:load|system|popen|read_pickle)\b
      | \b(?:pickle\.(?:loads?|_?Unpickler)|runpy\.run_path)\b
      | \b(?:read_pickle|torch\.hub\.load|torch\.jit\.load|getoutput|getstatusoutput|os\.system|os\.popen)\b
      | \byaml\.(?:load|load_all|full_load|unsafe_load|Loader|FullLoader|UnsafeLoader)\b
      | (?<![\w.])(?:eval|exec|compile|__import__)\(
      | \b(?:weights_only=False|allow_pickle=True|shell=True|trust_remote_code=True)
      | \btorch\.load\((?!(?:[^()]|\([^()]*\))*weights_only=True)
    """,
    re.VERBOSE | re.MULTILINE,
)
"""What runs, or makes whatever objects, a file says."""
ALLOWED = {
    # what rank 0 of this very run sends by the process group; no file
    "hf_osdp/distributed/consensus.py": {"import pickle", "pickle.loads"},
    # the user's own script, named on the command line, as Python itself runs it
    "hf_osdp/run.py": {"import runpy", "runpy.run_path"},
    # base of one that knows torch's own dataclasses and refuses all else
    "hf_osdp/checkpoint/safe.py": {"import pickle", "pickle._Unpickler"},
}


def test_source_uses_nothing_that_runs_a_file():
    paths = [path for folder in ("hf_osdp", "recipes", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    found = {path: {line.strip() for line in RUNS.findall(text)} for path, text in texts.items()}
    assert len(paths) > 150
    assert {path: lines for path, lines in found.items() if lines} == ALLOWED, "read it by hf_osdp.reading"


MARK = "osdp-opened-by-a-name"
opened: list[str] = []
_watching = False


def _watch(event: str, args: tuple) -> None:
    if _watching and event in ("open", "os.mkdir", "os.rename", "os.remove", "subprocess.Popen", "exec", "compile"):
        opened.append(f"{event} {args}"[:500])


sys.addaudithook(_watch)  # there is no way to take it off again


def test_explain_opens_runs_and_renders_nothing_that_a_plan_names(tmp_path, capsys):
    """All names of a plan file are paths, markup and programs."""
    from typer.testing import CliRunner

    from hf_osdp.cli.app import app

    evil = f"/tmp/{MARK}/[/red]</script><script>alert(1)</script>"
    model = transformer(layers=2)
    units = tuple(replace(unit, fqn=f"{unit.fqn}{evil}" if unit.fqn else "", class_name=evil) for unit in model.units)
    model = replace(model, units=units, model_name=evil, model_class=evil, trace=evil)
    hardware = bare_preset("titan-rtx", devices_per_node=2)
    hardware = replace(hardware, device=replace(hardware.device, name=evil, source=evil))
    job = TrainingJob(global_batch_size=4)
    plan = replace(search(problem(model, hardware, job, 2**30)).plan, model_name=evil, hardware=evil)
    content = plan_file_content(plan, PlanInputs(description=model, job=job, hardware=hardware))
    write_json(content, tmp_path / "plan.json")
    assert read_plan_file(tmp_path / "plan.json")[0] == plan

    global _watching
    opened.clear()
    _watching = True
    try:
        done = CliRunner().invoke(app, ["explain", str(tmp_path / "plan.json"), "--plot", str(tmp_path / "plan.html")])
    finally:
        _watching = False
    assert done.exit_code == 0, done.output
    assert opened and not [event for event in opened if MARK in event]
    assert "[/red]" in done.output
    assert "<script>alert(1)" not in (tmp_path / "plan.html").read_text()
    assert MARK in (tmp_path / "plan.html").read_text()
