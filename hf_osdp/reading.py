"""Read untrusted files and JSON, up to a size limit.

Refused are: duplicate keys, NaN, numbers beyond 2**63 or 1e30, control characters, deep nesting, pipes and devices.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

MOST_BYTES = 32 * 2**20
"""The largest file that is read, unless the caller gives another limit."""
MOST_DEPTH = 64
"""The deepest nesting of lists and objects."""
MOST_CHARACTERS = 4096
"""The longest text: as long as a path may be on Linux."""
_MOST_WHOLE = 2**63 - 1
_MOST_REAL = 1e30
"""Products of several such numbers stay within a float."""
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters, which move a terminal's cursor, and surrogates, which no file can hold."""

MakeError = Callable[[str], Exception]


class _Refused(Exception):
    """The rest of a sentence that begins with the file's name."""


def read_bytes(path: str | Path, what: str, error: MakeError = ValueError, *, limit_bytes: int = MOST_BYTES) -> bytes:
    """Return the bytes of a file of at most `limit_bytes`; errors say what it should hold, `what`, such as a `plan`.

    Raises:
        Exception: made by `error` from one line; the file is missing, is not a file, cannot be read, or is larger.
    """
    path = Path(path)
    try:
        found = path.stat()
        endless = not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode))
        with open(os.devnull if endless else path, "rb") as file:
            content = file.read(limit_bytes + 1)
    except (OSError, ValueError) as problem:  # ValueError: the path has a zero byte
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"Cannot read the {what} {path}: {reason}; give a file that can be read.") from None
    if endless:
        raise error(f"Cannot read the {what} {path}: it is a pipe or a device; give a file.")
    if len(content) > limit_bytes:
        size = max(found.st_size, len(content))
        raise error(
            f"{path} has {size} bytes, more than the {limit_bytes} that a {what} may have; it is not a {what}."
        )
    return content


def parse_json(text: str | bytes, error: MakeError = ValueError) -> Any:  # noqa: ANN401
    """Return the value of strict JSON, in UTF-8: finite numbers, each key once.

    Raises:
        Exception: made by `error` from the rest of a sentence that begins with the file's name: `is not JSON (line 3,
            ...)`.
    """
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8-sig")  # some editors write a byte order mark
        value = json.loads(decoded, object_pairs_hook=_unique, parse_constant=_not_a_number)
        _check_values(value)
        return value
    except _Refused as problem:
        raise error(str(problem)) from None
    except UnicodeDecodeError as problem:
        raise error(f"is not JSON (byte {problem.start} is not UTF-8: {problem.reason})") from None
    except json.JSONDecodeError as problem:
        raise error(f"is not JSON (line {problem.lineno}, column {problem.colno}: {problem.msg})") from None
    except ValueError as problem:  # an integer with more digits than Python parses
        raise error(f"is not JSON ({problem})") from None
    except RecursionError:
        raise error(f"is JSON that is nested more than {MOST_DEPTH} deep") from None


def read_json(path: str | Path, what: str, error: MakeError = ValueError, *, limit_bytes: int = MOST_BYTES) -> Any:  # noqa: ANN401
    """Return the value in a JSON file; arguments and errors are those of `read_bytes` and `parse_json`."""
    content = read_bytes(path, what, error, limit_bytes=limit_bytes)
    return parse_json(content, lambda problem: error(f"{path} {problem}; it is not a {what} that can be read."))


def problem_of_text(text: str) -> str | None:
    """Return why a text must not be written into a file or onto a terminal, as the end of a sentence; None if it
    may be.
    """
    if len(text) > MOST_CHARACTERS:
        return f"has {len(text)} characters, more than {MOST_CHARACTERS}"
    return "has control characters" if _UNPRINTABLE.search(text) else None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise _Refused(f"has the key {_short(twice)} twice in one object")
    return found


def _not_a_number(text: str) -> NoReturn:
    raise _Refused(f"has {text}, which is not a number")


def _check_values(value: object) -> None:
    """Check depth, texts and numbers, level by level, without recursion."""
    level, depth = [value], 0
    while level:
        inside: list[object] = []
        for item in level:
            if isinstance(item, str) and (problem := problem_of_text(item)):
                raise _Refused(f"has the text {_short(item)}, which {problem}")
            most = _MOST_REAL if isinstance(item, float) else _MOST_WHOLE
            if isinstance(item, (int, float)) and not abs(item) <= most:
                raise _Refused(f"has the number {_short(str(item))}, which is beyond {most:g}")
            if isinstance(item, (dict, list)):
                if depth >= MOST_DEPTH:
                    raise _Refused(f"is JSON that is nested more than {MOST_DEPTH} deep")
                inside.extend(item)
                inside.extend(item.values() if isinstance(item, dict) else ())
        level, depth = inside, depth + 1


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
