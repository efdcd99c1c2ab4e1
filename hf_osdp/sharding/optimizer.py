"""Optimizers by kind: what one holds, and whether it may be used on shards, by its name or else by a trial."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..distributed.mesh import world_size
from ..errors import OSDPError
from ..planner.job import ADAFACTOR, BITSANDBYTES, LOW_BIT, OptimizerSpec, OptimizerStep, StateFormat, bitsandbytes_of_trainer
from .bitsandbytes import spec_of_bitsandbytes
from .muon import is_muon, spec_of_muon
from .optimizer_trial import COLUMNS, ROWS, after_step, difference_on_shards

_REFUSED = {
    "shampoo": "preconditions with each whole matrix, in states of other shapes",
    "soap": "preconditions with each whole matrix, in states of other shapes",
    "galore": "projects each whole matrix, with states of other shapes",
    "lbfgs": "needs dot products over all parameters, and calls the loop again",
    "sparseadam": "needs sparse gradients",
    "lomo": "updates while backward runs, before gradients are reduced",
    "apollo": "projects gradients at random, otherwise on each rank",
    "paged": "keeps states in CUDA's unified memory, whose place the driver chooses",
    "8bit": "holds its states in blocks that are quantized together",
    "4bit": "holds its states in blocks that are quantized together",
}
"""Why an optimizer cannot run under a plan, by a part of its name in lower case."""
_NEEDS_WHOLE = ("adafactor", "lamb", "lars", "muon")
"""Those that take norms, factors or products of whole parameters; of others a trial tells."""
ELEMENT_WISE = tuple(
    getattr(torch.optim, name) for name in ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD")
)
"""Optimizers of torch that train on shards as they train on the whole; a subclass may do something else."""
_LARGEST_DIFFERENCE = 1e-4
"""Of an update: rounding of float32 leaves less, a norm of a shard in the place of the whole's some percent."""
_ADVICE = "use an element-wise optimizer such as AdamW, Adam, SGD or RMSprop"
_PAGED_ADVICE = "use the one that is not paged, or AdamW with OSDPConfig(offload_optimizer=True)"
_LOW_BIT_ADVICE = "use torchao's AdamW8bit (optim='adamw_torch_8bit'), which quantizes each shard by itself"
_STATES = {"adamw": 2, "adam": 2, "adamax": 2, "nadam": 2, "radam": 2, "sgd": 0, "adagrad": 1, "rmsprop": 1, "adadelta": 2}
"""State tensors for each parameter, as `torch.optim` keeps them by default."""
_OF_TRAINER = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Values of `TrainingArguments.optim` that stand for optimizers of torch."""
_TRAINER_SPECS = {
    **{name: OptimizerSpec(name=name.partition("_")[0], states=_STATES[name.partition("_")[0]]) for name in _OF_TRAINER},
    "adamw_torch_8bit": LOW_BIT["adamw8bit"].with_block_size(256),
    "adamw_torch_4bit": LOW_BIT["adamw4bit"].with_block_size(256),
    **{name: bitsandbytes_of_trainer(name) for name in BITSANDBYTES},
    "adafactor": ADAFACTOR,
}
"""What optimizers hold by their names in `TrainingArguments.optim`. transformers has blocks of 256 elements, torchao's AdamW4bit 128."""


def reason_against(*names: str) -> str | None:
    """Return why an optimizer with these names, of classes or of `optim`, cannot run, and the remedy; None where none says it."""
    found = next(((name.lower(), part) for name in names for part in _REFUSED if part in name.lower()), None)
    if found is None:
        return None
    advice = _PAGED_ADVICE if found[1] == "paged" else _LOW_BIT_ADVICE if "bit" in found[0] else _ADVICE
    return f"{_REFUSED[found[1]]}, which a plan does not allow; {advice}"


def _class_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    return (*(["paged"] if getattr(optimizer, "is_paged", False) else []), *(cls.__name__ for cls in type(optimizer).__mro__))


