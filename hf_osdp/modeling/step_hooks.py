"""Hooks of every optimizer's step that may be removed at any moment.

torch runs its global hooks out of the dictionary that their handles remove them from, so that a step fails where a hook is removed
meanwhile: by another hook, or by the garbage collector.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Hook = Callable[[torch.optim.Optimizer], None]


class StepHooks:
    """Hooks that torch runs as one, which stays."""

    def __init__(self, register: Callable[[Any], object]) -> None:
        """Take torch's function that registers a global hook; it is called with the first hook."""
        self._register = register
        self._is_registered = False
        self._hooks: dict[object, Hook] = {}

    def __len__(self) -> int:
        return len(self._hooks)

    def add(self, hook: Hook) -> Callable[[], object]:
        """Run a hook at each step from now on; return what removes it."""
        if not self._is_registered:
            self._register(self._run)
            self._is_registered = True
        key = object()
        self._hooks[key] = hook
        return partial(self._hooks.pop, key, None)

    def _run(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for hook in tuple(self._hooks.values()):
            hook(optimizer)


before_step = StepHooks(register_optimizer_step_pre_hook)
after_step = StepHooks(register_optimizer_step_post_hook)
