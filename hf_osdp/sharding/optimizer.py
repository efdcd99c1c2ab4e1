"""What an optimizer holds, and whether it can train on shards: known by its name, or else found by a trial."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..distributed.mesh import world_size
from ..errors import OSDPError
from ..planner.optimizers import (
    ADAFACTOR,
    ADVICE,
    LOW_BIT,
    TORCH_STATES,
    reason_against,
    spec_of_trainer_name,
    step_of,
)
from ..planner.training_job import OptimizerSpec, OptimizerStep, StateFormat
from .bitsandbytes import spec_of_bitsandbytes
from .gradients import shard_size
from .muon import is_muon, spec_of_muon
from .optimizer_trial import COLUMNS, ROWS, after_step, difference_on_shards

_NEEDS_WHOLE = ("adafactor", "lamb", "lars", "muon")
"""Parts of names of optimizers that use norms, factors or products of whole parameters; a trial decides about
others.
"""
ELEMENT_WISE = tuple(
    getattr(torch.optim, name)
    for name in ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD")
)
"""torch's optimizers that train on shards as on whole parameters; a subclass may do something else."""
_MAX_DIFFERENCE = 1e-4
"""Fraction of an update: rounding in float32 causes less; a shard's norm instead of the whole parameter's causes
some percent.
"""


def _class_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    return (
        *(["paged"] if getattr(optimizer, "is_paged", False) else []),
        *(cls.__name__ for cls in type(optimizer).__mro__),
    )


def low_bit_spec(optimizer: torch.optim.Optimizer) -> OptimizerSpec | None:
    """Return what a torchao optimizer with quantized states holds; None for others, and for amsgrad, which has a
    third state.
    """
    names = [cls.__name__.lower() for cls in type(optimizer).__mro__ if cls.__module__.startswith("torchao.")]
    spec = next(
        filter(None, (LOW_BIT.get(name.replace("adamw", "adam").replace("adam", "adamw")) for name in names)), None
    )
    block_size = getattr(
        optimizer, "block_size", None
    )  # transformers passes text from `optim_args`, with which torchao fails
    if spec is None or optimizer.defaults["amsgrad"] or not isinstance(block_size, int):
        return None
    return spec.with_block_size(block_size)


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer without Accelerate's wrappers."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return optimizer


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Return an optimizer's name in checkpoints: for bitsandbytes with its bits, because the Trainer uses one class
    for both.
    """
    spec = spec_of_bitsandbytes(inner := unwrapped(optimizer))
    return type(inner).__name__ if spec is None else spec.name


def check_optimizer(optimizer: torch.optim.Optimizer, partial: Iterable[nn.Parameter] = ()) -> None:
    """Raise OSDPError if an optimizer cannot train its parameters as the applied plan has laid them out.

    An optimizer that needs whole parameters cannot train sharded ones or those `partial`; one that rounds at random
    cannot train replicas. If the class name is neither refused nor known to be element-wise, the optimizer is tried on
    a matrix and on its shards.
    """
    optimizer = unwrapped(optimizer)
    trained = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if isinstance(p, torch.Tensor) and p.requires_grad
    ]
    if getattr(optimizer, "bf16_stochastic_round", False) and any(
        p.dtype is torch.bfloat16 and shard_size(p) < world_size() for p in trained
    ):
        raise OSDPError(
            f"{type(optimizer).__name__} rounds parameters in bf16 at random (bf16_stochastic_round=True), so replicas"
            " would drift apart;"
            " use strategy='fsdp', which has no replicas, or hold parameters in float32 (mixed_precision='bf16')."
        )
    whole, bnb_spec = needs_whole(optimizer), spec_of_bitsandbytes(optimizer)
    partial_ids = {id(parameter) for parameter in partial}
    if bnb_spec and bnb_spec.is_quantized and (split := sum(id(p) in partial_ids for p in trained)):
        raise OSDPError(
            f"{type(optimizer).__name__} quantizes blocks of whole parameters, and {split} of {len(trained)} are in"
            " slices or on the host;"
            f" plan for this optimizer, or {ADVICE}."
        )
    gathers = is_muon(optimizer)
    if (whole or gathers) and (
        split := sum((shard_size(p) > 1 and not gathers) or id(p) in partial_ids for p in trained)
    ):
        raise OSDPError(
            f"{type(optimizer).__name__} is not element-wise: it needs whole parameters, and {split} of {len(trained)}"
            " are sharded, in"
            f" slices or on the host; plan for this optimizer, which keeps them whole, or {ADVICE}."
        )


def needs_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is correct only on whole parameters; raise OSDPError if it cannot run under a
    plan.
    """
    name = type(optimizer).__name__
    if (
        type(optimizer) in ELEMENT_WISE
        or is_muon(optimizer)
        or low_bit_spec(optimizer)
        or spec_of_bitsandbytes(optimizer)
    ):
        return False
    if reason := reason_against(*_class_names(optimizer)):
        raise OSDPError(f"{name} {reason}.")
    try:
        difference = difference_on_shards(optimizer)
    except Exception as error:  # a user's optimizer may raise anything
        raise OSDPError(f"{name} cannot be tried on a matrix ({_first_line(error)}); {ADVICE}.") from error
    if difference is None:
        raise OSDPError(f"{name} updates at random, so that replicas would drift apart; {ADVICE}.")
    named = any(part in cls.lower() for cls in _class_names(optimizer) for part in _NEEDS_WHOLE)
    return named or not difference <= _MAX_DIFFERENCE


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0].rstrip('.')}"


