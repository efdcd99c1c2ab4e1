"""Arguments of a training script: its dataclasses, the options of `OSDPConfig`, and a file of both before the flags."""

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

from ..planning.config import OSDPConfig
from .launch import launch_request


def parse_arguments(types: Sequence[type], argv: Sequence[str]) -> tuple[Any, ...]:
    """Read flags, after a YAML or JSON file of them where the first argument is one; flags win over the file.

    Args:
        types: dataclasses as `HfArgumentParser` takes them. With `TrainingArguments` among them there is `--osdp false`, the stock Trainer.
        argv: the command line after the script's name.

    Returns:
        One instance of each type; then the options of `OSDPConfig` that are stated and no field of a type, or False for the stock Trainer.

    Raises:
        ValueError: flags or the file cannot be used; one line says why.
    """
    own = {option.name for cls in types for option in fields(cls)}
    has_trainer = any(issubclass(cls, TrainingArguments) for cls in types)
    with one_line_errors():
        parser = HfArgumentParser(types, allow_abbrev=False, exit_on_error=False)  # type: ignore[arg-type]
        if has_trainer:
            parser.set_defaults(use_cpu=launch_request().use_cpu or not torch.accelerator.is_available())
            parser.add_argument("--osdp", type=string_to_bool, help="False: the stock Trainer. By default what the accelerate file says.")
        for option in fields(OSDPConfig):
            if option.name not in own:
                parser.add_argument(f"--{option.name}", type=yaml.safe_load, help="An option of hf_osdp.OSDPConfig.")
        if argv and argv[0].endswith((".yaml", ".yml", ".json")):
            argv = [*_flags_of(argv[0]), *argv[1:]]
        *arguments, options = parser.parse_args_into_dataclasses(list(argv))
    stated = {name: value for name, value in vars(options).items() if value is not None}
    is_stock = has_trainer and stated.pop("osdp", launch_request().osdp) is False
    return *arguments, False if is_stock else stated


@contextmanager
def one_line_errors(what: str = "", also: type[Exception] = ValueError) -> Iterator[None]:
    """Turn a library's errors, and those of type `also`, into input errors, which `run_script` prints in one line."""
    try:
        yield
    except (ArgumentError, KeyError, OSError, TypeError, ValueError, yaml.YAMLError, also) as error:
        raise ValueError(what + " ".join(str(error.__cause__ or error).split())) from error


class _KeysOnce(yaml.SafeLoader):
    """YAML as PyYAML reads it, but for a key that stands twice, of which PyYAML takes the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} stands twice; keep one", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _flags_of(path: str) -> list[str]:
    """Return a file's arguments as flags."""
    with open(path, encoding="utf-8") as file:
        content = _KeysOnce(file).get_single_data()
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must map argument names to values.")
    values = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in content.items()}
    return [f"--{name}={value}" for name, value in values.items() if value is not None]
