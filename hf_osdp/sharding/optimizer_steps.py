"""Optimizers on a sharded model: rebind them to its shards, and step them by device, on local shards as plain
tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from ..distributed.mesh import world_size
from ..errors import OSDPError
from ..modeling.split.names import keep_positions, whole_parameters
from ..modeling.step_hooks import before_step
from ..modeling.units import canonical_name, named_parameters
from ..planner.description import UnitDescription
from ..planner.placement import STATE_OPTIONS
from ..planner.plan import Plan
from .gradients import local, shard_size
from .host import HostStates, host_kernels, host_parameters
from .optimizer import check_optimizer
from .optimizers import kind_of, unwrapped
from .optimizers.kind import Kind

_KERNELS = {"foreach", "fused"}
Stage = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]]
"""Begins before an optimizer's own step, with the step's arguments, and ends after it."""


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return each parameter's first name; take it before the model is sharded, for `rebind_parameters`."""
    return {parameter: canonical_name(name) for name, parameter in model.named_parameters()}


def release_parameters(optimizer: torch.optim.Optimizer, old_names: Mapping[nn.Parameter, str]) -> None:
    """Replace an optimizer's parameters by their names, so that it does not keep the unsharded model alive.

    It cannot be used until `rebind_parameters`. Refuse, unchanged, an optimizer with state or with parameters of
    another model.
    """
    inner = unwrapped(optimizer)
    # Adagrad creates its state in its constructor; `rebind_parameters` creates it again.
    new_adagrad = type(inner) is torch.optim.Adagrad and not any(state["step"] for state in inner.state.values())
    if optimizer.state and not new_adagrad:
        raise OSDPError(
            f"{type(inner).__name__} has state from before the model was sharded: it has taken steps, or its"
            " constructor makes state;"
            " make it from the sharded model's parameters, or use a new AdamW, Adam, SGD or RMSprop."
        )
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if unknown := [p for p in held if not isinstance(p, str) and p not in old_names]:
        raise OSDPError(
            f"The optimizer holds a parameter of shape {tuple(unknown[0].shape)} that the model does not have; make it"
            " from"
            " model.parameters(), and if the loss has parameters, make it a module of the model."
        )
    inner.state.clear()
    for group in optimizer.param_groups:
        group["params"] = [p if isinstance(p, str) else old_names[p] for p in group["params"]]


def rebind_parameters(
    optimizer: torch.optim.Optimizer, old_names: Mapping[nn.Parameter, str], model: nn.Module
) -> None:
    """Replace the parameters of an optimizer without state by the sharded ones, found by `old_names`. Groups and
    hyperparameters stay.

    A sliced parameter is replaced by all its slices. Refuse the same optimizers as `release_parameters`.
    """
    release_parameters(optimizer, old_names)
    named = named_parameters(model)
    new = {name: [parameter] for name, parameter in named.items()}
    new |= {name: [named[part] for part in whole.parts] for name, whole in whole_parameters(model).items()}
    if missing := [name for group in optimizer.param_groups for name in group["params"] if name not in new]:
        raise OSDPError(
            f"The sharded model has no parameter {missing[0]!r} ({len(missing)} missing), which the optimizer updates."
        )
    for group in optimizer.param_groups:
        group["params"] = [parameter for name in group["params"] for parameter in new[name]]
    inner = unwrapped(optimizer)  # Accelerate's wrapper has no hooks
    if type(inner) is torch.optim.Adagrad:
        inner.state = torch.optim.Adagrad([dict(group) for group in inner.param_groups], **inner.defaults).state
    step_on_shards(inner, model)


