"""Cache model descriptions on disk for later starts, in the folder that `OSDP_CACHE` names."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
import types
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..distributed.launcher import variable, variables
from ..modeling.batch import plain_batch, random_states_kept
from ..planner.description import ModelDescription
from ..planner.files import plain, validated, write_whole
from ..reading import read_json
from ..tracing.attention import capability_here
from ..tracing.describe import describe
from ..tracing.options import DescribeOptions

_MAX_FILES = 256
_PACKAGES = (
    "torch", "transformers", "hf_osdp", "accelerate", "huggingface_hub", "safetensors", "torchao", "typing_extensions",
    "tqdm", "numpy", "packaging",
)  # fmt: skip
"""Packages whose code versions and a hash identify, see `code_hash`, and those from which they take functions."""
_OF_CLASSES = {"torch", "transformers", "hf_osdp", *sys.stdlib_module_names}
"""Packages of a model's classes."""
_CHECKPOINTING = "_gradient_checkpointing_func"
"""Where transformers keeps the function of activation checkpointing, which a job states."""
_IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")
_FOR_ALL_MODELS = ("torch.nn.functional", "transformers.loss.loss_utils", "transformers.masking_utils")
"""Modules whose functions a script may have replaced, in addition to those of the model's classes."""
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

    Files are stored in `OSDP_CACHE` (else in `hf_osdp` under `HF_HOME`, else under `~/.cache/huggingface`); the oldest
    are deleted first. `OSDP_CACHE=0` switches the cache off. Descriptions with `loss`, or of models that are not
    transformers' alone, are not cached.
    """
    folder, key, chosen = cache_folder(), None, DescribeOptions(**options)
    if folder is not None and chosen.loss is None and _is_of_transformers(model):
        try:
            key = _key(model, chosen)
        except Exception as error:  # a batch that cannot be made: `describe` reports it
            _log.debug("The description is not cached: %s: %s.", type(error).__name__, error)
    if folder is None or key is None:
        return describe(model, **options)
    path = folder / f"{key}.json"
    if (cached := _read(path)) is not None:
        with suppress(OSError):
            path.touch()
        for text in cached.warnings:
            _log.warning("%s", text)
        return cached.description
    with warnings_of_package() as texts:
        description = describe(model, **options)
    write(path, _CachedDescription(description=description, warnings=tuple(texts)))
    with suppress(OSError):
        for old in sorted(folder.glob("*.json*"), key=lambda file: file.stat().st_mtime, reverse=True)[_MAX_FILES:]:
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
    """Return the cache's folder; None if the cache is off, or the user has no home, as in some containers."""
    value = variables().get("OSDP_CACHE")
    if value is not None and value != "1":  # 1 switches the cache on; it is not a folder's name
        return None if value in ("", "0") else Path(value)
    try:
        return Path(variable("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hf_osdp"
    except RuntimeError:
        return None


def _key(model: nn.Module, options: DescribeOptions) -> str:
    """Return the name of the description of a model of transformers: of its configuration and what of the model may
    differ from that, of options and batches, of code and versions. The values of weights do not count.
    """
    batches: list[object] = []
    if options.inputs is not None:
        with random_states_kept():
            batches = [_content(plain_batch(options.inputs(samples))) for samples in (1, 2, 3)]
    values = [(field.name, repr(getattr(options, field.name))) for field in fields(options) if field.name != "inputs"]
    first: dict[int, str] = {}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    content = (
        code_hash(), values, batches, implementations(model), capability_here(),
        [(name, type(module).__qualname__, _settings(module)) for name, module in model.named_modules()],
        [_text(hook) for module in model.modules() for hook in _hooks(module)],
        [(name, first.setdefault(id(tensor), name), _layout(tensor)) for name, tensor in tensors],
        torch.get_default_dtype(),
        [getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() for kernel in _ATTENTION_KERNELS],
    )  # fmt: skip
    return hashlib.sha256(repr(content).encode()).hexdigest()[:32]


def implementations(model: object) -> list[tuple[object, ...]]:
    """Return each configuration of a model's modules, with how it computes attention and experts, which its JSON
    leaves out.
    """
    parts = model.modules() if isinstance(model, nn.Module) else (model,)
    values = (value for part in parts for value in (part, *vars(part).values()))
    configs = {id(value): value for value in values if isinstance(value, PreTrainedConfig)}
    return [
        (one.to_json_string(use_diff=False), *(getattr(one, name, None) for name in _IMPLEMENTATIONS))
        for one in configs.values()
    ]


def _settings(module: nn.Module) -> list[tuple[str, str]]:
    """Return a module's attributes that are plain values, such as a dropout's rate, or functions."""
    return [(name, text) for name, value in vars(module).items() if (text := _text(value)) is not None]


def _text(value: object) -> str | None:
    """Return a text of a plain value or a function; None of anything else."""
    if isinstance(value, (set, frozenset)):
        return str(sorted(map(repr, value)))
    if isinstance(value, (tuple, list)):
        return str([_text(one) for one in value])
    if _is_function(value):
        return f"{value.__module__}.{value.__qualname__}"  # type: ignore[attr-defined]
    plain_value = isinstance(value, (bool, int, float, str, Enum, torch.dtype, types.NoneType))
    return repr(value) if plain_value else None


def _content(batch: object) -> object:
    """Return the content of a batch, tensors by their layout and a checksum."""
    leaves, spec = tree_flatten(batch)
    flat = (leaf.detach().cpu().contiguous().reshape(-1) if torch.is_tensor(leaf) else leaf for leaf in leaves)
    sums = [
        hashlib.sha256(one.view(torch.uint8).numpy().tobytes()).hexdigest() if torch.is_tensor(one) else one
        for one in flat
    ]
    return str(spec), sums, [_layout(leaf) for leaf in leaves if torch.is_tensor(leaf)]


def _layout(tensor: torch.Tensor) -> object:
    return tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.requires_grad, type(tensor).__qualname__


def _is_of_transformers(model: nn.Module) -> bool:
    """Return whether a model runs only code that versions identify: no class, forward, hook, callable object or
    replaced function of others.
    """
    modules = list(model.modules())
    classes = {base for module in modules for base in type(module).__mro__} - {object}
    if not hasattr(model, "config") or {_package(cls.__module__) for cls in classes} - _OF_CLASSES:
        return False
    owners = [sys.modules.get(name) for name in {*_FOR_ALL_MODELS, *(cls.__module__ for cls in classes)}]
    if None in owners:
        return False
    own = [value for module in modules for name, value in vars(module).items() if name != _CHECKPOINTING]
    own += [hook for module in modules for hook in _hooks(module)]
    own = [one for one in own if callable(one) and not isinstance(one, (nn.Module, type))]
    if any("forward" in vars(module) for module in modules) or not all(map(_is_function, own)):
        return False
    values = [value for owner in (*owners, *classes) for value in vars(owner).values()]
    values += [*own, *dict(ALL_ATTENTION_FUNCTIONS).values()]
    return all(_is_known(function) for value in values for function in _functions(value))


def _hooks(module: nn.Module) -> tuple[object, ...]:
    return (*module._forward_hooks.values(), *module._forward_pre_hooks.values())


def _package(module_name: str) -> str:
    return module_name.partition(".")[0]


def _is_function(value: object) -> bool:
    return isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType))


