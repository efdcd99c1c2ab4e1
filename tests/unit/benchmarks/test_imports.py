"""Benchmarks import names that there are, at the top and inside of functions."""

from __future__ import annotations

import ast
import importlib
from importlib.util import find_spec, resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.py"))
OWN = {"hf_osdp", "benchmarks", "tests"}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_benchmark_imports_names_that_exist(path):
    package = ".".join(path.parent.parts)
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.level or str(node.module).partition(".")[0] in OWN):
            continue
        module = importlib.import_module(resolve_name("." * node.level + (node.module or ""), package))
        for alias in node.names:
            inside = hasattr(module, "__path__") and find_spec(f"{module.__name__}.{alias.name}")
            assert inside or hasattr(module, alias.name), (
                f"{path}:{node.lineno}: {module.__name__} has no {alias.name}"
            )
