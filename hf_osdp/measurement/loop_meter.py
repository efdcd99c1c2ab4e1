"""The first optimizer steps of a loop that does not tell where they begin and end, measured by hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from .step_meter import Observation, StepMeter, training_tensors

_STEPS = 8
"""Optimizer steps after which the figures are reported and the loop is left alone."""


class LoopMeter:
    """Measures the first optimizer steps of any loop: from the first training forward to the end of the optimizer's step.

    What lies between, such as evaluation, checkpoints and loading the first batch, does not count. Neither model nor optimizer
    is changed; the hooks are gone once the steps have been measured.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        report: Callable[[Observation], None],
        *,
        steps: int = _STEPS,
        micro_steps: int | None = None,
    ) -> None:
        """Put hooks on the model and on all optimizers; `report` is called once, on every rank, with the summary.

        A loss scaler may skip the optimizer's step: forward passes beyond `micro_steps` begin a new step. None takes all passes up to the
        optimizer's step as one. On the CPU model, optimizer and batch count towards the peak beside what a step makes.
        """
        self._meter = StepMeter(device, self._held)
        self._report = report
        self._steps, self._micro_steps = steps, micro_steps
        self._model = model
        self._optimizer: torch.optim.Optimizer | None = None
        self._batch: list[torch.Tensor] = []
        self._passes = 0
        me = weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            if (meter := me()) is not None:
                meter._optimizer_stepped(optimizer)

        # That of all optimizers must not keep this model alive; that of the model comes before FSDP2's, which gathers the root.
        of_optimizers = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, of_optimizers.remove)
        self._handles = [model.register_forward_pre_hook(self._forward_begins, prepend=True, with_kwargs=True), of_optimizers]

    def finish(self) -> None:
        """Stop measuring and report what was seen, if a step was. Collective; a second call does nothing."""
        if not self._handles:
            return
        self.stop()
        if self._meter.steps:
            self._report(self._meter.summary())

    def stop(self) -> None:
        """Stop measuring and report nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._optimizer = None
        self._meter.abandon()

    def _forward_begins(self, module: nn.Module, args: object, kwargs: object) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        if self._passes == 0 or self._passes == self._micro_steps:
            self._passes = 0
            self._batch = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self._meter.step_begins()
            self._batch = []
        self._passes += 1

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        mine = {id(parameter) for parameter in self._model.parameters()} if self._passes else set()
        if not any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            return  # hooks see every optimizer of the process
        self._passes, self._optimizer = 0, optimizer
        self._meter.step_ends()
        if self._meter.steps >= self._steps:
            self.finish()

    def _held(self) -> list[torch.Tensor]:
        """Return what lives when a step begins; the optimizer is known from the first one."""
        assert self._optimizer is not None
        return [*training_tensors(self._model, self._optimizer), *self._batch]