def _functions(value: object) -> Iterator[types.FunctionType]:
    """Yield the functions that an attribute runs, wrapped ones too."""
    if isinstance(value, property):
        for one in (value.fget, value.fset):
            yield from _functions(one)
    elif isinstance(value, partial):
        yield from _functions(value.func)
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        yield from _functions(value.__func__)
    elif isinstance(value, types.FunctionType):
        yield value
        yield from _functions(vars(value).get("__wrapped__"))


def _is_known(function: types.FunctionType) -> bool:
    """Return whether versions identify a function's code; that of dataclasses and the like has no file."""
    file = function.__code__.co_filename
    generated = file == "<string>" and _package(function.__module__ or "") in {*_PACKAGES, *sys.stdlib_module_names}
    return generated or file.startswith(_known_places())


@cache
def _known_places() -> tuple[str, ...]:
    """Return the folders, or files, of code that versions identify."""
    origins = [spec.origin for name in _PACKAGES if (spec := find_spec(name)) is not None and spec.origin is not None]
    folders = [os.path.dirname(one) + os.sep if one.endswith("__init__.py") else one for one in origins]
    library = os.path.dirname(os.__file__) + os.sep
    standard = [library + name for name in os.listdir(library) if name != "site-packages"]
    return (*folders, *standard, "<frozen ")


@cache
def code_hash() -> str:
    """Return a hash of this package's code and of the versions on which cached results depend."""
    others = [version(name) if find_spec(name) else "" for name in ("peft", "bitsandbytes", "accelerate", "torchao")]
    digest = hashlib.sha256(
        f"{platform.python_version()} {torch.__version__} {transformers.__version__} {' '.join(others)}".encode()
    )
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> _CachedDescription | None:
    """Return a file's description; None if the file is missing or damaged."""
    try:
        return validated(_CachedDescription, read(path), ValueError)
    except (OSError, ValueError):
        return None


def read(path: Path) -> object:
    """Return the JSON value of a file of the cache; OSError or ValueError if it is missing or damaged."""
    content = read_json(path, "cache")
    if not isinstance(content, dict) or content.get("crc32") != _checksum(content.get("value")):
        raise ValueError(f"{path} has another checksum than its content")
    return content["value"]


def write(path: Path, value: object) -> None:
    """Write a value to a file of the cache, as JSON with its checksum, if that is possible."""
    with suppress(OSError):  # without a writable folder nothing is cached
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"crc32": _checksum(plain(value)), "value": plain(value)}))


def _checksum(value: object) -> int:
    return zlib.crc32(json.dumps(value).encode())
