"""Descriptions kept on disk, so that a model is traced once on a machine: `describe_once` in place of `describe`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ..planner.description import ModelDescription
from ..planner.files import plain, validated, write_whole
from ..reading import read_json
from ..tracing.attention import capability_here
from ..tracing.describe import describe

_MOST_FILES = 256
_KNOWN_CODE = {"torch", "transformers", "peft", "hf_osdp"}
"""Packages whose code is told by a version or a hash; the code of other modules may change under the same names."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What a file holds."""

    description: ModelDescription
    warnings: tuple[str, ...]
    """What describing warned of; it is said again."""


def describe_once(model: nn.Module, **options: Any) -> ModelDescription:
    """Describe a model of transformers, or take what was found when the same one was described before.

    The same is the same configuration, parameters, options, code of hf_osdp, and versions of Python, torch and transformers. Files lie in
    `OSDP_CACHE` (else `hf_osdp` under `HF_HOME`, else `~/.cache/huggingface`), where the oldest make room; `OSDP_CACHE=0` keeps none.

    Args:
        model: real or on the meta device.
        options: as `describe` takes them; with `inputs`, `loss` or modules that are code of others, nothing is kept.

    Raises:
        Exception: as `describe`.
    """
    folder = cache_folder()
    of_code = options.get("inputs") is not None or options.get("loss") is not None or not hasattr(model, "config")
    if folder is None or of_code or any(type(module).__module__.partition(".")[0] not in _KNOWN_CODE for module in model.modules()):
        return describe(model, **options)
    path = folder / f"{_key(model, options)}.json"
    with suppress(OSError, ValueError):  # a file that is missing or damaged is made again
        kept = validated(_Kept, read_json(path, "description"), ValueError)
        path.touch()
        for text in kept.warnings:
            _log.warning("%s", text)
        return kept.description
    with warnings_of_package() as texts:
        description = describe(model, **options)
    with suppress(OSError):  # a folder that cannot be written keeps nothing
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(plain(_Kept(description=description, warnings=tuple(texts)))))
        for old in sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)[_MOST_FILES:]:
            old.unlink()
    return description


@contextmanager
def warnings_of_package() -> Iterator[list[str]]:
    """Collect what the package warns of, which the command line has on stderr."""
    texts: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger(__package__.partition(".")[0])
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def cache_folder() -> Path | None:
    """Return where results are kept; None for nowhere."""
    asked = os.environ.get("OSDP_CACHE")
    if asked is not None:
        return None if asked in ("", "0") else Path(asked)
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hf_osdp"


def _key(model: Any, options: Mapping[str, Any]) -> str:  # noqa: ANN401  (a module with a configuration)
    content = (
        code_hash(), sorted((name, repr(value)) for name, value in options.items()), model.config.to_json_string(use_diff=False),
        getattr(model.config, "_attn_implementation", None), getattr(model.config, "_experts_implementation", None), model.training,
        capability_here(), os.environ.get("TORCHDYNAMO_DISABLE"),
        [(name, type(module).__qualname__) for name, module in model.named_modules()],
        [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)],
    )  # fmt: skip
    return hashlib.sha256(repr(content).encode()).hexdigest()[:32]


@cache
def code_hash() -> str:
    """Return a hash of the code that makes what is kept."""
    adapters = version("peft") if find_spec("peft") else ""
    found = hashlib.sha256(f"{platform.python_version()} {torch.__version__} {transformers.__version__} {adapters}".encode())
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()
