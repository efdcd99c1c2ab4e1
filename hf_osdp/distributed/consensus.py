"""Agreement between ranks: one result, one plan, or the same error on all."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..errors import OSDPError, PlanMismatchError, one_line
from ..modeling.identity import model_texts, text_of
from ..planner.plan import Plan
from ..planner.training_job import OptimizerSpec, Precision
from ..versions import package_versions
from .device import own_gpu
from .mesh import rank, world_size
from .process_group import all_gather_objects, are_several_ranks, differences, gloo_group

T = TypeVar("T")
_SAME_MEMORY = 0.02
"""Fraction: devices with the same name whose memory differs by less are of one kind."""


def on_rank_zero(fn: Callable[[], T]) -> T:
    """Run `fn` on rank 0 and return its result, which must be picklable, or raise its error, on every rank.
    Collective.

    A `ValueError` and hf_osdp's errors keep type and attributes; others become an `OSDPError` that names the type.
    """
    if world_size() == 1:
        return fn()
    message: list[bytes | None] = [None]
    cause: BaseException | None = None
    group = gloo_group()
    if rank() == 0:
        try:
            message[0] = pickle.dumps((fn(), None))
        except BaseException as error:  # whatever happens here must not leave the other ranks waiting
            cause, message[0] = error, pickle.dumps((None, _as_picklable(error)))
    dist.broadcast_object_list(message, src=0, group=group)
    assert message[0] is not None
    outcome: tuple[T, tuple[type[Exception], str, dict[str, Any]] | None] = pickle.loads(
        message[0]
    )  # from this run's rank 0, not a file
    result, failure = outcome
    if failure is None:
        return result
    if cause is not None and not isinstance(cause, Exception):
        raise cause  # an interrupt keeps its type on rank 0
    kind, text, attributes = failure
    sent = kind.__new__(kind, text)
    vars(sent).update(attributes)
    raise sent from cause


def _as_picklable(error: BaseException) -> tuple[type[Exception], str, dict[str, Any]]:
    """Return the nearest error type that all ranks know, the message in one line, and the attributes that can be
    pickled.
    """
    text = one_line(error)
    attributes = {
        name: value for name, value in vars(error).items() if isinstance(value, (int, float, str, tuple, type(None)))
    }
    for kind in type(error).__mro__:
        if kind is ValueError or (issubclass(kind, OSDPError) and kind.__module__ == OSDPError.__module__):
            return kind, text, attributes
    return OSDPError, f"Rank 0 failed with {type(error).__name__}: {text}", {}


def require_same(mine: Mapping[str, str], hint: str = "") -> None:
    """Raise PlanMismatchError, with the same message on every rank, if ranks are about to run different things.
    Collective.

    `mine` maps names to what this rank is about to run; an empty text matches any other. `hint` is a further remedy.
    """
    if found := differences(dict(enumerate(all_gather_objects(mine)))):
        raise PlanMismatchError(
            f"Ranks are about to run different things: {found}. Run the same program with the same arguments on every"
            f" rank.{hint}"
        )


def require_same_run(model: nn.Module, *asked: object, **more: object) -> None:
    """Compare the ranks' versions, models with their configurations, options and devices, before planning. Collective.

    Options are the fields of dataclasses in `asked`, and `more`. For objects, files, and `memory_limit`, which may be
    measured, only their presence is compared; `sequence_length`, which may be read from the data, is not compared. If
    `device_type` is `cuda`, the devices' names are compared, and their memory if it differs by 2 % or more.
    """
    if not are_several_ranks():
        return
    options = {
        field.name: getattr(one, field.name) for one in asked if is_dataclass(one) for field in fields(one)
    } | more
    texts = {name: _option_text(name, value) for name, value in options.items() if name != "sequence_length"}
    require_same({**package_versions(), "the model": _model_text(model), **model_texts(model), **texts})
    if options.get("device_type") == "cuda":  # CPUs and their memory may differ
        found = torch.cuda.get_device_properties(own_gpu()) if torch.cuda.is_available() else None
        memories = [nbytes for nbytes in all_gather_objects(found.total_memory if found else 0) if nbytes] or [0]
        alike = max(memories) - min(memories) < _SAME_MEMORY * max(memories)
        name = found.name if found else ""
        device = name if alike or not found else f"{name} with {found.total_memory // 2**20} MiB"
        require_same(
            {"the device": device},
            " Plans need devices of one kind; select them by CUDA_VISIBLE_DEVICES on each machine.",
        )


def _model_text(model: nn.Module) -> str:
    tensors = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    elements = sum(parameter.numel() for parameter in model.parameters())
    checksum = hashlib.sha256(f"{tensors} {text_of(model)}".encode()).hexdigest()[:8]
    return f"{type(model).__name__} ({len(tensors)} tensors, {elements} elements, {checksum})"


def _option_text(name: str, value: object) -> str:
    if value is None:
        return "left out"
    if isinstance(value, Plan):
        return value.fingerprint
    plain = isinstance(value, (bool, int, float, str, tuple, Precision, OptimizerSpec))
    return repr(value) if plain and name not in ("hardware", "plan", "profile", "memory_limit") else "given"
