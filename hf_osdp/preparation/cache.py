"""Keep descriptions and profiles on disk for later starts, in the folder that `OSDP_CACHE` names."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import logging
import pickle
import platform
import sys
import time
import types
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..distributed.launcher import variable, variables
from ..modeling.batch import plain_batch, random_states_kept
from ..planner.description import ModelDescription
from ..planner.files import plain, validated, write_whole
from ..reading import parse_json, read_bytes
from ..tracing.attention import capability_here
from ..tracing.describe import describe
from ..tracing.options import DescribeOptions

T = TypeVar("T")
_MAX_FILES = 512
_KNOWN = {
    "torch", "transformers", "hf_osdp", "accelerate", "huggingface_hub", "safetensors", "torchao", "typing_extensions",
    "tqdm", "numpy", "packaging", *sys.stdlib_module_names,
}  # fmt: skip
"""Packages whose code versions and a hash identify, see `_code_hash`, and those from which they take functions."""
_FOR_ALL_MODELS = ("torch.nn.functional", "transformers.loss.loss_utils", "transformers.masking_utils")
"""Modules whose functions a script may have replaced, in addition to those of the model's classes."""
_WRAPPERS = (types.MethodType, functools.partial, property, staticmethod, classmethod)
_ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CachedDescription:
    """A description and the warnings that were logged while it was made."""

    description: ModelDescription
    warnings: tuple[str, ...]


