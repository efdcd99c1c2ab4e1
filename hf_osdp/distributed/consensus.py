"""Agreement between ranks: one result, one plan, or the same error on all."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from .. import errors
from ..errors import OSDPError, PlanError, PlanMismatchError
from ..planner.job import OptimizerSpec, Precision
from ..planner.plan import Plan
from .device import own_gpu
from .heartbeat import start_heartbeat
from .mesh import world_size
from .process_group import are_several_ranks, check_ranks, mismatch_line, waiting_group

T = TypeVar("T")
_SAME_MEMORY = 0.02
"""A share: devices of one name whose memory differs by less are of one kind."""

_SHARED_ERRORS: dict[str, type[Exception]] = {
    name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, OSDPError)
} | {"ValueError": ValueError}


def on_rank_zero(fn: Callable[[], T]) -> T:
    """Run `fn` on rank 0 and give every rank its result, or its error. Collective.

    Args:
        fn: called on rank 0 alone; its result must be picklable where there is more than one rank.

    Returns:
        What `fn` returned on rank 0.

    Raises:
        OSDPError, ValueError: what `fn` raised, with its type and attributes where it is `ValueError` or one of hf_osdp's
            errors, else an `OSDPError` that names the type; the same line on every rank.
    """
    if world_size() == 1:
        return fn()
    message: list[bytes | None] = [None]
    cause: BaseException | None = None
    group = waiting_group()
    if dist.get_rank() == 0:
        message[0], cause = _outcome(fn)
    dist.broadcast_object_list(message, src=0, group=group)
    assert message[0] is not None
    outcome = pickle.loads(message[0])  # of rank 0 of this run, by the process group: no file
    if "error" in outcome:
        if cause is not None and not isinstance(cause, Exception):
            raise cause  # an interrupt stays one on the rank that got it
        raise _rebuild(**outcome["error"]) from cause
    result: T = outcome["result"]
    return result


def _outcome(fn: Callable[[], Any]) -> tuple[bytes, BaseException | None]:
    """Return result or error as bytes. Whatever happens here must not leave the other ranks waiting, hence BaseException."""
    try:
        return pickle.dumps({"result": fn()}), None
    except BaseException as error:
        return pickle.dumps({"error": _describe(error)}), error


def _describe(error: BaseException) -> dict[str, Any]:
    """Return the nearest shared type, the message in one line, and the attributes that can travel."""
    name = next((cls.__name__ for cls in type(error).__mro__ if _SHARED_ERRORS.get(cls.__name__) is cls), None)
    text = " ".join(str(error).split())
    if name is None:
        return {"type_name": OSDPError.__name__, "text": f"Rank 0 failed with {type(error).__name__}: {text}", "attributes": {}}
    attributes = {key: value for key, value in vars(error).items() if isinstance(value, (int, float, str, tuple, type(None)))}
    return {"type_name": name, "text": text, "attributes": attributes}


def _rebuild(*, type_name: str, text: str, attributes: dict[str, Any]) -> Exception:
    cls = _SHARED_ERRORS[type_name]
    error = cls.__new__(cls, text)
    error.args = (text,)
    vars(error).update(attributes)
    return error


def largest_of_ranks(value: int) -> int:
    """Return the largest of all ranks' values. Collective."""
    return max(_of_all_ranks(value))


def require_same(said: Mapping[str, str]) -> None:
    """Stop all ranks where they are about to run different things. Collective.

    Args:
        said: what this rank is about to run, by name.

    Raises:
        PlanMismatchError: ranks differ; the same line on every rank, which says in what, and which ranks.
    """
    if line := mismatch_line(_of_all_ranks(dict(said))):
        raise PlanMismatchError(line)


def require_same_run(model: nn.Module, *asked: object, **more: object) -> None:
    """Compare the ranks' versions, models, options and devices, before planning. Collective.

    Args:
        model: not yet sharded.
        *asked: dataclasses of options. Of objects among them, and of `memory_limit`, which may be measured, it counts only whether
            they are there; of `sequence_length`, which may be read from the data, nothing. With a `device_type` of `cuda` the devices'
            names count, and their memory where it differs by 2 % or more.
        **more: further options.

    Raises:
        LaunchError: versions differ.
        PlanMismatchError: models, options or devices do.
    """
    if not are_several_ranks():
        return
    check_ranks()
    start_heartbeat()
    options = {field.name: getattr(one, field.name) for one in asked if is_dataclass(one) for field in fields(one)} | more
    texts = {name: _option_text(name, value) for name, value in options.items() if name != "sequence_length"}
    mine = {"the model": _model_text(model), **texts}
    said, devices = zip(*_of_all_ranks((mine, _own_device(options.get("device_type")))), strict=True)
    device_texts = _device_texts(devices)
    if line := mismatch_line([{**one, "the device": text} for one, text in zip(said, device_texts, strict=True)]):
        hint = " Plans are made for devices of one kind; CUDA_VISIBLE_DEVICES chooses those of a machine."
        raise PlanMismatchError(line + (hint if len(set(device_texts) - {""}) > 1 else ""))


def _of_all_ranks(mine: T) -> list[T]:
    """Return what every rank has, in rank order. Collective."""
    values = [mine] * world_size()
    if (group := waiting_group()) is not None:
        dist.all_gather_object(values, mine, group=group)
    return values


def _own_device(device_type: object) -> tuple[str, int] | None:
    """Return name and MiB of this rank's GPU; None without one. Processors and their memory may differ."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(own_gpu())
    return found.name, round(found.total_memory / 2**20)


def _device_texts(devices: Sequence[tuple[str, int] | None]) -> list[str]:
    """Name each device, with its memory where that differs by more than `_SAME_MEMORY`."""
    memories = [device[1] for device in devices if device is not None]
    alike = not memories or max(memories) - min(memories) < _SAME_MEMORY * max(memories)
    return ["" if device is None else device[0] if alike else f"{device[0]} with {device[1]} MiB" for device in devices]


def _model_text(model: nn.Module) -> str:
    """Return class, size, and a hash over names, shapes and dtypes."""
    tensors = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    elements = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} ({len(tensors)} tensors, {elements} elements, {hashlib.sha256(repr(tensors).encode()).hexdigest()[:8]})"


def _option_text(name: str, value: object) -> str:
    """Return an option as it is shown where ranks differ."""
    if value is None:
        return "left out"
    if name == "plan":
        return _plan_text(value)
    plain = isinstance(value, (bool, int, float, str, tuple, Precision, OptimizerSpec)) and name != "memory_limit"
    return repr(value) if plain and name not in ("hardware", "profile") else "given"


def _plan_text(plan: object) -> str:
    """Return a plan's fingerprint; a file that cannot be read here may be rank 0's alone, whose counts."""
    if isinstance(plan, Plan):
        return plan.fingerprint
    if not Path(str(plan)).is_file():
        return ""
    try:
        return Plan.load(Path(str(plan))).fingerprint
    except PlanError:
        return "a file that is no plan"
