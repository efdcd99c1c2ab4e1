"""An optimizer as the rest of the package sees it: what it holds, how it steps shards, its states in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from ...errors import OSDPError
from ...planner.optimizers import ADAFACTOR, TORCH_STATES, reason_against, step_of
from ...planner.training_job import OptimizerSpec, StateFormat
from ..gradients import local

ELEMENT_WISE = tuple(
    cls for name, cls in vars(torch.optim).items() if isinstance(cls, type) and name.lower() in TORCH_STATES
)
"""torch's optimizers that train on shards as on whole parameters; a subclass may do something else."""


class Kind:
    """An optimizer of which only what its author declares is known. Subclasses replace what differs."""

    packages: ClassVar[tuple[str, ...]] = ("torch.optim.", "transformers.")
    """Modules whose optimizers keep all state for each parameter, so that these can be stepped one by one."""
    has_plain_states: ClassVar[bool] = True
    """Whether its states of shards are plain tensors, as its step makes them, and not DTensors."""
    gathers: ClassVar[bool] = False
    """Whether sharded parameters are left out of the optimizer's own step, and stepped by `step_gathered`."""
    lr_is_tensor: ClassVar[bool] = False
    """Whether its step accepts only a tensor as learning rate; checkpoints have a number, as for AdamW."""

    def __init__(self, optimizer: Any) -> None:  # noqa: ANN401  (its package may not be installed)
        self.optimizer = optimizer

    @classmethod
    def includes(cls, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer is of this kind."""
        return any(f"{base.__module__}.".startswith(cls.packages) for base in type(optimizer).__mro__)

    @property
    def name(self) -> str:
        """Name in checkpoints."""
        return type(self.optimizer).__name__

    def known(self, device_type: str = "cuda") -> OptimizerSpec | None:
        """Return what it holds, and whether it needs whole parameters: as its attribute `osdp_spec` declares it; None
        if that is not known.

        Raises:
            OSDPError: with its options it would not even train in one process as without a plan.
        """
        return getattr(self.optimizer, "osdp_spec", None)

    def needs_whole(self) -> bool:
        """Return whether it is correct only on whole parameters; raise OSDPError if that is not known."""
        return self.spec().needs_whole

    def spec(self, device_type: str = "cuda") -> OptimizerSpec:
        """Return what it holds; raise OSDPError if it is not known, or cannot run under a plan."""
        if (known := self.known(device_type)) is not None:
            return known
        name, paged = type(self.optimizer).__name__, ["paged"] * getattr(self.optimizer, "is_paged", False)
        reason = reason_against(*paged, *(cls.__name__ for cls in type(self.optimizer).__mro__))
        raise OSDPError(
            f"{name} {reason}." if reason
            else f"{name} is not known; declare the state tensors that it keeps, {name}.osdp_spec ="
            " hf_osdp.OptimizerSpec(states=...), with needs_whole=True unless it updates each element alone."
        )  # fmt: skip

    def before_step(self, groups: list[dict[str, Any]]) -> None:
        """Prepare a step on plain shards, each with its parameter as `whole`; `groups` are the groups of the user."""

    def step_gathered(self, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> None:
        """Step sharded parameters of a group. Collective."""

    def saved_states(self, parameter: nn.Parameter, shown: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter's states, `shown` by the optimizer's state dict, for a checkpoint: those of each element
        in the shard's shape and not quantized, so that any plan, any number of ranks and AdamW can load them.
        """
        return shown

    def load_states(self, parameter: nn.Parameter, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter's saved states as the optimizer holds them; the present ones may be overwritten."""
        return {key: local(value) if torch.is_tensor(value) else value for key, value in saved.items()}


class ElementWise(Kind):
    """torch's element-wise optimizers, whose states are DTensors as without a plan."""

    has_plain_states = False

    @classmethod
    def includes(cls, optimizer: torch.optim.Optimizer) -> bool:
        return type(optimizer) in ELEMENT_WISE

    def known(self, device_type: str = "cuda") -> OptimizerSpec:
        name, options = self.name.lower(), self.optimizer.defaults
        more = sum(bool(options.get(option)) for option in ("amsgrad", "momentum", "centered"))
        step = step_of(options.get("fused"), options.get("foreach"), device_type)
        return OptimizerSpec(name=name, states=TORCH_STATES[name] + more, step=step)


class Adafactor(Kind):
    """torch's Adafactor and that of transformers, which also has a first moment with `beta1`."""

    @classmethod
    def includes(cls, optimizer: torch.optim.Optimizer) -> bool:
        kind = type(optimizer)
        return kind.__name__ == "Adafactor" and f"{kind.__module__}.".startswith(cls.packages)

    def known(self, device_type: str = "cuda") -> OptimizerSpec:
        moments = (StateFormat(bytes_per_element=4, is_least=True),)
        has_moment = self.optimizer.defaults.get("beta1") is not None
        return replace(ADAFACTOR, formats=(*moments * has_moment, *ADAFACTOR.formats))
