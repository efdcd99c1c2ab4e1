"""Optimizers of a sharded model: what one holds, whether it may be used on shards, made before it was sharded, on two devices."""

from __future__ import annotations

import copy
import math
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from ..distributed.mesh import world_size
from ..errors import OSDPError
from ..modeling.split.names import keep_positions, split_names
from ..modeling.step_hooks import before_step
from ..modeling.units import canonical_name
from ..planner.job import ADAFACTOR, LOW_BIT, OptimizerSpec, OptimizerStep, StateFormat
from ..tracing.memory_tracker import MemoryTracker
from .environment import host_parameters
from .gradients import local

_REFUSED = {
    "shampoo": "preconditions with each whole matrix, in states of other shapes",
    "soap": "preconditions with each whole matrix, in states of other shapes",
    "galore": "projects each whole matrix, with states of other shapes",
    "lbfgs": "needs dot products over all parameters, and calls the loop again",
    "sparseadam": "needs sparse gradients",
    "lomo": "updates while backward runs, before gradients are reduced",
    "apollo": "projects gradients at random, otherwise on each rank",
    "8bit": "holds its states in blocks that are quantized together",
    "4bit": "holds its states in blocks that are quantized together",
}
"""Why an optimizer cannot run under a plan, by a part of its name in lower case."""
_NEEDS_WHOLE = ("adafactor", "lamb", "lars", "muon")
"""Those that take norms, factors or products of whole parameters; of others a trial tells."""
_ELEMENT_WISE = tuple(
    getattr(torch.optim, name) for name in ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD")
)
"""Optimizers of torch that train on shards as they train on the whole; a subclass may do something else."""
_LARGEST_DIFFERENCE = 1e-4
"""Of an update: rounding of float32 leaves less, a norm of a shard in the place of the whole's some percent."""
_ADVICE = "use an element-wise optimizer such as AdamW, Adam, SGD or RMSprop"
_LOW_BIT_ADVICE = "use torchao's AdamW8bit (optim='adamw_torch_8bit'), which quantizes each shard by itself"
_ROWS, _COLUMNS, _SHARDS = 96, 64, 3
"""More elements than where 8-bit optimizers begin to quantize (4096), fewer in a shard."""
_STEPS = 2
_RATE = 0.1
"""Learning rate of the trial; a schedule may begin at 0, where no optimizer shows what it does."""
_FUSED_ON_HOST = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers of torch whose fused step takes shards on the CPU; its fused SGD and Adagrad know no sharded tensors."""
_KERNELS = {"foreach", "fused"}
_STATES = {"adamw": 2, "adam": 2, "adamax": 2, "nadam": 2, "radam": 2, "sgd": 0, "adagrad": 1, "rmsprop": 1, "adadelta": 2}
"""State tensors for each parameter, as `torch.optim` keeps them by default."""
_OF_TRAINER = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Values of `TrainingArguments.optim` that stand for optimizers of torch."""
_TRAINER_SPECS = {
    **{name: OptimizerSpec(name=name.partition("_")[0], states=_STATES[name.partition("_")[0]]) for name in _OF_TRAINER},
    "adamw_torch_8bit": LOW_BIT["adamw8bit"].with_block_size(256),
    "adamw_torch_4bit": LOW_BIT["adamw4bit"].with_block_size(256),
    "adafactor": ADAFACTOR,
}
"""What optimizers hold by their names in `TrainingArguments.optim`. transformers has blocks of 256 elements, torchao's AdamW4bit 128."""


def reason_against(*names: str) -> str | None:
    """Return why an optimizer with these names, of classes or of `optim`, cannot run, and the remedy; None where none says it."""
    found = next(((name, reason) for name in names for part, reason in _REFUSED.items() if part in name.lower()), None)
    if found is None:
        return None
    advice = _LOW_BIT_ADVICE if "bit" in found[0].lower() else _ADVICE
    return f"{found[1]}, which a plan does not allow; {advice}"


