"""Files and text that come from elsewhere: read within a size, as JSON or YAML without surprises. Nothing in them is run.

What is refused here would otherwise be taken silently (a key that stands twice, NaN), or end in a long wait, a full memory or an error
of Python's own (nesting without end, numbers of a million digits, a pipe that nobody writes to).
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MOST_BYTES = 32 * 2**20
"""Larger files are none of ours."""
MOST_DEPTH = 64
"""Lists and objects inside each other."""
MOST_LETTERS = 4096
"""Of one text: as many as a path may have on Linux."""
_MOST_WHOLE = 2**63 - 1
_MOST_REAL = 1e30
"""Products of several stay within a float."""
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters, which move a terminal's cursor or change its colours; halves of characters, which no file can hold."""
_SHOWN = 40
"""Letters of a text or a number that an error quotes."""

MakeError = Callable[[str], Exception]


class _Refused(Exception):
    """What is wrong, as the rest of a sentence that begins with the file's name."""


def read_bytes(path: str | Path, what: str, error: MakeError = ValueError, *, limit_bytes: int = MOST_BYTES) -> bytes:
    """A file's bytes.

    Args:
        path: the file.
        what: what it should hold, for errors: `plan`.
        error: makes the exception from its one line.
        limit_bytes: the most that such a file may have.

    Raises:
        Exception: as `error` makes it; the file is missing, is none, cannot be read, or has more than `limit_bytes`.
    """
    path = Path(path)
    try:
        there = path.stat()
        endless = not (stat.S_ISREG(there.st_mode) or stat.S_ISDIR(there.st_mode))
        content = b"" if endless else _start_of(path, limit_bytes + 1)
    except (OSError, ValueError) as problem:  # ValueError: the path has a zero byte
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"Cannot read the {what} {path}: {reason}; give a file that can be read.") from None
    if endless:
        raise error(f"Cannot read the {what} {path}: it is a pipe or a device; give a file.")
    if len(content) > limit_bytes:
        size = max(there.st_size, len(content))
        raise error(f"{path} has {size} bytes, more than the {limit_bytes} that a {what} may have; it is not a {what}.")
    return content


def parse_json(text: str | bytes, error: MakeError = ValueError) -> Any:
    """A value from JSON, as strict as the standard is: finite numbers, each key once.

    Args:
        text: the JSON; bytes are UTF-8.
        error: makes the exception from the rest of a sentence that begins with the file's name: `is not JSON (line 3, ...)`.

    Returns:
        Dicts, lists, texts of at most `MOST_LETTERS` without control characters, whole numbers below 2**63, floats up to 1e30.

    Raises:
        Exception: as `error` makes it.
    """
    try:
        value = json.loads(
            _decoded(text, "JSON"), object_pairs_hook=_each_once, parse_int=_whole, parse_float=_real, parse_constant=_no_number
        )  # fmt: skip
        _check_values(value)
    except _Refused as problem:
        raise error(str(problem)) from None
    except json.JSONDecodeError as problem:
        raise error(f"is not JSON (line {problem.lineno}, column {problem.colno}: {problem.msg})") from None
    except RecursionError:
        raise error(_too_deep("JSON")) from None
    return value


def read_json(path: str | Path, what: str, error: MakeError = ValueError, *, limit_bytes: int = MOST_BYTES) -> Any:
    """What a JSON file holds; see `read_bytes` for the arguments and `parse_json` for what is refused.

    Raises:
        Exception: as `error` makes it, from one line that names the file.
    """
    content = read_bytes(path, what, error, limit_bytes=limit_bytes)
    return parse_json(content, lambda problem: error(f"{path} {problem}; it is not a {what} that can be read."))


def parse_yaml(text: str | bytes, error: MakeError = ValueError) -> Any:
    """A value from YAML of plain types: each key once, no tags of Python's, no aliases (a few lines of them grow without end).

    Args:
        text: the YAML; bytes are UTF-8.
        error: as for `parse_json`.

    Raises:
        Exception: as `error` makes it.
    """
    import yaml

    loader = None
    try:
        loader = _yaml_loader()(_decoded(text, "YAML"))
        return loader.get_single_data()
    except _Refused as problem:
        raise error(str(problem)) from None
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise error(f"is not YAML ({where}{getattr(problem, 'problem', None) or ' '.join(str(problem).split())})") from None
    except ValueError as problem:  # a date that is none, a number of too many digits
        raise error(f"has a value that cannot be read ({str(problem).split(';')[0]})") from None
    finally:
        if loader is not None:
            loader.dispose()


def problem_of_text(text: str) -> str | None:
    """Why a text is none that we write into a file or onto a terminal, as the end of a sentence; None where it is one."""
    if len(text) > MOST_LETTERS:
        return f"is of {len(text)} letters, more than {MOST_LETTERS}"
    return "has control characters" if _UNPRINTABLE.search(text) else None


def _start_of(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


def _decoded(text: str | bytes, kind: str) -> str:
    """Text; a byte order mark, as some editors write it, is left out."""
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise _Refused(f"is not {kind} (byte {problem.start} is not UTF-8: {problem.reason})") from None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise _Refused(f"has the key {_short(twice)} twice in one object")
    return found


def _whole(text: str) -> int:
    if len(text) > 20 or abs(number := int(text)) > _MOST_WHOLE:
        raise _Refused(f"has the number {_short(text)}, which is beyond 2**63")
    return number


def _real(text: str) -> float:
    number = float(text)
    if abs(number) > _MOST_REAL:
        raise _Refused(f"has the number {_short(text)}, which is beyond {_MOST_REAL:g}")
    return number


def _no_number(text: str) -> float:
    raise _Refused(f"has {text}, which is no number")


def _check_values(value: Any) -> None:
    """Depth and texts, level by level: without recursion."""
    level, depth = [value], 0
    while level:
        for text in (item for item in level if isinstance(item, str)):
            if problem := problem_of_text(text):
                raise _Refused(f"has the text {_short(text)}, which {problem}")
        inside = [item for item in level if isinstance(item, (dict, list))]
        if inside and depth >= MOST_DEPTH:
            raise _Refused(_too_deep("JSON"))
        level, depth = [child for item in inside for child in _children(item)], depth + 1


def _children(item: dict | list) -> Iterable[Any]:
    return (*item, *item.values()) if isinstance(item, dict) else item


def _too_deep(kind: str) -> str:
    return f"is {kind} that is nested more than {MOST_DEPTH} deep"


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "...")


def _yaml_loader() -> type:
    """PyYAML's safe loader, which makes plain types only, stricter in what it lets pass."""
    import yaml

    class Loader(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent, index):
            if self.check_event(yaml.AliasEvent):
                raise _Refused(f"has the alias *{self.peek_event().anchor}; write the value out")
            self.depth += 1
            if self.depth > MOST_DEPTH:
                raise _Refused(_too_deep("YAML"))
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node, deep=False):
            _each_once([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return super().construct_mapping(node, deep)

    return Loader
