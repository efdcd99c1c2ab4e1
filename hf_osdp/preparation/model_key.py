"""A key of what decides how a model is described: none for a model that runs code which no version identifies."""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..modeling.batch import Inputs, plain_batch, random_states_kept

_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "hf_osdp")
"""Packages whose code versions and a hash identify, see `code_hash`."""
_USED_BY_THEM = ("accelerate", "huggingface_hub", "safetensors", "torchao", "typing_extensions")
"""Packages from which these import functions by name."""
_FOR_ALL_MODELS = ("torch.nn.functional", "transformers.loss.loss_utils", "transformers.masking_utils")
"""Modules whose functions a script may have replaced, in addition to those of the model's classes."""
_ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.Size, torch.dtype, torch.device)


class UnknownCodeError(Exception):
    """A model runs code, or holds objects, whose content is not known."""


def model_key(model: nn.Module) -> object:
    """Return all of a model that may change its description: not the values of its weights.

    Raises:
        UnknownCodeError: a class, a method, an attribute, a hook or a replaced function is of another package.
    """
    if not hasattr(model, "config"):
        raise UnknownCodeError("a model without a configuration")
    modules, classes = dict(model.named_modules()), {base for m in model.modules() for base in type(m).__mro__}
    if strange := next((cls for cls in classes if not _is_known_name(cls.__module__)), None):
        raise UnknownCodeError(f"{strange.__module__}.{strange.__qualname__}")
    in_use = [sys.modules[name] for name in {*_FOR_ALL_MODELS, *(cls.__module__ for cls in classes)} - {"builtins"}]
    functions = [value for owner in (*in_use, *classes) for value in vars(owner).values()]
    for function in (*functions, *dict(ALL_ATTENTION_FUNCTIONS).values()):
        _check_code(function)
    first: dict[int, str] = {}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return (
        [(name, type(module).__qualname__, _settings(module)) for name, module in modules.items()],
        [(name, first.setdefault(id(tensor), name), _layout(tensor)) for name, tensor in tensors],
        torch.get_default_dtype(),
        [getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() for kernel in _ATTENTION_KERNELS],
    )


def inputs_key(inputs: Inputs, samples: Sequence[int]) -> object:
    """Return the content of batches; random number generators keep their states."""
    with random_states_kept():
        return [_content(plain_batch(inputs(count)), elements=True) for count in samples]


def _settings(module: nn.Module) -> object:
    """Return a module's attributes that are not tensors or modules."""
    own = {"_parameters", "_buffers", "_modules", "generation_config"}
    plain = ((name, value) for name, value in vars(module).items() if name not in own)
    return [
        (name, _content(list(value.values()) if "_hooks" in name and isinstance(value, dict) else value))
        for name, value in plain
    ]  # hooks have numbers that count up in a process


def _content(value: Any, *, elements: bool = False) -> object:  # noqa: ANN401
    """Return the content of a value; a tensor's is its layout, and if asked for its elements."""
    inner = functools.partial(_content, elements=elements)
    match value:
        case _ if isinstance(value, _PLAIN):
            return type(value).__name__, repr(value)
        case torch.Tensor():
            return _layout(value), _checksum(value) if elements else None
        case nn.Module() | RemovableHandle():
            return type(value).__qualname__  # one of the model's, or a function without state
        case PreTrainedConfig():
            hidden = [getattr(value, name, None) for name in ("_attn_implementation", "_experts_implementation")]
            return value.to_json_string(use_diff=False), hidden
        case Mapping():
            return [(inner(name), inner(one)) for name, one in value.items()]
        case set() | frozenset():
            return sorted(repr(inner(one)) for one in value)
        case list() | tuple():
            return [inner(one) for one in value]
    return _code(value, inner)


def _code(value: Any, inner: Callable[[Any], object]) -> object:  # noqa: ANN401
    """Return the content of a function, a class or an object of the known packages."""
    match value:
        case type() | types.BuiltinFunctionType():
            return value.__module__, value.__qualname__
        case types.FunctionType():
            return (
                _check_code(value),
                value.__qualname__,
                [inner(cell.cell_contents) for cell in value.__closure__ or ()],
            )
        case types.MethodType():
            return inner(value.__func__), inner(value.__self__)
        case functools.partial():
            return inner(value.func), inner(value.args), inner(value.keywords)
    if hasattr(value, "__dict__") and _is_known_name(type(value).__module__):
        return type(value).__qualname__, inner(vars(value))
    raise UnknownCodeError(f"{type(value).__module__}.{type(value).__qualname__}")


def _checksum(tensor: torch.Tensor) -> str:
    held = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(held.numpy().tobytes()).hexdigest()


def _layout(tensor: torch.Tensor) -> object:
    return tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.requires_grad, type(tensor).__qualname__


def _check_code(value: object) -> str:
    """Return the file of a function or property, or an empty text for anything else; raise UnknownCodeError if the
    file, whatever the names say, is of another package.
    """
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    if not isinstance(function, types.FunctionType) or _is_known_file(file := function.__code__.co_filename):
        return getattr(getattr(function, "__code__", None), "co_filename", "")
    raise UnknownCodeError(f"{function.__qualname__} in {file}")


def _is_known_name(module: str) -> bool:
    return module.partition(".")[0] in (*_PACKAGES, *sys.stdlib_module_names)


@functools.cache
def _is_known_file(file: str) -> bool:
    specs = (find_spec(name) for name in (*_PACKAGES, *_USED_BY_THEM))
    files = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    known = tuple(os.path.dirname(one) + os.sep if one.endswith("__init__.py") else one for one in files)
    is_standard = file.startswith(os.path.dirname(os.__file__) + os.sep) and "site-packages" not in file
    return is_standard or file.startswith((*known, "<"))  # <frozen ...>, <string> of dataclasses