def _class_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    return tuple(cls.__name__ for cls in type(optimizer).__mro__)


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
    if not trained or not needs_whole(optimizer):
        return
    away = {id(parameter) for parameter in apart}
    if parted := sum(_spread(p)[0] > 1 or id(p) in away for p in trained):
        raise OSDPError(
            f"{type(optimizer).__name__} is not element-wise: it needs whole parameters, and {parted} of {len(trained)} are sharded, in"
            f" slices or on the host; plan for this optimizer, which replicates them, or {_ADVICE}."
        )


def needs_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the update of an element depends on others of its parameter; OSDPError where an optimizer cannot run under a plan."""
    name = type(optimizer).__name__
    if low_bit_spec(optimizer) or type(optimizer) in _ELEMENT_WISE:
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


def difference_on_shards(optimizer: torch.optim.Optimizer) -> float | None:
    """Take two steps on a matrix for each group, whole and in three shards of rows. The optimizer itself stays as it is.

    Return the largest difference between the two, as a part of the largest update; NaN where nothing was updated, None where the whole
    gives another result when it is repeated, in the parameters' own dtype. An element-wise optimizer gives the same but for rounding. One
    that takes norms, factors or products of a whole parameter does not.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(1, _ROWS + 1).unsqueeze(1)  # so that no two shards have one norm
    before = [torch.randn(_ROWS, _COLUMNS, generator=generator) for _ in optimizer.param_groups]
    gradients = [[rows * torch.randn(_ROWS, _COLUMNS, generator=generator) for _ in before] for _ in range(_STEPS)]
    own = torch.float32 if hasattr(optimizer, "bf16_stochastic_round") else _first_parameter(optimizer).dtype
    before_own, gradients_own = [matrix.to(own) for matrix in before], [[gradient.to(own) for gradient in step] for step in gradients]
    once, again = (_after_steps(optimizer, before_own, gradients_own, 1) for _ in range(2))
    if not all(torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True) for one, other in zip(once, again, strict=True)):
        return None
    whole, parts = (_after_steps(optimizer, before, gradients, shards) for shards in (1, _SHARDS))
    update = max(float((after - start).abs().max()) for after, start in zip(whole, before, strict=True))
    difference = max(float((one - other).abs().max()) for one, other in zip(whole, parts, strict=True))
    return difference / update if update else float("nan")