def low_bit_spec(optimizer: torch.optim.Optimizer) -> OptimizerSpec | None:
    """Return what one of torchao's optimizers with quantized states holds; None of others, and with amsgrad's third state."""
    names = [cls.__name__.lower() for cls in type(optimizer).__mro__ if cls.__module__.startswith("torchao.")]
    spec = next(filter(None, (LOW_BIT.get(name.replace("adamw", "adam").replace("adam", "adamw")) for name in names)), None)
    block_size = getattr(optimizer, "block_size", None)  # transformers hands on text from `optim_args`, with which torchao fails
    if spec is None or optimizer.defaults["amsgrad"] or not isinstance(block_size, int):
        return None
    return spec.with_block_size(block_size)


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer itself, where Accelerate has wrapped it."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return optimizer


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Return what checkpoints call an optimizer: bitsandbytes' with their bits, for the Trainer makes both of one class."""
    spec = spec_of_bitsandbytes(inner := unwrapped(optimizer))
    return type(inner).__name__ if spec is None else spec.name


def check_optimizer(optimizer: torch.optim.Optimizer, apart: Iterable[nn.Parameter] = ()) -> None:
    """Refuse an optimizer that cannot run under a plan as it was applied to what it trains.

    One that needs whole parameters cannot where they are sharded or `apart`, one that rounds at random where there are replicas. Those that
    are neither refused by the names of their classes nor known to be element-wise are tried on a matrix and on its shards.
    """
    optimizer = unwrapped(optimizer)
    trained = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, torch.Tensor) and p.requires_grad]
    if getattr(optimizer, "bf16_stochastic_round", False) and any(p.dtype is torch.bfloat16 and _spread(p)[1] > 1 for p in trained):
        raise OSDPError(
            f"{type(optimizer).__name__} rounds parameters in bf16 at random (bf16_stochastic_round=True), and replicas would drift apart;"
            " use strategy='fsdp', which has none, or hold parameters in float32 (mixed_precision='bf16')."
        )
    whole, held = needs_whole(optimizer), spec_of_bitsandbytes(optimizer)
    away = {id(parameter) for parameter in apart}
    if held and held.is_quantized and (parted := sum(id(p) in away for p in trained)):
        raise OSDPError(
            f"{type(optimizer).__name__} quantizes blocks of whole parameters, and {parted} of {len(trained)} are in slices or on the host;"
            f" plan for this optimizer, or {_ADVICE}."
        )
    gathers = is_muon(optimizer)
    if (whole or gathers) and (parted := sum((_spread(p)[0] > 1 and not gathers) or id(p) in away for p in trained)):
        raise OSDPError(
            f"{type(optimizer).__name__} is not element-wise: it needs whole parameters, and {parted} of {len(trained)} are sharded, in"
            f" slices or on the host; plan for this optimizer, which keeps them whole, or {_ADVICE}."
        )


def needs_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is right on whole parameters alone; OSDPError where it cannot run under a plan."""
    name = type(optimizer).__name__
    if type(optimizer) in ELEMENT_WISE or is_muon(optimizer) or low_bit_spec(optimizer) or spec_of_bitsandbytes(optimizer):
        return False
    if reason := reason_against(*_class_names(optimizer)):
        raise OSDPError(f"{name} {reason}.")
    try:
        difference = difference_on_shards(optimizer)
    except Exception as error:  # an optimizer may be made for anything
        raise OSDPError(f"{name} cannot be tried on a matrix ({_first_line(error)}); {_ADVICE}.") from error
    if difference is None:
        raise OSDPError(f"{name} updates at random, so that replicas would drift apart; {_ADVICE}.")
    named = any(part in cls.lower() for cls in _class_names(optimizer) for part in _NEEDS_WHOLE)
    return named or not difference <= _LARGEST_DIFFERENCE


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0].rstrip('.')}"


def _spread(parameter: torch.Tensor) -> tuple[int, int]:
    """Return over how many ranks a parameter is sharded, and how many hold each shard."""
    if not isinstance(parameter, DTensor):
        return 1, world_size()
    mesh = parameter.device_mesh
    replicas = math.prod(mesh.size(axis) for axis, placement in enumerate(parameter.placements) if placement.is_replicate())
    return mesh.size() // replicas, replicas


def spec_of_optimizer(optimizer: torch.optim.Optimizer | None, *, device_type: str) -> OptimizerSpec:
    """Return what an optimizer will hold, plain or wrapped by Accelerate; None stands for AdamW's defaults.

    What torch's, torchao's and bitsandbytes' hold is known; another takes a step on a matrix of its own, and what it has kept is counted.
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
    if name in _STATES and cls is getattr(torch.optim, cls.__name__, None):
        states = _STATES[name] + sum(bool(options.get(option)) for option in ("amsgrad", "momentum", "centered"))
        return OptimizerSpec(name=name, states=states, step=_step(options.get("fused"), options.get("foreach"), device_type))
    if reason := reason_against(*_class_names(optimizer)):
        raise ValueError(f"{cls.__name__} {reason}.")
    try:
        return _counted_spec(optimizer, device_type)
    except OSDPError as error:
        raise ValueError(str(error)) from error
    except Exception as error:  # an optimizer may be made for anything
        raise ValueError(f"The memory of {cls.__name__} cannot be found out ({_first_line(error)}); {_ADVICE}.") from error


