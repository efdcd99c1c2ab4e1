"""Dataclasses as JSON files: written whole or not at all, read with every field checked (`hf_osdp/reading.py` reads the JSON)."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..errors import OSDPError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
_SHOWN = 60
"""Letters of a field's name that an error quotes."""


def plain(value: object) -> Any:  # noqa: ANN401 - what JSON has
    """Return dataclasses, enums, mappings and sequences as what JSON has."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def write_whole(path: str | Path, text: str) -> None:
    """Write a file that is complete or not there; an older one stays until then. OSError where that cannot be done."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # several ranks may write the same file
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def validated(cls: type[T], content: object, error: Callable[[str], Exception]) -> T:
    """Return a dataclass made from what JSON held, strictly: no unknown fields, no conversions.

    Raises:
        Exception: as `error` makes it from where and what is wrong: `units.0.shard_size: Input should be a valid integer`.
    """
    from pydantic import ValidationError

    try:
        # JSON has lists and texts where fields are tuples and enums
        return cast(T, _adapter(cast(Any, cls)).validate_json(json.dumps(content), strict=True))
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(part)[:_SHOWN] for part in first["loc"]) or "top level"
        raise error(f"{where}: {first['msg'].removeprefix('Value error, ').rstrip('.')}") from None
    except OSDPError as problem:  # from the dataclass itself
        raise error(str(problem).rstrip(".")) from None


@functools.cache
def _adapter(cls: type[object]) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter, with_config

    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(cls))