def _first_parameter(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return next(parameter for group in optimizer.param_groups for parameter in group["params"])


def _after_steps(
    optimizer: torch.optim.Optimizer, before: Sequence[torch.Tensor], gradients: Sequence[Sequence[torch.Tensor]], shards: int
) -> list[torch.Tensor]:
    device = _first_parameter(optimizer).device
    device = torch.device("cpu") if device.type == "meta" else device
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


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return each parameter's first name; take it before the model is sharded, for `rebind_parameters`."""
    return {parameter: canonical_name(name) for name, parameter in model.named_parameters()}


def release_parameters(optimizer: torch.optim.Optimizer, old_names: Mapping[nn.Parameter, str]) -> None:
    """Put names in the place of parameters, so that the optimizer does not keep the unsharded model alive meanwhile.

    Until `rebind_parameters` it cannot be used. One that has state, or a parameter that the model does not have, is refused unchanged.
    """
    inner = unwrapped(optimizer)
    # Adagrad makes its state when it is made; `rebind_parameters` makes it again.
    new_adagrad = type(inner) is torch.optim.Adagrad and not any(state["step"] for state in inner.state.values())
    if optimizer.state and not new_adagrad:
        raise OSDPError(
            f"{type(inner).__name__} has state from before the model was sharded: it has taken steps, or makes state when it is made;"
            " make it from the sharded model's parameters, or give a new AdamW, Adam, SGD or RMSprop."
        )
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if strange := [p for p in held if not isinstance(p, str) and p not in old_names]:
        raise OSDPError(
            f"The optimizer holds a parameter of shape {tuple(strange[0].shape)} that the model does not have; make it from"
            " model.parameters(), and where a loss has parameters of its own, make it a module of the model."
        )
    inner.state.clear()
    for group in optimizer.param_groups:
        group["params"] = [p if isinstance(p, str) else old_names[p] for p in group["params"]]


def rebind_parameters(optimizer: torch.optim.Optimizer, old_names: Mapping[nn.Parameter, str], model: nn.Module) -> None:
    """Point an optimizer, without state, at the sharded parameters, found by `old_names`. Groups and hyperparameters stay.

    A parameter that is split is replaced by all its slices. Optimizers are refused as by `release_parameters`.
    """
    release_parameters(optimizer, old_names)
    new = {canonical_name(name): [parameter] for name, parameter in model.named_parameters(remove_duplicate=False)}
    new |= {name: [new[part][0] for part in whole.parts] for name, whole in split_names(model).items()}
    if missing := [name for group in optimizer.param_groups for name in group["params"] if name not in new]:
        raise OSDPError(f"The sharded model has no parameter {missing[0]!r} ({len(missing)} missing), which the optimizer updates.")
    for group in optimizer.param_groups:
        group["params"] = [parameter for name in group["params"] for parameter in new[name]]
    inner = unwrapped(optimizer)  # Accelerate's wrapper has no hooks
    if type(inner) is torch.optim.Adagrad:
        inner.state = torch.optim.Adagrad([dict(group) for group in inner.param_groups], **inner.defaults).state
    step_on_shards(inner, model)


def step_on_shards(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Let an optimizer of a model that a plan was applied to step by device, and keep the positions of what is split."""
    inner = unwrapped(optimizer)
    check_optimizer(inner, _apart(model))
    step_by_device(inner, host_parameters(model))
    if split_names(model):
        keep_positions(inner, model)


def _apart(model: nn.Module) -> list[nn.Parameter]:
    """Return parameters that are on the host, or slices of one that is split."""
    named = {canonical_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    return host_parameters(model) + [named[part] for whole in split_names(model).values() for part in whole.parts]


def step_by_device(optimizer: torch.optim.Optimizer, host: Iterable[nn.Parameter] = ()) -> None:
    """Have an optimizer step the parameters of each device, and plain ones and shards, by themselves.

    torch's foreach and fused kernels fail where plain tensors and DTensors share a group, and by default an optimizer gives up its
    foreach kernels for a whole group where one parameter lies on the CPU. While the optimizer steps, each of its groups is replaced
    by one group for each kind. Before and after it is as it was made, so that schedulers, checkpoints and the user see the same
    groups under every plan. On the `host` Adam and AdamW step with fused kernels. A second call replaces the first.

    An optimizer that is not torch's own steps the local shards, as plain tensors, and its states are plain tensors of their shapes: other
    packages' kernels do not know DTensors (torchao's, compiled for the shard of one rank, fail on another's where rows are uneven).
    """
    if (before := _stepper(optimizer)) is not None:
        before.remove()
    _StepByDevice(optimizer, host)


def prepare_new_optimizers(model: nn.Module, bind: Callable[[nn.Module, torch.optim.Optimizer], object]) -> None:
    """Prepare every optimizer of this model when it first steps, and `bind` it: in a plain loop no call tells of them.

    Among several ranks it is checked (`check_optimizer`); where parameters lie on two devices or have no dimensions, it steps by device.
    """
    host, apart, of = host_parameters(model), _apart(model), weakref.ref(model)
    mixed = bool(host) or any(not parameter.dim() for parameter in model.parameters())
    ids = {id(parameter) for parameter in model.parameters()}
    prepared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def prepare(optimizer: torch.optim.Optimizer) -> None:
        if optimizer in prepared or not any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            return
        if world_size() > 1 or apart:
            check_optimizer(optimizer, apart)
        if (mixed or steps_shards(optimizer)) and _stepper(optimizer) is None:
            step_by_device(optimizer, host)
        if (owner := of()) is not None:
            bind(owner, optimizer)
        prepared.add(optimizer)

    weakref.finalize(model, before_step.add(prepare))


class _StepByDevice:
    def __init__(self, optimizer: torch.optim.Optimizer, host: Iterable[nn.Parameter]) -> None:
        self._host = {id(parameter) for parameter in host}
        self._whole: list[dict[str, Any]] | None = None
        self._parts: list[list[dict[str, Any]]] = []
        self._on_shards = steps_shards(optimizer)
        self._stand_ins: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._without_modes = ExitStack()
        self._handles = [optimizer.register_step_pre_hook(self.begin), optimizer.register_step_post_hook(self.end)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self.end(optimizer, args, kwargs)  # a step that raised left its parts behind
        self._whole = optimizer.param_groups
        self._parts = [self._split(optimizer, group) for group in self._whole]
        optimizer.param_groups = [part for parts in self._parts for part in parts]
        for parameter, shard in self._stand_ins:
            if parameter in optimizer.state:
                optimizer.state[shard] = optimizer.state.pop(parameter)
        if self._on_shards:  # torch.compile, which other packages step with, refuses to run where calls are being counted
            self._without_modes.enter_context(_disable_current_modes())

    def end(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self._whole is None:
            return
        self._without_modes.close()
        for group, parts in zip(self._whole, self._parts, strict=True):
            if parts[0] is not group:  # some optimizers count in their groups
                group.update({key: value for key, value in parts[0].items() if key not in {"params", *_KERNELS}})
        for parameter, shard in self._stand_ins:
            if shard in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(shard)
        optimizer.param_groups, self._whole, self._parts, self._stand_ins = self._whole, None, [], []

    def _split(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the group itself where all of it is of one kind on the device, else one group for each kind."""
        kinds: dict[tuple[torch.device, bool, bool], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            on_host = id(parameter) in self._host
            if self._on_shards and isinstance(parameter, DTensor):
                parameter = self._stand_in(parameter)
            kinds.setdefault((local(parameter).device, isinstance(parameter, DTensor), on_host), []).append(parameter)
        fuses = type(optimizer) in _FUSED_ON_HOST and not group["differentiable"]
        if len(kinds) < 2 and not (fuses and any(on_host for _, _, on_host in kinds)) and not self._stand_ins:
            return [group]
        parts = []
        for (_, _, on_host), parameters in kinds.items():
            kernels = {}
            if on_host and fuses:
                kernels = {"foreach": False, "fused": True}
                for state in (optimizer.state[parameter] for parameter in parameters if parameter in optimizer.state):
                    if isinstance(state.get("step"), torch.Tensor):  # fused kernels want it here, and a checkpoint may have had it there
                        state["step"] = state["step"].cpu()
            parts.append({**group, **kernels, "params": parameters})
        return parts

    def _stand_in(self, parameter: Any) -> nn.Parameter:  # noqa: ANN401  (a parameter that is a DTensor)
        """Return a plain parameter with the memory of this rank's shard and its gradient."""
        shard = nn.Parameter(local(parameter).detach())
        shard.grad = None if parameter.grad is None else local(parameter.grad)
        self._stand_ins.append((parameter, shard))
        return shard


def step_parts(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Take the step of some of an optimizer's parameters, with the groups' options as they are now; its hooks do not run."""
    whole, chosen = optimizer.param_groups, {id(parameter) for parameter in parameters}
    stepper = _stepper(optimizer)
    parts = [{**group, "params": [p for p in group["params"] if id(p) in chosen]} for group in whole]
    optimizer.param_groups = [part for part in parts if part["params"]]
    try:
        if stepper is not None:
            stepper.begin(optimizer, (), {})
        type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]  # what torch has wrapped with hooks
    finally:
        if stepper is not None:
            stepper.end(optimizer, (), {})
        optimizer.param_groups = whole


def steps_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer steps local shards as plain tensors, and holds its states so: all but torch's element-wise ones."""
    return type(unwrapped(optimizer)) not in _ELEMENT_WISE


def _stepper(optimizer: torch.optim.Optimizer) -> _StepByDevice | None:
    owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, _StepByDevice)), None)


def spec_of_optimizer(optimizer: torch.optim.Optimizer | None, *, device_type: str) -> OptimizerSpec:
    """Return what an optimizer will hold, plain or wrapped by Accelerate; None stands for AdamW's defaults.

    What torch's and torchao's hold is known; another one takes a step on a matrix of its own, and what it has kept is counted.
    """
    if optimizer is None:
        return spec_of_trainer_name("adamw_torch", device_type=device_type)
    optimizer = unwrapped(optimizer)
    cls, options = type(optimizer), optimizer.defaults
    name = cls.__name__.lower()
    if spec := low_bit_spec(optimizer):
        return spec
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
    """Return what several optimizers of one model hold at most, as if the one that holds most had all parameters."""
    specs = [spec_of_optimizer(optimizer, device_type=device_type) for optimizer in optimizers]
    return replace(max(specs, key=OptimizerSpec.traffic_per_element), needs_whole=any(spec.needs_whole for spec in specs))


def _counted_spec(optimizer: torch.optim.Optimizer, device_type: str) -> OptimizerSpec:
    """Return what an optimizer keeps for one matrix of float32 after a step; ValueError for what has neither its shape nor is factored.

    Of one that needs whole parameters the temporaries are counted as well.
    """
    whole, (kept, _) = needs_whole(optimizer), _after_step(optimizer, _ROWS, _COLUMNS)
    shapes = [tuple(value.shape) if type(value) is torch.Tensor else type(value) for value in kept]
    rows, columns = (sum(shape in given for shape in shapes) for given in (((_ROWS,), (_ROWS, 1)), ((_COLUMNS,), (1, _COLUMNS))))
    full = [value for value, shape in zip(kept, shapes, strict=True) if shape == (_ROWS, _COLUMNS)]
    if rows != columns or len(full) + rows + columns < len(kept):
        raise ValueError(f"it keeps {', '.join(map(str, shapes))} for a matrix of shape {(_ROWS, _COLUMNS)}")
    formats = [StateFormat(bytes_per_element=v.itemsize, is_least=bool(rows)) for v in full if rows or v.dtype != torch.float32]
    foreach = optimizer.defaults.get("foreach")
    loops = "foreach" not in optimizer.defaults or (whole and not foreach)
    return OptimizerSpec(
        name=type(optimizer).__name__.lower(),
        states=len(full) - len(formats),
        formats=(*formats, *ADAFACTOR.formats * rows),
        step=OptimizerStep.FOR_LOOP if loops else _step(optimizer.defaults.get("fused"), foreach, device_type),
        needs_whole=whole,
        loop_scratch=_after_step(optimizer, _ROWS, _ROWS)[1] if whole else OptimizerSpec().loop_scratch,
    )


def _after_step(optimizer: torch.optim.Optimizer, *shape: int) -> tuple[list[Any], float]:
    """Return what is kept for a matrix after two steps, of the group that keeps most, and a step's temporaries in tensors of its size."""
    matrices = [torch.nn.Parameter(torch.ones(shape)) for _ in optimizer.param_groups]
    trial, tracker = _trial(optimizer, [[matrix] for matrix in matrices]), MemoryTracker(block_bytes=1)
    with torch.compiler.set_stance("force_eager"):  # compiled code does not run where it is tracked
        for counted in (nullcontext(), tracker):
            for matrix in matrices:
                matrix.grad = torch.ones_like(matrix)
            with counted:
                type(trial).step(trial)
    states = [[v for v in trial.state[m].values() if not isinstance(v, (int, float, str, type(None)))] for m in matrices]
    kept = [[v for v in values if not isinstance(v, torch.Tensor) or v.numel() > 1] for values in states]
    return max(kept, key=lambda values: sum(getattr(value, "nbytes", 0) for value in values)), tracker.peak_bytes / matrices[0].nbytes


def knows_trainer_name(name: str) -> bool:
    """Return whether the name alone tells what an optimizer holds, or that it is refused."""
    return name in _TRAINER_SPECS or reason_against(name) is not None


def spec_of_trainer_name(name: str, *, device_type: str) -> OptimizerSpec:
    """Return what the optimizer that `TrainingArguments(optim=...)` names will hold; ValueError for one that is not known by its name."""
    if name not in _TRAINER_SPECS:
        reason = reason_against(name) or f"is not known to work under a plan; use one of {', '.join(_TRAINER_SPECS)}"
        raise ValueError(f"optim={name!r} {reason}.")
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
