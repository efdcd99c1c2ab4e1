"""Hooks of every optimizer's step that may be removed at any time; in torch, a step fails if a global hook is
removed during it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Hook = Callable[[torch.optim.Optimizer], None]


class StepHooks(dict[Hook, None]):
    """Hooks that torch runs in order as one global hook, which `register` adds with the first of them and which is
    never removed.
    """

    def __init__(self, register: Callable[[Any], object]) -> None:
        self._register: Callable[[Any], object] | None = register

    def add(self, hook: Hook) -> Callable[[], object]:
        """Run a hook once at each step from now on; return a function that removes it."""
        if self._register is not None:
            self._register(self._run)
            self._register = None
        self[hook] = None
        return partial(self.pop, hook, None)

    def follow(self, method: Hook) -> None:
        """Run an object's method at each step, as long as the object is in use."""
        of = weakref.WeakMethod(method)

        def run(optimizer: torch.optim.Optimizer) -> None:
            if (found := of()) is not None:  # it may be freed while hooks of a step run
                found(optimizer)

        weakref.finalize(method.__self__, self.add(run))  # type: ignore[attr-defined]

    def _run(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for hook in tuple(self):
            hook(optimizer)


before_step = StepHooks(register_optimizer_step_pre_hook)
after_step = StepHooks(register_optimizer_step_post_hook)