def describe_once(model: nn.Module, **options: Any) -> ModelDescription:
    """Describe a model, or return the cached description of the same model, made by the same code and versions for
    batches of the same content.

    Descriptions with `loss`, or of models that run code of others than torch and transformers, are not cached.
    """
    chosen, key = DescribeOptions(**options), None
    if chosen.loss is None and cache_folder() is not None:
        try:
            key = _key_of_model(model, chosen)
        except Exception as error:  # code of others, or a batch that cannot be made, which `describe` reports
            _log.debug("The description is not cached: %s: %s.", type(error).__name__, error)
    if key is None:
        return describe(model, **options)
    if (found := kept(key, _CachedDescription)) is not None:
        for text in found[0].warnings:
            _log.warning("%s", text)
        return found[0].description
    with warnings_of_package() as texts:
        description = describe(model, **options)
    keep(key, _CachedDescription(description=description, warnings=tuple(texts)))
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
    """Return `OSDP_CACHE`, else `hf_osdp` under `HF_HOME` or `~/.cache/huggingface`; None if the cache is off, or the
    user has no home, as in some containers.
    """
    value = variables().get("OSDP_CACHE")
    if value is not None and value != "1":  # 1 switches the cache on; it is not a folder's name
        return None if value in ("", "0") else Path(value)
    try:
        return Path(variable("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hf_osdp"
    except RuntimeError:
        return None


def key_of(*content: object) -> str:
    """Return the key of a value that follows from this content and from this package's code."""
    return hashlib.sha256(repr((_code_hash(), content)).encode()).hexdigest()[:32]


def kept(key: str, cls: type[T]) -> tuple[T, float] | None:
    """Return the value that is kept under a key, and its age in seconds; None if it is missing or damaged."""
    if (folder := cache_folder()) is not None:
        with suppress(OSError, ValueError):
            path = folder / f"{key}.json"
            checksum, _, content = read_bytes(path, "cache").partition(b"\n")
            if int(checksum) == zlib.crc32(content):
                return validated(cls, parse_json(content), ValueError), time.time() - path.stat().st_mtime
    return None


def keep(key: str, value: object) -> None:
    """Keep a value for later starts, if the cache is on and its folder can be written; the oldest files make room."""
    if (folder := cache_folder()) is not None:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            content = json.dumps(plain(value))
            write_whole(folder / f"{key}.json", f"{zlib.crc32(content.encode())}\n{content}")
            for old in sorted(folder.glob("*.json*"), key=lambda file: file.stat().st_mtime)[:-_MAX_FILES]:
                old.unlink()


def _key_of_model(model: nn.Module, options: DescribeOptions) -> str:
    """Return the key of a model's description: of all that the model holds but the values of weights, of options,
    batches and torch's settings. Raise an exception if versions do not identify the code that the model runs.
    """
    held, batches = _Content(), _Content(with_values=True)
    held.dump(model)
    owners = {*held.modules, *(sys.modules[name] for name in _FOR_ALL_MODELS)}
    owners |= {sys.modules[cls.__module__] for cls in held.modules}
    for value in (*(one for owner in owners for one in vars(owner).values()), *dict(ALL_ATTENTION_FUNCTIONS).values()):
        _refuse_foreign(value)
    if options.inputs is not None:
        with random_states_kept():
            batches.dump([plain_batch(options.inputs(samples)) for samples in (1, 2, 3)])
    values = [(field.name, repr(getattr(options, field.name))) for field in fields(options) if field.name != "inputs"]
    kernels = [getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() for kernel in _ATTENTION_KERNELS]
    compiled = [module._compiled_call_impl is not None for module in model.modules()]  # which no pickle holds
    of_torch = torch.get_default_dtype(), capability_here(), kernels, compiled
    return key_of(held.digest, batches.digest, values, of_torch)


class _Content(pickle.Pickler):
    """Write objects, with tensors as their layout and, for batches, a checksum; functions and classes as their names.

    Raises:
        Exception: an object cannot be written, or versions do not identify the code of a function or class.
    """

    def __init__(self, *, with_values: bool = False) -> None:
        self._file, self._with_values = io.BytesIO(), with_values
        super().__init__(self._file)
        self._tensors: dict[int, tuple[int, torch.Tensor]] = {}
        self.modules: set[type] = set()
        """Classes of modules, and their bases."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self._file.getvalue()).hexdigest()

    def persistent_id(self, value: Any) -> object:  # noqa: ANN401
        if isinstance(value, torch.Tensor):
            number, _ = self._tensors.setdefault(id(value), (len(self._tensors), value))  # the same for shared ones
            content = _checksum(value) if self._with_values else None
            return number, type(value), tuple(value.shape), value.stride(), value.dtype, value.requires_grad, content
        if isinstance(value, (set, frozenset)):
            return sorted(map(repr, value))
        if not isinstance(value, (type, types.FunctionType, types.MethodType)):
            return None
        _refuse_foreign(value)
        if isinstance(value, type) and issubclass(value, nn.Module):
            self.modules.update(value.__mro__[:-1])
        return value.__module__, value.__qualname__, getattr(value, "__self__", None)


def _checksum(tensor: torch.Tensor) -> str:
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(whole.view(torch.uint8).numpy().tobytes()).hexdigest()


def _refuse_foreign(value: object) -> None:
    """Raise ValueError if versions do not identify the code of a class, or of a function in any wrapper."""
    if isinstance(value, (type, types.FunctionType)):
        # a wrapper takes the module of what it wraps, but not its globals
        module = value.__module__ if isinstance(value, type) else value.__globals__.get("__name__")
        if str(module).partition(".")[0] not in _KNOWN:
            raise ValueError(f"{value.__qualname__} is code of others, {module}")
    if isinstance(value, (*_WRAPPERS, types.FunctionType)):
        for name in ("__func__", "__wrapped__", "func", "fget", "fset"):
            _refuse_foreign(getattr(value, name, None))


@functools.cache
def _code_hash() -> str:
    """Return a hash of this package's code and of the versions on which cached results depend."""
    others = [version(name) if find_spec(name) else "" for name in ("peft", "bitsandbytes", "accelerate", "torchao")]
    digest = hashlib.sha256(
        f"{platform.python_version()} {torch.__version__} {transformers.__version__} {' '.join(others)}".encode()
    )
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
