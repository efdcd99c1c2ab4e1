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

from ..errors import OSDPError, PlanMismatchError
from ..planner.job import OptimizerSpec, Precision
from ..planner.plan import Plan
from .device import own_gpu
from .heartbeat import start_heartbeat
from .mesh import rank, world_size
from .process_group import are_several_ranks, check_ranks, differences, of_all_ranks, waiting_group

T = TypeVar("T")
_SAME_MEMORY = 0.02
"""A share: devices of one name whose memory differs by less are of one kind."""


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
    if rank() == 0:
        try:
            message[0] = pickle.dumps((fn(), None))
        except BaseException as error:  # whatever happens here must not leave the other ranks waiting
            cause, message[0] = error, pickle.dumps((None, _as_sent(error)))
    dist.broadcast_object_list(message, src=0, group=group)
    assert message[0] is not None
    outcome: tuple[T, tuple[type[Exception], str, dict[str, Any]] | None] = pickle.loads(message[0])  # of this run's rank 0: no file
    result, failure = outcome
    if failure is None:
        return result
    if cause is not None and not isinstance(cause, Exception):
        raise cause  # an interrupt stays one on the rank that got it
    kind, text, attributes = failure
    sent = kind.__new__(kind, text)
    sent.args = (text,)
    vars(sent).update(attributes)
    raise sent from cause


def _as_sent(error: BaseException) -> tuple[type[Exception], str, dict[str, Any]]:
    """Return the nearest type that all ranks know, the message in one line, and the attributes that can travel."""
    text = " ".join(str(error).split())
    attributes = {name: value for name, value in vars(error).items() if isinstance(value, (int, float, str, tuple, type(None)))}
    for kind in type(error).__mro__:
        if kind is ValueError or (issubclass(kind, OSDPError) and kind.__module__ == OSDPError.__module__):
            return kind, text, attributes
    return OSDPError, f"Rank 0 failed with {type(error).__name__}: {text}", {}


def require_same(mine: Mapping[str, str], hint: str = "") -> None:
    """Stop all ranks where they are about to run different things. Collective.

    Args:
        mine: what this rank is about to run, by name; an empty text agrees with all.
        hint: a further remedy.

    Raises:
        PlanMismatchError: ranks differ; the same line on every rank, which says in what, and which ranks.
    """
    if found := differences(dict(enumerate(of_all_ranks(mine)))):
        raise PlanMismatchError(
            f"Ranks are about to run different things: {found}. Run the same program with the same arguments on every rank.{hint}"
        )


def require_same_run(model: nn.Module, *asked: object, **more: object) -> None:
    """Compare the ranks' versions, models, options and devices, before planning. Collective.

    Args:
        model: not yet sharded.
        *asked: dataclasses of options. Of objects and files among them, and of `memory_limit`, which may be measured, it counts only
            whether they are there; of `sequence_length`, which may be read from the data, nothing. With a `device_type` of `cuda` the
            devices' names count, and their memory where it differs by 2 % or more.
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
    require_same({"the model": _model_text(model), **texts})
    if options.get("device_type") == "cuda":  # processors and their memory may differ
        found = torch.cuda.get_device_properties(own_gpu()) if torch.cuda.is_available() else None
        memories = [nbytes for nbytes in of_all_ranks(found.total_memory if found else 0) if nbytes] or [0]
        alike = max(memories) - min(memories) < _SAME_MEMORY * max(memories)
        name = found.name if found else ""
        device = name if alike or not found else f"{name} with {found.total_memory // 2**20} MiB"
        require_same({"the device": device}, " Plans are made for devices of one kind; CUDA_VISIBLE_DEVICES chooses those of a machine.")


def _model_text(model: nn.Module) -> str:
    """Return class, size, and a hash over names, shapes and dtypes."""
    tensors = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    elements = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} ({len(tensors)} tensors, {elements} elements, {hashlib.sha256(repr(tensors).encode()).hexdigest()[:8]})"


def _option_text(name: str, value: object) -> str:
    """Return an option as it is shown where ranks differ."""
    if value is None:
        return "left out"
    if isinstance(value, Plan):
        return value.fingerprint
    plain = isinstance(value, (bool, int, float, str, tuple, Precision, OptimizerSpec))
    return repr(value) if plain and name not in ("hardware", "plan", "profile", "memory_limit") else "given"
