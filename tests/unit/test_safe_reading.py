"""No code runs from a file that is read: by what the source calls, and by what plans hold."""

from __future__ import annotations

import ast
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
SOURCES = sorted(path for folder in ("hf_osdp", "recipes", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
REFERENCES = {
    f"{module}.{name}"
    for module, names in {
        "pickle": ("load", "loads", "Unpickler", "_Unpickler"), "_pickle": ("load", "loads", "Unpickler"),
        "dill": ("load", "loads"),
        "joblib": ("load",), "marshal": ("load", "loads"), "shelve": ("open",), "pandas": ("read_pickle",),
        "yaml": ("load", "load_all", "full_load", "unsafe_load", "Loader", "FullLoader", "UnsafeLoader"),
        "os": ("system", "popen"), "subprocess": ("getoutput", "getstatusoutput"),
        "runpy": ("run_path",), "torch.hub": ("load",), "torch.jit": ("load",),
        "builtins": ("eval", "exec", "compile", "__import__"),
    }.items()
    for name in names
}  # fmt: skip
"""What runs, or makes whatever objects, a file says."""
KEYWORDS = {"weights_only": False, "allow_pickle": True, "shell": True, "trust_remote_code": True}
"""Arguments that make a harmless call such a one."""
ALLOWED = {
    # what rank 0 of this very run sends by the process group; no file
    ("hf_osdp/distributed/consensus.py", "pickle.loads"),
    # what the other ranks of this very run have written, told over the process group's store; no file
    ("hf_osdp/checkpoint/writer.py", "pickle.loads"),
    # the user's own script, named on the command line, as Python itself runs it
    ("hf_osdp/run.py", "runpy.run_path"),
    # base of one that knows torch's own dataclasses and refuses all else
    ("hf_osdp/checkpoint/safe.py", "pickle.Unpickler"),
}


def findings(source: str) -> set[str]:
    """The dangerous things that a module refers to, by their full names."""
    tree = ast.parse(source)
    names = {name: f"builtins.{name}" for name in ("eval", "exec", "compile", "__import__")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= dict((a.asname, a.name) if a.asname else (a.name.split(".")[0],) * 2 for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = {full for full in names.values() if full in REFERENCES and not full.startswith("builtins")}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load):
            found |= {full_name(node, names)} & REFERENCES
        if isinstance(node, ast.Call):
            given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
            found |= {f"{name}={bad}" for name, bad in KEYWORDS.items() if given.get(name) is bad}
            loads = full_name(node.func, names) in ("torch.load", "torch.serialization.load")
            if loads and given.get("weights_only") is not True:
                found.add("torch.load without weights_only=True")
    return found


def full_name(node: ast.expr, names: dict[str, str]) -> str | None:
    """`torch.load` of an attribute or a name, as it was imported."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := full_name(node.value, names)):
        return f"{owner}.{node.attr}"
    return None


def test_source_uses_nothing_that_runs_a_file():
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in SOURCES}
    found = {(path, what) for path, text in texts.items() for what in findings(text)}
    assert len(SOURCES) > 150
    assert found - ALLOWED == set(), "read it by hf_osdp.reading, or say in ALLOWED why it is safe"
    assert ALLOWED - found == set(), "no longer there: take it out of ALLOWED"


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
