"""What the pages of docs/ say, and what the source says, for the tests that compare the two."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PLACE = "\0"
"""Stands for a value that is filled in."""


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def text_of(node: ast.expr) -> str | None:
    """A string or f-string of the source, with a mark for each value; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else PLACE for part in node.values)
    return None


@functools.cache
def source_trees() -> tuple[ast.Module, ...]:
    return tuple(ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "hf_osdp").rglob("*.py")))


@functools.cache
def source_strings() -> frozenset[str]:
    """Every string of the package that is not a docstring."""
    found = set()
    for tree in source_trees():
        nodes = list(ast.walk(tree))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = (text_of(node) for node in nodes if isinstance(node, ast.expr) and id(node) not in docstrings)
        found.update(text for text in texts if text)
    return frozenset(found)
