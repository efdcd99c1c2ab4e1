"""Imports point one way and stay light; every public name is there."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import hf_osdp
from benchmarks.structure import files_naming

HEAVY = "torch transformers accelerate datasets evaluate ortools pandas numpy rich pydantic".split()


def loaded_by(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter has after `statement`."""
    names = "sorted({name.partition('.')[0] for name in sys.modules})"
    code = f"import sys; {statement}; import json; print(json.dumps({names}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import hf_osdp", HEAVY),
        ("import hf_osdp.planner.search.search, hf_osdp.planner.cost.evaluate, hf_osdp.planner.presets", HEAVY),
        ("from hf_osdp import Plan, TrainingJob, Hardware, preset, search, InfeasibleError", HEAVY),
        ("import hf_osdp.report.explanations", ("torch", "transformers", "accelerate", "ortools")),
        ("from hf_osdp import OSDPAccelerator, OptimalShardedDataParallel, describe", ["peft", "bitsandbytes"]),
        ("import hf_osdp.cli.app", "torch transformers ortools altair pydantic gradio".split()),
    ],
)
def test_no_more_is_loaded_than_needed(statement, absent):
    assert not loaded_by(statement) & set(absent)


def test_planner_plans_without_framework():
    code = (
        "from hf_osdp import PlanningProblem, TrainingJob, preset, search; from tests.helpers.descriptions import *;"
        "facts = {'hardware': preset('cpu', devices_per_node=2), 'job': TrainingJob(global_batch_size=2)};"
        "plan = search(PlanningProblem(description=transformer(), memory_limit_bytes=2**30, **facts)).plan;"
        "plan.from_json(plan.to_json())"
    )
    assert not loaded_by(code) & {"torch", "transformers", "accelerate", "datasets"}


def test_public_names_resolve_and_others_do_not():
    for name in hf_osdp.__all__:
        assert getattr(hf_osdp, name) is not None and name in dir(hf_osdp)
    with pytest.raises(AttributeError, match="module 'hf_osdp' has no attribute 'nonexistent'"):
        hf_osdp.nonexistent  # noqa: B018
    with pytest.raises(ImportError):
        from hf_osdp import nonexistent  # noqa: F401


def test_no_two_classes_have_one_name():
    found = Counter(
        node.name
        for path in Path(hf_osdp.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, number in found.items() if number > 1] == []


MODULES = {
    "wire formats": ("planner/wire.py", "planner/offered_wires.py", "distributed/wire.py", "planner/decision.py",
                     "planner/space.py", "sharding/apply.py"),
    "offloading": ("",),
    **dict.fromkeys(("operators in slices", "loss in chunks"), ("modeling/split/", "planner/split.py")),
    **dict.fromkeys(("Muon", "8- and 4-bit optimizers"), ("sharding/optimizers/", "planner/optimizers.py")),
}  # fmt: skip


@pytest.mark.parametrize("feature", MODULES)
def test_a_feature_is_named_only_in_its_modules(feature):
    """A second memory is known to many."""
    found = files_naming(feature)
    assert 0 < len(found) <= 6 or feature == "offloading"
    assert all(name.startswith(MODULES[feature]) for name in found)
