"""Cache model descriptions, measured hardware and times of blocks on disk for later starts, in the folder that
`OSDP_CACHE` names.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial
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
from ..measurement.block_times import TimedModel, measure_block_times
from ..measurement.machine import (
    device_name,
    measure_hardware,
    measuring_device,
    with_memory_of_now,
)
from ..measurement.timing import over_ranks, seconds_without_core, usable_cores
from ..planner.description import ModelDescription
from ..planner.files import plain, validated, write_whole
from ..planner.hardware import Hardware
from ..planner.profile import SegmentTimes
from ..reading import read_json
from ..tracing.attention import capability_here
from ..tracing.describe import describe
from ..tracing.options import DescribeOptions
from .model_key import inputs_key, model_key

T = TypeVar("T")
MEASURED_EARLIER = "measured earlier"
"""Prefix of the source of hardware that was read from the cache."""
_MAX_AGE_S = 24 * 3600
"""A machine's speed changes over time."""
_MAX_FILES = 256
_BUSY = 0.1
"""Share of a measurement's time without a core, above which other programs have disturbed it."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CachedDescription:
    """A description and the warnings that were logged while it was made."""

    description: ModelDescription
    warnings: tuple[str, ...]


def describe_once(model: nn.Module, **options: Any) -> ModelDescription:
    """Describe a model, or return the cached description of the same model, made by the same code and versions for
    batches of the same content.

    Files are stored in `OSDP_CACHE` (else in `hf_osdp` under `HF_HOME`, else under `~/.cache/huggingface`); the oldest
    are deleted first. `OSDP_CACHE=0` switches the cache off. Descriptions with `loss`, or of models with code of other
    packages, are not cached.
    """
    folder, key, chosen = cache_folder(), None, DescribeOptions(**options)
    if folder is not None and chosen.loss is None:
        try:
            key = _key(model, chosen)
        except Exception as error:  # a batch that cannot be made, objects in a circle: `describe` reports what matters
            _log.debug("The description is not cached: %s: %s.", type(error).__name__, error)
    if folder is None or key is None:
        return describe(model, **options)
    path = folder / f"{key}.json"
    if (cached := _read(path, _CachedDescription)) is not None:
        with suppress(OSError):
            path.touch()
        for text in cached.warnings:
            _log.warning("%s", text)
        return cached.description
    with warnings_of_package() as texts:
        description = describe(model, **options)
    _write(path, _CachedDescription(description=description, warnings=tuple(texts)))
    with suppress(OSError):
        for old in sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)[_MAX_FILES:]:
            old.unlink()
    return description


@contextmanager
def warnings_of_package() -> Iterator[list[str]]:
    """Collect the warnings that the package logs."""
    texts: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger(__package__.partition(".")[0])
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def cache_folder() -> Path | None:
    """Return the cache's folder; None if the cache is off."""
    value = variables().get("OSDP_CACHE")
    if value is not None and value != "1":  # 1 switches the cache on; it is not a folder's name
        return None if value in ("", "0") else Path(value)
    return Path(variable("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hf_osdp"


def _key(model: nn.Module, options: DescribeOptions) -> str:
    """Return the name of a description; raise UnknownCodeError if the code that decides it is not known."""
    batches = None if options.inputs is None else inputs_key(options.inputs, sorted({1, 2, *options.samples}))
    values = [(field.name, repr(getattr(options, field.name))) for field in fields(options) if field.name != "inputs"]
    content = (code_hash(), values, batches, model_key(model), capability_here(), variable("TORCHDYNAMO_DISABLE"))
    return hashlib.sha256(repr(content).encode()).hexdigest()[:32]


@cache
def code_hash() -> str:
    """Return a hash of this package's code and of the versions on which cached results depend."""
    others = [version(name) if find_spec(name) else "" for name in ("peft", "bitsandbytes")]
    digest = hashlib.sha256(
        f"{platform.python_version()} {torch.__version__} {transformers.__version__} {' '.join(others)}".encode()
    )
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def measured_once(*, device_type: str, seconds: float) -> Hardware:
    """Measure the machine by `measure_hardware`, or return what was measured before, with the current sizes of memory.
    Collective.
    """
    device = measuring_device(device_type)
    hardware, ago = _once(
        Hardware, seconds, device, lambda: measure_hardware(device_type=device_type, seconds=seconds)
    )
    if not ago:
        return hardware
    hardware = with_memory_of_now(hardware, device)
    source = f"{MEASURED_EARLIER}, {ago} ago; OSDP_CACHE=0 measures it anew"
    return replace(hardware, device=replace(hardware.device, source=source))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    segments: tuple[SegmentTimes, ...]


def timed_once(
    description: ModelDescription, timed: TimedModel, *, device: torch.device
) -> tuple[tuple[SegmentTimes, ...], str]:
    """Time the blocks of a described model by `measure_block_times`, or return the times of an equal model from
    before, and how long ago that was. Collective. Raise ProfileError as `measure_block_times`.
    """
    model: Any = timed.model_or_config
    config = getattr(model, "config", None)
    implementations = [getattr(config, name, None) for name in ("_attn_implementation", "_experts_implementation")]
    options = (timed.micro_batch_sizes, timed.autocast, timed.activation_checkpointing, implementations)
    measure = partial(measure_block_times, seconds=1.0, at_start=True, description=description)
    read_back = validated(ModelDescription, json.loads(json.dumps(plain(description))), ValueError)
    content = (json.dumps(plain(read_back)), options)  # numbers of a new description and of one on disk print alike
    times, ago = _once(_Times, content, device, lambda: _Times(segments=measure(timed, device=device)))
    return times.segments, f" {ago} ago" if ago else ""


def _once(cls: type[T], content: object, device: torch.device, measure: Callable[[], T]) -> tuple[T, str]:
    """Return what `measure` returns, or returned for the same content on the same machine within the last day, and
    how long ago that was, if it was before. Collective.

    Rank 0 has the file. A measurement during which a rank waited for cores that other programs had is not cached.
    """
    ranks = all_gather_objects((platform.node(), device_name(device), usable_cores()))
    name = hashlib.sha256(repr((code_hash(), content, find_topology(), ranks)).encode()).hexdigest()[:32]
    folder = cache_folder()
    path = None if folder is None else folder / "machines" / f"{name}.json"
    cached = on_rank_zero(lambda: _read_recent(path, cls))
    if cached is None:
        began_s, waited_s = time.perf_counter(), seconds_without_core()
        value = measure()
        (share,) = over_ranks([(seconds_without_core() - waited_s) / (time.perf_counter() - began_s)])
        on_rank_zero(lambda: None if share > _BUSY or path is None else _write(path, value))
        return value, ""
    text, age_s = cached
    value = validated(cls, json.loads(text), ValueError)
    return value, f"{age_s / 3600:.0f} h" if age_s >= 5400 else f"{age_s / 60:.0f} min"


def _read_recent(path: Path | None, cls: type[T]) -> tuple[str, float] | None:
    """Return a file's value, as JSON, and its age in seconds; None if it is missing, damaged or too old."""
    with suppress(OSError):
        if path is not None and 0 <= (age_s := time.time() - path.stat().st_mtime) < _MAX_AGE_S:
            return None if (value := _read(path, cls)) is None else (json.dumps(plain(value)), age_s)
    return None


def _read(path: Path, cls: type[T]) -> T | None:
    """Return a file's value; None if the file is missing or damaged."""
    try:
        return validated(cls, read_json(path, "cache"), ValueError)
    except (OSError, ValueError):
        return None


def _write(path: Path, value: object) -> None:
    with suppress(OSError):  # without a writable folder nothing is cached
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(plain(value)))
