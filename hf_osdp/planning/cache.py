"""Descriptions and measured machines, kept on disk for later starts in the folder that `OSDP_CACHE` names."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import nn

from ..distributed.consensus import on_rank_zero
from ..distributed.launcher import variable, variables
from ..distributed.mesh import find_topology
from ..distributed.process_group import all_gather_objects
from ..measurement.machine import device_name, measure_hardware, measuring_device, with_memory_of_now
from ..measurement.timing import usable_cores
from ..planner.description import ModelDescription
from ..planner.files import plain, validated, write_whole
from ..planner.hardware import Hardware
from ..reading import read_json
from ..tracing.attention import capability_here
from ..tracing.describe import describe

T = TypeVar("T")
MEASURED_EARLIER = "measured earlier"
"""How the source of such hardware begins."""
_MOST_AGE_S = 24 * 3600
"""Machines drift."""
_MOST_FILES = 256
_KNOWN_CODE = {"torch", "transformers", "peft", "hf_osdp"}
"""Packages whose code is told by a version or a hash; the code of other modules may change under the same names."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A description, with what describing warned of."""

    description: ModelDescription
    warnings: tuple[str, ...]


def describe_once(model: nn.Module, **options: Any) -> ModelDescription:
    """Describe a model of transformers, or take what was found when the same one was described before, by the same code and versions.

    Files lie in `OSDP_CACHE` (else `hf_osdp` under `HF_HOME`, else `~/.cache/huggingface`), where the oldest make room; `OSDP_CACHE=0`
    keeps none. With `inputs`, `loss` or modules that are code of others, nothing is kept.
    """
    folder = cache_folder()
    of_code = options.get("inputs") is not None or options.get("loss") is not None or not hasattr(model, "config")
    if folder is None or of_code or any(type(module).__module__.partition(".")[0] not in _KNOWN_CODE for module in model.modules()):
        return describe(model, **options)
    path = folder / f"{_key(model, options)}.json"
    if (kept := _read(path, _Kept)) is not None:
        with suppress(OSError):
            path.touch()
        for text in kept.warnings:
            _log.warning("%s", text)
        return kept.description
    with warnings_of_package() as texts:
        description = describe(model, **options)
    _write(path, _Kept(description=description, warnings=tuple(texts)))
    with suppress(OSError):
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
    asked = variables().get("OSDP_CACHE")
    if asked is not None and asked != "1":  # 1 as in other switches, and no folder of that name
        return None if asked in ("", "0") else Path(asked)
    return Path(variable("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hf_osdp"


def _key(model: Any, options: Mapping[str, Any]) -> str:  # noqa: ANN401  (a module with a configuration)
    content = (
        code_hash(), sorted((name, repr(value)) for name, value in options.items()), model.config.to_json_string(use_diff=False),
        getattr(model.config, "_attn_implementation", None), getattr(model.config, "_experts_implementation", None), model.training,
        capability_here(), variable("TORCHDYNAMO_DISABLE"),
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


def measured_once(*, device_type: str, seconds: float) -> Hardware:
    """Measure the machine as `measure_hardware`, or take what was measured on the same one within the last day. Collective.

    The memory is that of now. Rank 0 has the file. What is measured while more is to be done than there are cores is not kept.
    """
    device = measuring_device(device_type)
    ranks = all_gather_objects((platform.node(), device_name(device), usable_cores()))
    name = hashlib.sha256(repr((code_hash(), seconds, find_topology(), ranks)).encode()).hexdigest()[:32]
    folder = cache_folder()
    path = None if folder is None else folder / "machines" / f"{name}.json"
    found = on_rank_zero(lambda: _of_last_day(path))
    if found is None:
        is_busy = os.getloadavg()[0] > usable_cores()
        hardware = measure_hardware(device_type=device_type, seconds=seconds)
        on_rank_zero(lambda: None if is_busy or path is None else _write(path, hardware))
        return hardware
    text, age_s = found
    hardware = with_memory_of_now(validated(Hardware, json.loads(text), ValueError), device)
    ago = f"{age_s / 3600:.0f} h" if age_s >= 5400 else f"{age_s / 60:.0f} min"
    source = f"{MEASURED_EARLIER}, {ago} ago; OSDP_CACHE=0 measures it anew"
    return replace(hardware, device=replace(hardware.device, source=source))


def _of_last_day(path: Path | None) -> tuple[str, float] | None:
    """Return what a file holds, as JSON, and its age in seconds."""
    with suppress(OSError):
        if path is not None and 0 <= (age_s := time.time() - path.stat().st_mtime) < _MOST_AGE_S:
            return None if (hardware := _read(path, Hardware)) is None else (json.dumps(plain(hardware)), age_s)
    return None


def _read(path: Path, cls: type[T]) -> T | None:
    """Return what a file holds; None where it is missing or damaged."""
    try:
        return validated(cls, read_json(path, "cache"), ValueError)
    except (OSError, ValueError):
        return None


def _write(path: Path, value: object) -> None:
    with suppress(OSError):  # a folder that cannot be written keeps nothing
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(plain(value)))
