"""Values as JSON files: written whole or not at all, read with every field checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from ..errors import OSDPError

T = TypeVar("T")

MOST_BYTES = 64 * 2**20
"""Larger files are none of ours."""


def plain(value: Any) -> Any:
    """Dataclasses, enums, mappings and sequences as what JSON has."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def write_whole(path: str | Path, text: str) -> None:
    """Write a file that is complete or not there; an older one stays until then.

    Raises:
        OSError: the folder is missing or cannot be written.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def read_whole(path: str | Path, what: str, error: Callable[[str], Exception]) -> bytes:
    """A file's bytes.

    Args:
        path: the file.
        what: what it should hold, for errors: `plan`.
        error: makes the exception from its one line.

    Raises:
        Exception: as `error` makes it; the file cannot be read, or has more than `MOST_BYTES`.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise error(f"{path} has more than {MOST_BYTES} bytes; it is not a {what}.")
        return path.read_bytes()
    except OSError as problem:
        raise error(f"Cannot read the {what} {path}: {problem.strerror}.") from None


def validated(cls: type[T], text: str | bytes, error: Callable[[str], Exception]) -> T:
    """A dataclass from JSON, strictly: no unknown fields at the top, no conversions.

    Args:
        cls: the dataclass.
        text: its JSON.
        error: makes the exception from where and what is wrong: `units.0.shard_size: Input should be a valid integer`.

    Raises:
        Exception: as `error` makes it.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

    adapter: Any = TypeAdapter(with_config(ConfigDict(extra="forbid"))(cls))
    try:
        return adapter.validate_json(text, strict=True)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "top level"
        raise error(f"{where}: {first['msg'].removeprefix('Value error, ').rstrip('.')}") from None
    except OSDPError as problem:  # from the dataclass itself
        raise error(str(problem).rstrip(".")) from None
