"""Optimizers on a sharded model: rebind them to its shards, and step them by device, on local shards as plain
tensors.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from ..distributed.mesh import world_size
from ..errors import OSDPError
from ..modeling.split.names import whole_parameters
from ..modeling.step_hooks import before_step
from ..modeling.units import canonical_name, named_parameters
from ..planner.description import UnitDescription
from ..planner.placement import STATE_OPTIONS
from ..planner.plan import Plan
from .gradients import local, shard_size
from .host import HostStates, host_kernels, host_parameters
from .optimizer import check_optimizer
from .optimizers import bare_optimizer, kind_of

_KERNELS = {"foreach", "fused"}
_STEP = "_step_on_shards"
"""Attribute of what takes a step."""
_Group: TypeAlias = dict[str, Any]
Stage: TypeAlias = Callable[[torch.optim.Optimizer], Iterable[nn.Parameter]]
"""Steps some parameters before an optimizer's own step, and returns them."""


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return each parameter's first name; take it before the model is sharded, for `rebind_parameters`."""
    return {parameter: canonical_name(name) for name, parameter in model.named_parameters()}


def release_parameters(optimizer: torch.optim.Optimizer, old_names: Mapping[nn.Parameter, str]) -> None:
    """Replace an optimizer's parameters by their names, so that it does not keep the unsharded model alive.

    It cannot be used until `rebind_parameters`. Refuse, unchanged, an optimizer with state or with parameters of
    another model.
    """
    inner = bare_optimizer(optimizer)
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
    inner = bare_optimizer(optimizer)  # Accelerate's wrapper has no hooks
    if type(inner) is torch.optim.Adagrad:
        inner.state = torch.optim.Adagrad([dict(group) for group in inner.param_groups], **inner.defaults).state
    step_on_shards(inner, model)