def spec_of_optimizers(optimizers: Sequence[torch.optim.Optimizer], *, device_type: str) -> OptimizerSpec:
    """Return what several optimizers of one model hold at most, as if the one that holds most had all parameters.

    Matrices that one of them gathers are known by their shapes, so that another's of the same shape count as well.
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


def _counted_spec(optimizer: torch.optim.Optimizer, device_type: str) -> OptimizerSpec:
    """Return what an optimizer keeps for one matrix of float32 after a step; ValueError for what has neither its shape nor is factored.

    Of one that needs whole parameters the temporaries are counted as well.
    """
    whole, (kept, _) = needs_whole(optimizer), after_step(optimizer, ROWS, COLUMNS)
    shapes = [tuple(value.shape) if type(value) is torch.Tensor else type(value) for value in kept]
    rows, columns = (sum(shape in given for shape in shapes) for given in (((ROWS,), (ROWS, 1)), ((COLUMNS,), (1, COLUMNS))))
    full = [value for value, shape in zip(kept, shapes, strict=True) if shape == (ROWS, COLUMNS)]
    if rows != columns or len(full) + rows + columns < len(kept):
        raise ValueError(f"it keeps {', '.join(map(str, shapes))} for a matrix of shape {(ROWS, COLUMNS)}")
    formats = [StateFormat(bytes_per_element=v.itemsize, is_least=bool(rows)) for v in full if rows or v.dtype != torch.float32]
    foreach = optimizer.defaults.get("foreach")
    loops = "foreach" not in optimizer.defaults or (whole and not foreach)
    return OptimizerSpec(
        name=type(optimizer).__name__.lower(),
        states=len(full) - len(formats),
        formats=(*formats, *ADAFACTOR.formats * rows),
        step=OptimizerStep.FOR_LOOP if loops else _step(optimizer.defaults.get("fused"), foreach, device_type),
        needs_whole=whole,
        loop_scratch=after_step(optimizer, ROWS, ROWS)[1] if whole else OptimizerSpec().loop_scratch,
    )


def knows_trainer_name(name: str) -> bool:
    """Return whether the name alone tells what an optimizer holds, or that it is refused."""
    return name in _TRAINER_SPECS or reason_against(name) is not None


def spec_of_trainer_name(name: str, *, device_type: str) -> OptimizerSpec:
    """Return what the optimizer that `TrainingArguments(optim=...)` names will hold; ValueError for one that is not known by its name."""
    if name not in _TRAINER_SPECS:
        reason = reason_against(name) or f"is not known to work under a plan; use one of {', '.join(_TRAINER_SPECS)}"
        raise ValueError(f"optim={name!r} {reason}.")
    if name in BITSANDBYTES:
        return bitsandbytes_of_trainer(name, device_type=device_type)
    spec = _TRAINER_SPECS[name]
    return replace(spec, step=_step(name.endswith("_fused") or None, None, device_type)) if name in _OF_TRAINER else spec


def _step(fused: bool | None, foreach: bool | None, device_type: str) -> OptimizerStep:
    """Return how the step runs; torch's default is foreach on accelerators and one tensor after the other on the CPU."""
    if fused:
        return OptimizerStep.FUSED
    if foreach or (foreach is None and fused is None and device_type != "cpu"):
        return OptimizerStep.FOREACH
    return OptimizerStep.FOR_LOOP


def frozen_parameters(optimizer: object) -> int:
    """Return how many frozen parameters an optimizer was given; 0 where there is none yet."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    return sum(not parameter.requires_grad for group in groups for parameter in group["params"])
