"""Dataclasses as JSON files: written whole or not at all, read with every field checked (`hf_osdp/reading.py` reads
the JSON).
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..errors import OSDPError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
_LEFT_S = 3600
_SHOWN = 60
"""Most letters of a field's name in an error."""


def plain(value: object) -> Any:  # noqa: ANN401 - any JSON
    """Return a value as JSON types: dataclasses and mappings as dictionaries, sequences as lists, enums as their
    values.
    """
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(value, fallback=dict)  # read-only mappings


def write_whole(path: str | Path, text: str) -> None:
    """Write a file whole or not at all; an older file stays until the new one is complete. What writers that were
    killed have left of it for an hour is removed.

    OSError if writing fails.
    """
    path = Path(path)
    for left in path.parent.glob(f"{escape(path.name)}.*.partial"):
        with suppress(OSError):  # others may remove it too
            if time.time() - left.stat().st_mtime > _LEFT_S:
                left.unlink()
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # several ranks may write the same file
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def validated(cls: type[T], content: object, error: Callable[[str], Exception]) -> T:
    """Return a dataclass made from a JSON value, strictly: no unknown fields, no conversions.

    Raises:
        Exception: made by `error` from place and problem, such as `units.0.shard_size: Input should be a valid
            integer`.
    """
    from pydantic import ValidationError

    try:
        # JSON has lists and texts for tuples and enums
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