def step_on_shards(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Let the optimizer of a model under a plan step by device, and keep the positions of sliced parameters in its
    state dict.
    """
    inner = unwrapped(optimizer)
    check_optimizer(inner, _parts_or_on_host(model))
    step_by_device(inner, host_parameters(model))
    if whole_parameters(model):
        keep_positions(inner, model)


def _parts_or_on_host(model: nn.Module) -> list[nn.Parameter]:
    """Return parameters that are on the host, or slices of a whole parameter."""
    named = named_parameters(model)
    return host_parameters(model) + [named[part] for whole in whole_parameters(model).values() for part in whole.parts]


def step_by_device(optimizer: torch.optim.Optimizer, host: Iterable[nn.Parameter] = ()) -> None:
    """Make an optimizer step the parameters of each device separately, and plain tensors separately from shards.

    torch's foreach and fused kernels fail if plain tensors and DTensors share a group, and by default an optimizer
    does not use foreach kernels for a group with a parameter on the CPU. During the step, each group is replaced by
    one group for each kind; before and after, the groups are the original ones, so that schedulers, checkpoints and
    the user see the same groups under every plan. Adam and AdamW step parameters on the `host` with fused kernels. A
    second call replaces the first.

    An optimizer that is not torch's own steps the local shards as plain tensors, and its states are plain tensors of
    their shapes: other packages' kernels do not support DTensors (some, compiled for one rank's shard, fail on
    another's if rows are uneven). Shards whose update needs a gather are stepped after the others
    (`Kind.step_gathered`). Hooks that are registered later run before ours.
    """
    interceptor_of(optimizer).host = {id(parameter) for parameter in host}


def reason_against_unit_steps(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why an optimizer cannot step unit by unit; None if it can, which needs all its state to be kept for
    each parameter.
    """
    if f"{type(unwrapped(optimizer)).__module__}.".startswith(kind_of(optimizer).packages):
        return None
    return f"{type(unwrapped(optimizer)).__name__} may keep state that all its parameters share"


def bind_optimizer(
    model: nn.Module, plan: Plan, units: Sequence[UnitDescription], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Make the optimizer of a model under the plan step units as the plan says; a second call changes nothing.

    Raises:
        OSDPError: the plan steps units one by one, but there are several optimizers, or one that cannot step a part of
            its parameters.
    """
    alone = [unit for unit in units if plan.decision(unit.fqn).steps_alone]
    if not optimizers or not alone:
        return
    problem = "there are several optimizers" if len(optimizers) > 1 else reason_against_unit_steps(optimizers[0])
    if problem is not None:
        raise OSDPError(f"The plan steps units one by one, but {problem}; set {STATE_OPTIONS[1]}=False.")
    stages = interceptor_of(unwrapped(optimizers[0])).stages
    named = named_parameters(model)
    if not stages:
        stages.append(HostStates([[named[p.name] for p in unit.trainable] for unit in alone], step_parts))


def prepare_new_optimizers(model: nn.Module, bind: Callable[[nn.Module, torch.optim.Optimizer], object]) -> None:
    """Prepare and `bind` every optimizer of this model at its first step, because a plain loop does not pass us its
    optimizers.

    With several ranks, check it by `check_optimizer`.
    """
    host, partial, of = host_parameters(model), _parts_or_on_host(model), weakref.ref(model)
    ids = {id(parameter) for parameter in model.parameters()}
    prepared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def prepare(optimizer: torch.optim.Optimizer) -> None:
        if optimizer in prepared or not any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            return
        if world_size() > 1 or partial:
            check_optimizer(optimizer, partial)
        else:
            kind_of(optimizer).known()  # refuses options that no step supports
        step_by_device(optimizer, host)
        if (owner := of()) is not None:
            bind(owner, optimizer)
        prepared.add(optimizer)

    weakref.finalize(model, before_step.add(prepare))


class _Interceptor:
    """What runs around each step of an optimizer: its stages, in order, inside of the hooks of users."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.stages: list[Stage] = []
        """They run around `by_device`."""
        self.host: set[int] = set()
        """`id`s of parameters on the host."""
        self._entered = ExitStack()
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._entered.__exit__(OSDPError, OSDPError(), None)  # restore, if an earlier step raised before its end
        if self.stages:
            refuse_closure(optimizer, args, kwargs)
        for stage in (*self.stages, self.by_device):
            self._entered.enter_context(stage(optimizer, args, kwargs))

    def _after(self, *unused: object) -> None:
        self._entered.close()

    @contextmanager
    def by_device(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        """Step groups of one kind of parameters; then restore the optimizer's own groups and states."""
        whole, kind = optimizer.param_groups, kind_of(optimizer)
        stand_ins: list[tuple[Any, nn.Parameter]] = []
        gathered: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        parts = [self._split(kind, group, stand_ins, gathered) for group in whole]
        if stand_ins or gathered:
            refuse_closure(optimizer, args, kwargs)
        # other packages step with torch.compile, which refuses to run under a dispatch mode such as a FLOP counter
        compiles = kind.steps_shards and not type(optimizer).__module__.startswith(("torch.", "hf_osdp."))
        try:
            optimizer.param_groups = [part for split in parts for part in split]
            with _states_of(optimizer, stand_ins), _disable_current_modes() if compiles else nullcontext():
                kind.before_step(whole)
                yield
            for group, parameters in gathered:
                kind.step_gathered(group, parameters)
        finally:
            for group, split in zip(whole, parts, strict=True):
                if split[0] is not group:  # some optimizers keep counters in their groups
                    group.update({key: value for key, value in split[0].items() if key not in {"params", *_KERNELS}})
            optimizer.param_groups = whole

    def _split(
        self,
        kind: Kind,
        group: dict[str, Any],
        stand_ins: list[tuple[Any, nn.Parameter]],
        gathered: list[tuple[dict[str, Any], list[nn.Parameter]]],
    ) -> list[dict[str, Any]]:
        """Return the group itself if all its parameters are of one kind on the device, else one group for each kind.

        Append parameters that are stepped as plain tensors to `stand_ins`, with these, and those that are gathered and
        stepped after the optimizer's own step to `gathered`, with their group.
        """
        by_place: dict[tuple[torch.device, bool, bool], list[nn.Parameter]] = {}
        optimizer = kind.optimizer
        shared = [p for p in group["params"] if kind.gathers and shard_size(p) > 1]
        given = [p for p in group["params"] if not (kind.gathers and shard_size(p) > 1)]
        if shared:
            gathered.append((group, shared))
        for parameter in given:
            on_host = id(parameter) in self.host
            if kind.steps_shards and isinstance(parameter, DTensor):
                stand_ins.append((parameter, _stand_in(parameter)))
                parameter = stand_ins[-1][1]
            by_place.setdefault((local(parameter).device, isinstance(parameter, DTensor), on_host), []).append(
                parameter
            )
        kernels = [host_kernels(optimizer, group, own) if place[-1] else {} for place, own in by_place.items()]
        if len(by_place) < 2 and not shared and not stand_ins and not any(kernels):
            return [group]
        parts = [{**group, **k, "params": own} for k, own in zip(kernels, by_place.values(), strict=True)]
        return parts or [{**group, "params": []}]


def _stand_in(parameter: Any) -> nn.Parameter:  # noqa: ANN401  (a parameter that is a DTensor)
    """Return a plain parameter with the memory of this rank's shard and its gradient."""
    shard = nn.Parameter(local(parameter).detach())
    shard.whole = parameter  # type: ignore[attr-defined]  # for optimizers that decide by the whole size
    shard.grad = None if parameter.grad is None else local(parameter.grad)
    return shard


@contextmanager
def _states_of(optimizer: torch.optim.Optimizer, stand_ins: Sequence[tuple[Any, nn.Parameter]]) -> Iterator[None]:
    """Give the states of sharded parameters to their stand-ins, and take them and the results back."""
    for parameter, shard in stand_ins:
        if parameter in optimizer.state:
            optimizer.state[shard] = optimizer.state.pop(parameter)
    try:
        yield
        for parameter, shard in stand_ins:
            parameter.grad = None if shard.grad is None else parameter.grad
    finally:
        for parameter, shard in stand_ins:
            if shard in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(shard)
            memory = local(parameter).detach()
            if shard.data_ptr() != memory.data_ptr():  # the step has assigned `shard.data`
                memory.copy_(shard.detach())


def step_parts(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Step some of an intercepted optimizer's parameters, with the groups' current options, without hooks."""
    whole, chosen = optimizer.param_groups, {id(parameter) for parameter in parameters}
    parts = [{**group, "params": [p for p in group["params"] if id(p) in chosen]} for group in whole]
    optimizer.param_groups = [part for part in parts if part["params"]]
    try:
        with interceptor_of(optimizer).by_device(optimizer, (), {}):
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]  # the step without torch's hooks
    finally:
        optimizer.param_groups = whole


def refuse_closure(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a step with a closure, which computes gradients only after our hook before the step has used them."""
    if any(map(callable, (*args[1:], kwargs.get("closure")))):
        raise OSDPError(
            f"{type(optimizer).__name__}.step(closure) would step shards by gradients from before the closure; run"
            " forward and"
            " backward first, and call step() without a closure."
        )


def interceptor_of(optimizer: torch.optim.Optimizer) -> _Interceptor:
    """Return what runs around an optimizer's steps; make it if there is none."""
    before_step.add(_intercept_last)
    return next((owner for _, owner in _interceptors(optimizer)), None) or _Interceptor(optimizer)


def _intercept_last(optimizer: torch.optim.Optimizer) -> None:
    """Let users' hooks run first, so that they see the optimizer's own groups, and may change gradients."""
    hooks: Any = optimizer._optimizer_step_pre_hooks
    for key, _ in _interceptors(optimizer):
        hooks.move_to_end(key)


def _interceptors(optimizer: torch.optim.Optimizer) -> list[tuple[int, _Interceptor]]:
    owners = ((key, getattr(hook, "__self__", None)) for key, hook in optimizer._optimizer_step_pre_hooks.items())
    return [(key, owner) for key, owner in owners if isinstance(owner, _Interceptor)]
