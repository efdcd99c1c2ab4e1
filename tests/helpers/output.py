"""What a test shows of a program that failed."""

from __future__ import annotations


def ends_of(text: str, characters: int = 3000) -> str:
    """Return the beginning and the end: an abort in C++ writes its reason first, then a long list of modules."""
    if len(text) <= 2 * characters:
        return text
    return f"{text[:characters]}\n[... {len(text) - 2 * characters} characters ...]\n{text[-characters:]}"
