"""Read untrusted files and JSON, up to a size limit.

Refused are: duplicate keys, NaN, control characters, pipes and devices.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

MOST_BYTES = 32 * 2**20
"""The largest file that is read, unless the caller gives another limit."""
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Control characters, which move a terminal's cursor."""

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
        value = json.loads(decoded, object_pairs_hook=_unique, parse_constant=_not_a_number, parse_float=_finite)
        if any(map(_UNPRINTABLE.search, _texts(value))):
            raise _Refused("has a text with control characters")
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
        raise error("is JSON that is nested too deep") from None


def read_json(path: str | Path, what: str, error: MakeError = ValueError, *, limit_bytes: int = MOST_BYTES) -> Any:  # noqa: ANN401
    """Return the value in a JSON file; arguments and errors are those of `read_bytes` and `parse_json`."""
    content = read_bytes(path, what, error, limit_bytes=limit_bytes)
    return parse_json(content, lambda problem: error(f"{path} {problem}; it is not a {what} that can be read."))


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise _Refused(f"has the key {twice[:40]!r} twice in one object")
    return found


def _not_a_number(text: str) -> NoReturn:
    raise _Refused(f"has {text}, which is not a number")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise _Refused(f"has {text[:40]}, which is larger than any number that it may have")
    return number


def _texts(value: object) -> Iterator[str]:
    """Yield the keys and texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in (*value, *(value.values() if isinstance(value, dict) else ())):
            yield from _texts(inner)
