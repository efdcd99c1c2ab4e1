"""An optimizer as the rest of the package sees it: what it holds, how it steps shards, its states in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ...errors import OSDPError, first_line
from ...planner.optimizers import ADAFACTOR, ADVICE, NEEDS_WHOLE, TORCH_STATES, reason_against, step_of
from ...planner.training_job import OptimizerSpec, OptimizerStep, StateFormat
from ..gradients import local
from .trial import COLUMNS, ROWS, after_step, difference_on_shards

ELEMENT_WISE = tuple(
    cls for name, cls in vars(torch.optim).items() if isinstance(cls, type) and name.lower() in TORCH_STATES
)
"""torch's optimizers that train on shards as on whole parameters; a subclass may do something else."""
_MAX_DIFFERENCE = 1e-4
"""Fraction of an update: rounding in float32 causes less; a shard's norm instead of the whole parameter's causes
some percent.
"""


class Kind:
    """An optimizer of which nothing is known: trials on a matrix decide. Subclasses replace what differs."""

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
        """Return what it holds, if that is known, and its shards train as whole parameters do; None leaves both to
        trials.

        Raises:
            OSDPError: with its options it would not even train in one process as without a plan.
        """
        return None

    def needs_whole(self) -> bool:
        """Return whether it is correct only on whole parameters; raise OSDPError if it cannot run under a plan."""
        if self.known():
            return False
        self._refuse_by_name()
        try:
            difference = difference_on_shards(self.optimizer)
        except Exception as error:  # a user's optimizer may raise anything
            raise OSDPError(f"{self.name} cannot be tried on a matrix ({first_line(error)}); {ADVICE}.") from error
        if difference is None:
            raise OSDPError(f"{self.name} updates at random, so that replicas would drift apart; {ADVICE}.")
        named = any(part in cls.lower() for cls in self._class_names() for part in NEEDS_WHOLE)
        return named or not difference <= _MAX_DIFFERENCE

    def spec(self, device_type: str) -> OptimizerSpec:
        """Return what it holds: known, or counted after steps on a trial matrix.

        Raises:
            OSDPError: it cannot run under a plan, or its memory cannot be determined.
        """
        if known := self.known(device_type):
            return known
        self._refuse_by_name()
        try:
            return self._counted_spec(device_type)
        except OSDPError:
            raise
        except Exception as error:  # a user's optimizer may raise anything
            reason = first_line(error)
            raise OSDPError(f"The memory of {self.name} cannot be determined ({reason}); {ADVICE}.") from error

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

    def _class_names(self) -> tuple[str, ...]:
        paged = ["paged"] if getattr(self.optimizer, "is_paged", False) else []
        return (*paged, *(cls.__name__ for cls in type(self.optimizer).__mro__))

    def _refuse_by_name(self) -> None:
        if reason := reason_against(*self._class_names()):
            raise OSDPError(f"{type(self.optimizer).__name__} {reason}.")

    def _counted_spec(self, device_type: str) -> OptimizerSpec:
        """Return what is kept for a float32 matrix; raise ValueError for a state that has neither its shape nor is
        factored.

        If the optimizer needs whole parameters, the temporaries of its step are counted as well.
        """
        optimizer = self.optimizer
        whole, (kept, _) = self.needs_whole(), after_step(optimizer, ROWS, COLUMNS)
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
