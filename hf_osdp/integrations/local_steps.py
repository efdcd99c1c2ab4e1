"""Local steps in a training loop: when machines synchronise, and which of their state a checkpoint holds."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..checkpoint.safe import load_file
from ..checkpoint.writer import on_every_rank
from ..distributed.mesh import rank
from ..errors import OSDPError
from ..modeling.step_hooks import makes_states
from ..planner.plan import Plan
from ..sharding.local_steps import OuterOptimizer
from ..sharding.optimizer import unwrapped
from .plugin import OSDPPlugin, offloads, writes_shards

_log = logging.getLogger(__name__)


def check_plugin(plugin: OSDPPlugin, steps: int) -> None:
    """Raise ValueError if an option of Accelerate does not work with `steps` local steps."""
    if writes_shards(plugin):
        refuse(steps, "state_dict_type='SHARDED_STATE_DICT' would mix the machines' optimizer states; use FULL_STATE_DICT")
    if offloads(plugin):
        refuse(steps, "cpu_offload moves states to the host; leave one of the two out")


def refuse(steps: int, problem: str) -> NoReturn:
    """Raise ValueError with a problem that rules out local steps."""
    raise ValueError(f"local_steps={steps}: {problem}.")


class Synchroniser:
    """Run the outer steps of a plan with local steps, from the first optimizer step on.

    The machines synchronise when the planned number of optimizer steps has passed since the last time, and before evaluations.
    """

    _optimizer: weakref.ref[torch.optim.Optimizer] | None = None

    def __init__(self, plan: Plan) -> None:
        assert plan.local_steps is not None
        self.steps, self._layout = plan.local_steps, f"{plan.fingerprint}, rank {rank()}"
        self._outer: OuterOptimizer | None = None
        self._loaded: dict[str, Any] | None = None
        self._steps_since_sync = 0
        """Optimizer steps since the machines last synchronised."""

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Create the outer optimizer, with the loaded state if there is any, unless it exists already."""
        if self._outer is None:
            self._outer = OuterOptimizer(model, self.steps)
            if self._loaded is not None:
                self._outer.load(self._loaded, optimizer)
                self._loaded = None

    def end(self) -> None:
        """Drop the outer state, since other parameters are loaded or training has ended."""
        self._outer, self._loaded, self._steps_since_sync = None, None, 0

    def synchronise(self, before: str = "") -> None:
        """Synchronise the machines if they have stepped since the last time; log it if `before` names an event. Collective."""
        if self._outer is None or not self._steps_since_sync:
            return
        if before and rank() == 0:
            _log.warning("%s after %d of %d local steps: the machines synchronise first.", before, self._steps_since_sync, self.steps.steps)
        self._outer.step()
        self._steps_since_sync = 0

    def save(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        """Write this rank's outer momentum and its part of its machine's optimizer states. Collective."""
        state = self._loaded if self._outer is None else {"layout": self._layout, **self._outer.state(optimizer)}
        if state is not None:
            on_every_rank(lambda: torch.save(state, _path(folder)))

    def load(self, folder: Path) -> None:
        """Read the state that `save` wrote; if it is of another plan, keep the first machine's optimizer states. Collective."""
        self.end()
        state: dict[str, Any] = {}

        def read() -> bool:
            state.update(load_file(_path(folder)) if _path(folder).is_file() else {})
            return state.get("layout") == self._layout

        matches = all(on_every_rank(read))
        self._loaded = state if matches else None
        if rank() == 0 and not (matches and state["states"]):
            momentum = "" if matches else "; the outer momentum begins at zero, as the checkpoint has none for this plan"
            _log.warning("%s: all machines continue with the first machine's optimizer states%s.", folder, momentum)

    def bind(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Count the optimizer's steps; raise OSDPError for a second optimizer."""
        optimizer = unwrapped(optimizer)
        if self._optimizer is not None:
            if self._optimizer() is not optimizer:
                raise OSDPError("Local steps count the steps of one optimizer, but a second one was made; use one with parameter groups.")
            return
        self._optimizer = weakref.ref(optimizer)
        handle = optimizer.register_step_pre_hook(lambda optimizer, *_: None if makes_states() else self.begin(model, optimizer))
        optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]  # before groups are split by device
        optimizer.register_step_post_hook(self._after_step)

        def forward_begins(*_: object) -> None:
            if not (model.training or torch.is_grad_enabled()):
                self.synchronise("An evaluation")

        for module in model.modules():  # submodules may be called directly, as `generate` calls an encoder
            if module is model or isinstance(module, FSDPModule):
                module.register_forward_pre_hook(forward_begins, prepend=True)  # before FSDP2 gathers

    def _after_step(self, *_: object) -> None:
        self._steps_since_sync += not makes_states()
        if self._steps_since_sync >= self.steps.steps:
            self.synchronise()


def _path(folder: Path) -> Path:
    return folder / f"local_steps_{rank()}.pt"
