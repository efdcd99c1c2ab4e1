"""The troubleshooting pages quote messages that are really raised, and have every error that may end a run."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from .pages import PLACE, page, source_strings, source_trees, text_of

PAGES = [f"troubleshooting{part}.md" for part in ("", "_models", "_runs", "_training", "_files")]
FOREIGN = "## Messages of torch, Accelerate and transformers"
ENTRY = re.compile(r"^`(?P<message>[^`\n]+)`\n: ", re.MULTILINE)
BLANK = re.compile(r"‹[^›]*›")
COVERED = "InfeasibleError CheckpointError PlanError PlanMismatchError HardwareError ProfileError LaunchError".split()


def messages() -> list[str]:
    return [entry["message"] for name in PAGES for entry in ENTRY.finditer(page(name).split(FOREIGN)[0])]


def says(text: str, message: str) -> bool:
    """Whether a string of the source has the message's fixed parts, in their order."""
    at = 0
    for part in BLANK.split(message):
        if (found := text.find(part, at)) < 0:
            return False
        at = found + len(part)
    return True


def test_every_quoted_message_is_in_the_source():
    strings = source_strings()
    strange = [message for message in messages() if not any(says(text, message) for text in strings)]
    assert len(messages()) > 80 and not strange


@functools.cache
def raised() -> list[tuple[str, str]]:
    """Name and text of all calls with a text first."""
    calls = [node for tree in source_trees() for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    return [(ast.unparse(node.func), text) for node in calls if (text := text_of(node.args[0]))]


@pytest.mark.parametrize("name", COVERED)
def test_every_error_of_these_kinds_has_an_entry(name):
    texts, known = [text for kind, text in raised() if kind == name], messages()
    missing = [text.replace(PLACE, "‹...›") for text in texts if not any(says(text, message) for message in known)]
    assert texts and not missing, "no page of troubleshooting has an entry for these"
