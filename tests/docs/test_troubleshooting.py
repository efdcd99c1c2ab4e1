"""The page of troubleshooting quotes messages that are really raised, and is what its data say."""

from __future__ import annotations

import pytest

from .pages import DOCS, page, source_strings


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(DOCS)
    import generated

    return generated


def test_every_message_with_a_remedy_is_in_the_source(generated):
    strings, messages = source_strings(), [row["message"] for row in generated.rows_of("troubleshooting")]
    strange = [message for message in messages if not any(generated.says(text, message) for text in strings)]
    assert len(set(messages)) == len(messages) > 80 and not strange


def test_page_is_what_its_data_say(generated):
    """`python docs/generated.py` writes it anew."""
    assert generated.written(page("troubleshooting.md")) == page("troubleshooting.md")
