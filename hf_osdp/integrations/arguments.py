"""Parse a training script's arguments: its dataclasses and the options of `OSDPConfig`, from a file and from flags."""

from __future__ import annotations

import json
from argparse import ArgumentError
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import string_to_bool

from ..errors import one_line
from ..preparation.config import GROUPS, option_texts
from .launch import launch_request


def parse_arguments(types: Sequence[type], argv: Sequence[str]) -> tuple[Any, ...]:
    """Parse flags, and a YAML or JSON file of them if it is the first argument; flags override the file.

    Args:
        types: dataclasses for `HfArgumentParser`. If one is a `TrainingArguments`, `--osdp false` selects the stock
            Trainer.
        argv: the command line after the script's name.

    Returns:
        One instance of each type; then the given `OSDPConfig` options that are not fields of a type, or False for the
        stock Trainer.

    Raises:
        ValueError: flags or the file cannot be used; the message is one line.
    """
    script_options = {option.name for cls in types for option in fields(cls)}
    has_trainer = any(issubclass(cls, TrainingArguments) for cls in types)
    with one_line_errors():
        parser = HfArgumentParser(types, allow_abbrev=False, exit_on_error=False)  # type: ignore[arg-type]
        if has_trainer:
            parser.set_defaults(use_cpu=launch_request().use_cpu or not torch.accelerator.is_available())
            parser.add_argument(
                "--osdp", type=string_to_bool, help="False: the stock Trainer. Default: set by the accelerate file."
            )
        texts = option_texts()
        for group, names in GROUPS.items():
            section = parser.add_argument_group(f"OSDP: {group.lower()}")
            for name in names:
                if name not in script_options:
                    text = texts.get(name, "").replace("%", "%%")
                    section.add_argument(f"--{name}", type=yaml.safe_load, help=text)
        if argv and argv[0].endswith((".yaml", ".yml", ".json")):
            argv = [*_flags_of_file(argv[0]), *argv[1:]]
        *arguments, options = parser.parse_args_into_dataclasses(list(argv))
    stated = {name: value for name, value in vars(options).items() if value is not None}
    is_stock = has_trainer and stated.pop("osdp", launch_request().osdp) is False
    return *arguments, False if is_stock else stated


@contextmanager
def one_line_errors(what: str = "", also: type[Exception] = ValueError) -> Iterator[None]:
    """Convert a library's errors, and those of type `also`, to input errors, which `run_script` prints in one line."""
    try:
        yield
    except (ArgumentError, KeyError, OSError, TypeError, ValueError, yaml.YAMLError, also) as error:
        raise ValueError(what + one_line(error.__cause__ or error)) from error


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys, of which PyYAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} appears twice; keep one", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _flags_of_file(path: str) -> list[str]:
    """Return a file's arguments as flags."""
    with open(path, encoding="utf-8") as file:
        content = _UniqueKeyLoader(file).get_single_data()
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must map argument names to values.")
    return [
        f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"
        for name, value in content.items()
        if value is not None
    ]