def step_on_shards(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Let the optimizer of a model under a plan step by device."""
    inner = bare_optimizer(optimizer)
    check_optimizer(inner, _parts_or_on_host(model))
    step_by_device(inner, host_parameters(model))


def _parts_or_on_host(model: nn.Module) -> list[nn.Parameter]:
    """Return parameters that are on the host, or slices of a whole parameter."""
    named = named_parameters(model)
    return host_parameters(model) + [named[part] for whole in whole_parameters(model).values() for part in whole.parts]


def step_by_device(optimizer: torch.optim.Optimizer, host: Iterable[nn.Parameter] = ()) -> None:
    """Make an optimizer step the parameters of each device separately, and local shards as plain tensors.

    torch's foreach and fused kernels fail if plain tensors and DTensors share a group, they take the host several
    times as long on DTensors, and by default an optimizer does not use foreach kernels for a group with a parameter on
    the CPU. Adam and AdamW step parameters on the `host` with fused kernels. Schedulers, checkpoints and users see the
    optimizer's own groups, and states as torch makes them, under every plan. A second call replaces the first.

    States of other optimizers are plain tensors of their shards' shapes: other packages' kernels do not support
    DTensors (some, compiled for one rank's shard, fail on another's if rows are uneven). Shards whose update needs a
    gather are stepped after the others (`Kind.step_gathered`). Hooks that are registered later run before ours.
    """
    interceptor_of(optimizer).host = {id(parameter) for parameter in host}


def reason_against_unit_steps(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why an optimizer cannot step unit by unit; None if it can, which needs all its state to be kept for
    each parameter.
    """
    if f"{type(bare_optimizer(optimizer)).__module__}.".startswith(kind_of(optimizer).packages):
        return None
    return f"{type(bare_optimizer(optimizer)).__name__} may keep state that all its parameters share"


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
    stages = interceptor_of(bare_optimizer(optimizers[0])).stages
    named = named_parameters(model)
    if not stages:
        stages.append(HostStates([[named[p.name] for p in unit.trainable] for unit in alone], step_parts))


def prepare_new_optimizers(model: nn.Module, bind: Callable[[nn.Module, torch.optim.Optimizer], object]) -> None:
    """Prepare and `bind` every optimizer of this model at its first step, because a plain loop does not pass us its
    optimizers.

    With several ranks, check it by `check_optimizer`.
    """
    of, ids = weakref.ref(model), {id(parameter) for parameter in model.parameters()}
    prepared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def prepare(optimizer: torch.optim.Optimizer) -> None:
        owner, given = of(), (p for group in optimizer.param_groups for p in group["params"])
        if owner is None or optimizer in prepared or not any(id(p) in ids for p in given):
            return
        if world_size() > 1 or _parts_or_on_host(owner):
            step_on_shards(optimizer, owner)
        else:
            kind_of(optimizer).known()  # refuses options that no step supports
            step_by_device(optimizer)
        bind(owner, optimizer)
        prepared.add(optimizer)

    weakref.finalize(model, before_step.add(prepare))


class _Interceptor:
    """What runs around each step of an optimizer, inside of the hooks of users."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.stages: list[Stage] = []
        self.host: set[int] = set()
        """`id`s of parameters on the host."""
        self._entered = ExitStack()
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let a stand-in take the step: torch passes on the arguments that a hook returns, of which `self` is one."""
        self._entered.close()  # an earlier step may have raised before its end
        has_closure = any(map(callable, (*args[1:], kwargs.get("closure"))))
        if self.stages and has_closure:
            raise _refused_closure(optimizer)
        stepped = {id(parameter) for stage in self.stages for parameter in stage(optimizer)}
        rest = [(group, [p for p in group["params"] if id(p) not in stepped]) for group in optimizer.param_groups]
        step = _Step(optimizer, rest, self.host, has_closure=has_closure)
        self._entered.enter_context(step.without_modes())
        return (step.stand_in(), *args[1:]), kwargs

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._entered.close()
        vars(args[0])[_STEP].end(args[0])


class _Step:
    """A step of an optimizer that a stand-in of its class takes.

    The stand-in has the optimizer's attributes, but a group for each kind of parameters of each group, and local
    shards as plain tensors in the place of DTensors, in groups and states. The optimizer keeps its groups and states
    meanwhile, and after a step that raises. Nothing is kept for the next step, so that nothing can be out of date.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[tuple[_Group, list[nn.Parameter]]],
        host: set[int],
        *,
        has_closure: bool = False,
    ) -> None:
        """Prepare a step of some parameters of each group; those with an `id` in `host` are on the host."""
        self._optimizer, self._kind, self._has_closure = optimizer, kind_of(optimizer), has_closure
        others = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        self._state: defaultdict[Any, Any] = defaultdict(dict, others)
        self._shards: list[tuple[Any, torch.Tensor]] = []
        """Parameters that are stepped as plain tensors, with these."""
        self._gathered: list[tuple[_Group, list[nn.Parameter]]] = []
        """Parameters that are stepped after the optimizer's own step."""
        self._parts = [(group, self._split(group, parameters, host)) for group, parameters in groups]
        self._before = self._values()
        if has_closure and (self._gathered or (self._shards and self._kind.has_plain_states)):
            raise _refused_closure(optimizer)

    def without_modes(self) -> AbstractContextManager[None]:
        """Return a context without dispatch modes such as a FLOP counter for other packages, which may step with
        torch.compile, which refuses these.
        """
        foreign = not type(self._optimizer).__module__.startswith(("torch.", "hf_osdp."))
        return _disable_current_modes() if foreign else nullcontext()

    def stand_in(self) -> torch.optim.Optimizer:
        """Return the object that takes the step, which holds this one."""
        taker: torch.optim.Optimizer = object.__new__(type(self._optimizer))
        groups = [part for _, parts in self._parts for part in parts]
        vars(taker).update({**vars(self._optimizer), "state": self._state, "param_groups": groups, _STEP: self})
        kind_of(taker).before_step([group for group, _ in self._parts])
        return taker

    @torch.no_grad()
    def end(self, taker: torch.optim.Optimizer) -> None:
        """Take the results of the step, and step parameters that are gathered."""
        if self._kind.has_plain_states:
            self._take_plain()
        elif not _are_same(self._before, self._values()):
            for parameter, shard in self._shards:
                if shard in self._state:
                    _take_states(self._optimizer.state[parameter], self._state.pop(shard), parameter)
            self._optimizer.state.update(self._state)
        new = vars(taker).keys() - {"state", "param_groups", _STEP}
        vars(self._optimizer).update((name, vars(taker)[name]) for name in new)
        for group, (part, *_) in self._parts:  # some optimizers keep counters in their groups
            group.update((key, value) for key, value in part.items() if key not in {"params", *_KERNELS})
        for group, parameters in self._gathered:
            self._kind.step_gathered(group, parameters)

    def _take_plain(self) -> None:
        """Take states as they are; steps of other packages may have assigned `shard.grad` or `shard.data`."""
        for parameter, shard in self._shards:
            if shard in self._state:
                self._optimizer.state[parameter] = self._state.pop(shard)
            parameter.grad = None if shard.grad is None else parameter.grad
            memory = local(parameter).detach()
            if shard.data_ptr() != memory.data_ptr():
                memory.copy_(shard)
        self._optimizer.state.update(self._state)

    def _values(self) -> list[Any]:
        """Return all states of all parameters."""
        return [*chain.from_iterable(map(dict.values, self._state.values()))]

    def _split(self, group: _Group, parameters: list[nn.Parameter], host: set[int]) -> list[_Group]:
        """Return a group for each kind of parameters and each device."""
        if shared := [p for p in parameters if self._kind.gathers and shard_size(p) > 1]:
            self._gathered.append((group, shared))
            parameters = [p for p in parameters if shard_size(p) == 1]
        # a closure computes gradients of the parameters themselves, and so does backward of a differentiable step
        whole = not self._kind.has_plain_states and (self._has_closure or group["differentiable"])
        by_place: dict[tuple[torch.device, bool, bool], list[torch.Tensor]] = {}
        for parameter in parameters:
            tensor, states = parameter, self._optimizer.state.get(parameter)
            is_shard = isinstance(parameter, DTensor)
            if is_shard and not whole:
                tensor, states = self._as_local(parameter, states)
            if states is not None:
                self._state[tensor] = states
            place = local(tensor).device, is_shard and whole, id(parameter) in host
            by_place.setdefault(place, []).append(tensor)
        parts = []
        for (*_, on_host), tensors in by_place.items():
            held = [self._state[tensor] for tensor in tensors if on_host and tensor in self._state]
            kernels = host_kernels(self._optimizer, group, held) if on_host else {}
            parts.append({**group, **kernels, "params": tensors})
        return parts or [{**group, "params": []}]

    def _as_local(self, parameter: Any, states: dict[str, Any] | None) -> tuple[Any, dict[str, Any] | None]:  # noqa: ANN401
        """Return a plain tensor with the memory of this rank's shard and its gradient, and the states for it."""
        shard, gradient = parameter._local_tensor.detach(), parameter.grad
        if self._kind.has_plain_states:
            shard = nn.Parameter(shard)  # as other packages expect
            shard.whole = parameter  # type: ignore[attr-defined]  # for optimizers that decide by the whole size
        elif states is not None:
            states = {k: v._local_tensor if isinstance(v, DTensor) else v for k, v in states.items()}
            shape = shard.shape
            for key, value in states.items():
                if isinstance(value, torch.Tensor) and value.shape != shape and value.dim():
                    raise OSDPError(
                        f"The optimizer's {key} has shape {tuple(value.shape)} for a shard of shape"
                        f" {tuple(shape)}: it is from another layout; load states by hf_osdp's checkpoints."
                    )
        if gradient is not None:
            if isinstance(gradient, DTensor) and gradient._spec.placements != parameter._spec.placements:
                gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
            shard.grad = local(gradient)
        self._shards.append((parameter, shard))
        return shard, states


def _are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects."""
    return len(first) == len(second) and all(map(is_, first, second))


def _take_states(held: dict[str, Any], found: Mapping[str, Any], parameter: Any) -> None:  # noqa: ANN401
    """Update a parameter's states by what a step on its shard has made or replaced; those of its shard's shape become
    DTensors.
    """
    for key, value in found.items():
        if key in held and local(held[key]) is value:
            continue
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == local(parameter).shape:
            value = DTensor(value, parameter._spec, requires_grad=False)  # `from_local` would move it off the host
        held[key] = value
    for key in held.keys() - found.keys():
        del held[key]


def step_parts(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Step some of an intercepted optimizer's parameters, with the groups' current options, without hooks."""
    chosen = {id(parameter) for parameter in parameters}
    parts = [(group, [p for p in group["params"] if id(p) in chosen]) for group in optimizer.param_groups]
    step = _Step(optimizer, [part for part in parts if part[1]], interceptor_of(optimizer).host)
    with step.without_modes():
        taker = step.stand_in()
        type(optimizer).step.__wrapped__(taker)  # type: ignore[attr-defined]  # the step without torch's hooks
    step.end(taker)


def _refused_closure(optimizer: torch.optim.Optimizer) -> OSDPError:
    """Return the error of a step with a closure, which computes gradients only after shards have been taken."""
    return OSDPError(
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
