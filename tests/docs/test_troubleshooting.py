"""The page of troubleshooting quotes messages that are really raised, and is what its data say."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from .pages import DOCS, ROOT, page

PLACE = "\0"
"""Stands for a value that is filled in."""


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(DOCS)
    import generated

    return generated


def strings_of_the_source() -> Iterator[str]:
    """Every string and f-string of the package, with a mark for each value, without docstrings."""
    for path in (ROOT / "hf_osdp").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else PLACE for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield node.value


def test_every_message_with_a_remedy_is_in_the_source(generated):
    strings, messages = set(strings_of_the_source()), [row["message"] for row in generated.rows_of("troubleshooting")]
    strange = [message for message in messages if not any(generated.says(text, message) for text in strings)]
    assert len(set(messages)) == len(messages) > 80 and not strange


def test_pages_are_what_the_program_and_its_data_say(generated):
    """`python docs/generated.py` writes it anew."""
    assert {*generated.PAGES} <= {path.stem for path in DOCS.glob("*.md")}
    for path in DOCS.glob("*.md"):
        assert generated.written(path.stem, page(path.name)) == page(path.name), "run python docs/generated.py"
