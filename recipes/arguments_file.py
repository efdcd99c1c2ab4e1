"""A YAML or JSON file of arguments, checked against the parser that would take them from the command line."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainingArguments
from transformers.hf_argparser import string_to_bool

from hf_osdp.reading import parse_json, read_bytes

SUFFIXES = (".yaml", ".yml", ".json")
_MOST_BYTES = 2**20
_KINDS = {int: ((int,), "a whole number"), float: ((int, float), "a number"), string_to_bool: ((bool,), "true or false")}
"""Values of the file that an argument of this type takes, and how to say so; texts are converted as on the command line."""


def read_defaults(path: Path, parser: argparse.ArgumentParser, types: Sequence[type]) -> dict[str, Any]:
    """The file as a mapping of known names to values of their types.

    Args:
        path: the file; `.json` is JSON, all else YAML.
        parser: what takes the same arguments as flags.
        types: the dataclasses that it makes.

    Raises:
        ValueError: the file cannot be read, or a name or a value cannot be used.
    """

    def unreadable(problem: str) -> ValueError:
        return ValueError(f"{path} {problem}.")

    text = read_bytes(path, "file of arguments", limit_bytes=_MOST_BYTES)
    content = parse_json(text, unreadable) if path.suffix == ".json" else _parse_yaml(text, unreadable)
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must map argument names to values.")
    known = {f.name for cls in types for f in dataclasses.fields(cls) if f.init}
    if unknown := [str(name) for name in content if name not in known]:
        names = sorted(name for cls in types if cls is not TrainingArguments for name in (f.name for f in dataclasses.fields(cls)))
        others = " and those of TrainingArguments" if TrainingArguments in types else ""
        raise ValueError(f"{path} has unknown keys {', '.join(unknown)}; known are {', '.join(names)}{others}.")
    for action in parser._actions:
        if action.dest in content:
            _check_type(path, action, content[action.dest])
    return dict(content)


class _Loader(yaml.SafeLoader):
    """Refuse a key that stands twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names = [key.value for key, _ in node.value]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"the key {twice!r} stands twice")
        return super().construct_mapping(node, deep)


def _parse_yaml(text: bytes, error: Callable[[str], ValueError]) -> object:
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as problem:
        line, column = (0, 0) if problem.problem_mark is None else (problem.problem_mark.line, problem.problem_mark.column)
        raise error(f"is not YAML (line {line + 1}, column {column + 1}: {problem.problem})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise error(f"is not YAML ({' '.join(str(problem).split())})") from None


def _check_type(path: Path, action: argparse.Action, value: Any) -> None:
    """Numbers and switches; argparse converts and checks texts alone."""
    if value is None or isinstance(value, str) or action.type not in _KINDS:
        return
    types, wanted = _KINDS[action.type]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ValueError(f"{path} has {action.dest}: {value!r}, but it takes {wanted}.")
