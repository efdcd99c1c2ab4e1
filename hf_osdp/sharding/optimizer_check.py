"""Optimizers that must not be used on shards: known by name, or seen to differ on a matrix and on its shards."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence

import torch

from ..errors import OSDPError

_REASONS = {
    "adafactor": "factors a parameter's second moment over its rows and columns",
    "lamb": "scales by the norm of each whole parameter",
    "lars": "scales by the norm of each whole parameter",
    "muon": "orthogonalises each whole matrix",
    "shampoo": "preconditions with each whole matrix",
    "soap": "preconditions with each whole matrix",
    "galore": "projects each whole matrix",
    "lbfgs": "needs dot products over all parameters",
    "sparseadam": "needs sparse gradients",
    "rprop": "assigns elements by a mask",
    "lomo": "updates while backward runs, before gradients are reduced",
    "apollo": "scales by the norms of a parameter's channels",
    "8bit": "holds its states in blocks that are quantized together",
    "4bit": "holds its states in blocks that are quantized together",
}
"""Why an optimizer is wrong, or fails, on shards, by a part of its name in lower case."""
_ELEMENT_WISE = tuple(
    getattr(torch.optim, name) for name in ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD")
)
"""Optimizers of torch that train on shards as they train on the whole; a subclass may do something else."""
_LARGEST_DIFFERENCE = 1e-4
"""Of an update: rounding of float32 leaves less, a norm of a shard in the place of the whole's some percent."""
_ADVICE = "use an element-wise optimizer such as AdamW, Adam, SGD or RMSprop"
_ROWS, _COLUMNS, _SHARDS = 96, 64, 3
"""More elements than where 8-bit optimizers begin to quantize (4096), fewer in a shard."""
_STEPS = 2
_RATE = 0.1
"""Learning rate of the trial; a schedule may begin at 0, where no optimizer shows what it does."""


def reason_against(name: str) -> str | None:
    """Return why an optimizer of this class or `optim` name is wrong, or fails, on shards; None where the name says nothing."""
    return next((reason for part, reason in _REASONS.items() if part in name.lower()), None)


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer itself, where Accelerate has wrapped it."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return optimizer


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update of an element depends on other elements: on shards it may train differently.

    The class and its bases are looked up by name, so that the versions of different packages are found. An optimizer that is neither
    known to be wrong nor one of torch's own is tried on a matrix and on its shards.

    Raises:
        OSDPError: the optimizer is known to be wrong under sharding, or was seen to be, or cannot be tried.
    """
    optimizer = unwrapped(optimizer)
    name = type(optimizer).__name__
    for cls in type(optimizer).__mro__:
        if reason := reason_against(cls.__name__):
            raise OSDPError(f"{name} {reason}, which shards of a parameter do not allow; {_ADVICE}.")
    if type(optimizer) in _ELEMENT_WISE or not any(group["params"] for group in optimizer.param_groups):
        return
    try:
        difference = difference_on_shards(optimizer)
    except Exception as error:  # an optimizer may be made for anything
        text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise OSDPError(f"{name} cannot be tried on shards ({type(error).__name__}: {text}); {_ADVICE}.") from error
    if not difference <= _LARGEST_DIFFERENCE:
        raise OSDPError(
            f"{name} is not element-wise: two steps on a matrix and on its shards differ by {100 * difference:.2g} % of the update;"
            f" {_ADVICE}."
        )


def difference_on_shards(optimizer: torch.optim.Optimizer) -> float:
    """Take two steps on a matrix for each group, whole and in three shards of rows. The optimizer itself stays as it is.

    An element-wise optimizer gives the same but for rounding. One that takes norms, factors or products of a whole parameter does not.

    Returns:
        The largest difference between the two, as a part of the largest update; NaN where nothing was updated.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(1, _ROWS + 1).unsqueeze(1)  # so that no two shards have one norm
    before = [torch.randn(_ROWS, _COLUMNS, generator=generator) for _ in optimizer.param_groups]
    gradients = [[rows * torch.randn(_ROWS, _COLUMNS, generator=generator) for _ in before] for _ in range(_STEPS)]
    whole, parts = (_after_steps(optimizer, before, gradients, shards) for shards in (1, _SHARDS))
    update = max(float((after - start).abs().max()) for after, start in zip(whole, before, strict=True))
    difference = max(float((one - other).abs().max()) for one, other in zip(whole, parts, strict=True))
    return difference / update if update else float("nan")


def _after_steps(
    optimizer: torch.optim.Optimizer, before: Sequence[torch.Tensor], gradients: Sequence[Sequence[torch.Tensor]], shards: int
) -> list[torch.Tensor]:
    """Return the matrices after the steps, which were taken on so many shards of each."""
    device = next(iter(optimizer.param_groups[0]["params"])).device
    parameters = [[torch.nn.Parameter(shard.to(device, copy=True)) for shard in matrix.chunk(shards)] for matrix in before]
    trial = _trial(optimizer, parameters)
    for of_step in gradients:
        for pieces, gradient in zip(parameters, of_step, strict=True):
            for piece, shard in zip(pieces, gradient.chunk(shards), strict=True):
                piece.grad = shard.to(device, copy=True)
        type(trial).step(trial)
    return [torch.cat([piece.detach().cpu() for piece in pieces]) for pieces in parameters]


def _trial(optimizer: torch.optim.Optimizer, parameters: Sequence[list[torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """Make the same kind of optimizer with other parameters, a learning rate that shows, no state and no hooks."""
    trial = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        trial.__dict__[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": pieces} for group, pieces in zip(optimizer.param_groups, parameters, strict=True)]
    for group in trial.param_groups:
        if "lr" in group:
            group["lr"] = torch.full_like(group["lr"], _RATE) if isinstance(group["lr"], torch.Tensor) else _RATE
    return trial