def spec_of_optimizer(optimizer: torch.optim.Optimizer | None, *, device_type: str) -> OptimizerSpec:
    """Return what an optimizer will hold, plain or wrapped by Accelerate; None means AdamW with its defaults.

    What torch's, torchao's and bitsandbytes' hold is known. Any other takes steps on a trial matrix, and the states it
    keeps are counted.
    """
    if optimizer is None:
        return spec_of_trainer_name("adamw_torch", device_type=device_type)
    optimizer = unwrapped(optimizer)
    cls, options = type(optimizer), optimizer.defaults
    name = cls.__name__.lower()
    try:
        if spec := low_bit_spec(optimizer) or spec_of_bitsandbytes(optimizer, device_type=device_type):
            return spec
    except OSDPError as error:
        raise ValueError(str(error)) from error
    if is_muon(optimizer):
        return spec_of_muon(optimizer)
    if name in TORCH_STATES and cls is getattr(torch.optim, cls.__name__, None):
        states = TORCH_STATES[name] + sum(bool(options.get(option)) for option in ("amsgrad", "momentum", "centered"))
        return OptimizerSpec(
            name=name, states=states, step=step_of(options.get("fused"), options.get("foreach"), device_type)
        )
    if reason := reason_against(*_class_names(optimizer)):
        raise ValueError(f"{cls.__name__} {reason}.")
    try:
        return _counted_spec(optimizer, device_type)
    except OSDPError as error:
        raise ValueError(str(error)) from error
    except Exception as error:  # a user's optimizer may raise anything
        raise ValueError(
            f"The memory of {cls.__name__} cannot be determined ({_first_line(error)}); {ADVICE}."
        ) from error


def spec_of_optimizers(optimizers: Sequence[torch.optim.Optimizer], *, device_type: str) -> OptimizerSpec:
    """Return an upper bound of what several optimizers of one model hold, as if the one that holds most had all
    parameters.

    Gathered matrices are identified by their shapes, so that matrices of the same shape in another optimizer count as
    well.
    """
    specs = [spec_of_optimizer(optimizer, device_type=device_type) for optimizer in optimizers]
    most = max(specs, key=OptimizerSpec.traffic_per_element)
    return replace(
        most,
        step=max(specs, key=lambda spec: (not spec.matrices, spec.traffic_per_element())).step,
        loop_scratch=max(spec.loop_scratch for spec in specs),
        needs_whole=any(spec.needs_whole for spec in specs),
        matrices=tuple(sorted({shape for spec in specs for shape in spec.matrices})),
    )


def spec_of_muon_beside_adamw(model: nn.Module, *, device_type: str) -> OptimizerSpec:
    """Return what torch's Muon for a model's matrices and AdamW for its embeddings, head and vectors hold."""
    tables = [getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output")]
    partial = {id(parameter) for table in tables if table is not None for parameter in table.parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim == 2 and id(parameter) not in partial]
    if not matrices:
        raise ValueError(
            f"Muon trains matrices, and {type(model).__name__} has none outside of its embeddings; use adamw."
        )
    return spec_of_optimizers([torch.optim.Muon(matrices), torch.optim.AdamW(trained)], device_type=device_type)


def _counted_spec(optimizer: torch.optim.Optimizer, device_type: str) -> OptimizerSpec:
    """Return what an optimizer keeps for a float32 matrix; raise ValueError for a state that has neither its shape nor
    is factored.

    If the optimizer needs whole parameters, the temporaries of its step are counted as well.
    """
    whole, (kept, _) = needs_whole(optimizer), after_step(optimizer, ROWS, COLUMNS)
    shapes = [tuple(value.shape) if type(value) is torch.Tensor else type(value) for value in kept]
    rows, columns = (
        sum(shape in given for shape in shapes) for given in (((ROWS,), (ROWS, 1)), ((COLUMNS,), (1, COLUMNS)))
    )
    full = [value for value, shape in zip(kept, shapes, strict=True) if shape == (ROWS, COLUMNS)]
    if rows != columns or len(full) + rows + columns < len(kept):
        raise ValueError(f"it keeps {', '.join(map(str, shapes))} for a matrix of shape {(ROWS, COLUMNS)}")
    formats = [
        StateFormat(bytes_per_element=v.itemsize, is_least=bool(rows))
        for v in full
        if rows or v.dtype != torch.float32
    ]
    foreach = optimizer.defaults.get("foreach")
    loops = "foreach" not in optimizer.defaults or (whole and not foreach)
    return OptimizerSpec(
        name=type(optimizer).__name__.lower(),
        states=len(full) - len(formats),
        formats=(*formats, *ADAFACTOR.formats * rows),
        step=OptimizerStep.FOR_LOOP if loops else step_of(optimizer.defaults.get("fused"), foreach, device_type),
        needs_whole=whole,
        loop_scratch=after_step(optimizer, ROWS, ROWS)[1] if whole else OptimizerSpec().loop_scratch,
    )


def frozen_parameters(optimizer: object) -> int:
    """Return how many frozen parameters an optimizer received; 0 if there is no optimizer yet."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    return sum(not parameter.requires_grad for group in groups for parameter in group["params"])
