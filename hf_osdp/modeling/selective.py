"""Recompute a module's forward in backward, but for chosen operators, whose outputs are saved.

Torch's own `create_selective_checkpoint_contexts` looks up every operator of the second run, which fails where FSDP2 gathers a unit inside
in one of the two alone, and leaves random numbers out: after a saved dropout, those behind it would draw other masks.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

_log = logging.getLogger(__name__)


class CallCounter:
    """Name the calls of operators: `addmm#0` is the first one of its name."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def name(self, func: OpOverload) -> str:
        """Return the name of the call that comes now."""
        operator = operator_name(func)
        call = f"{operator}#{self._counts[operator]}"
        self._counts[operator] += 1
        return call


@functools.cache
def operator_name(func: OpOverload) -> str:
    """Return an operator's name, the same for all kernels of attention and on every device: `addmm`, `attention`."""
    space, _, name = func._schema.name.partition("::")
    if ("scaled_dot_product" in name and not name.endswith("backward")) or (space, name) == ("hf_osdp", "attention"):
        return "attention"
    return name if space == "aten" else f"{space}.{name}"


class _Calls(TorchDispatchMode):
    """Tells the calls whose outputs are saved."""

    def __init__(self, saved: Collection[str]) -> None:
        super().__init__()
        self._saved = frozenset(saved)
        self._operators = {call.partition("#")[0] for call in saved}
        self._counter = CallCounter()

    def __enter__(self) -> _Calls:
        self._counter = CallCounter()
        super().__enter__()
        return self

    def _saved_call(self, func: OpOverload) -> str | None:
        """Return the name of the call that comes now where its output is to be saved."""
        if operator_name(func) not in self._operators:
            return None
        call = self._counter.name(func)
        return call if call in self._saved else None


class _Save(_Calls):
    """Keep the outputs of the chosen calls."""

    def __init__(self, saved: Collection[str], outputs: dict[str, _Output]) -> None:
        super().__init__(saved)
        self._outputs = outputs

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if exception[0] is None and (absent := sorted(self._saved - set(self._outputs))):
            _warn_of_absent(", ".join(absent))

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if (call := self._saved_call(func)) is not None:
            self._outputs[call] = _Output(func, result)
        return result


class _Replay(_Calls):
    """Take the outputs of the chosen calls from where they were kept."""

    def __init__(self, saved: Collection[str], outputs: dict[str, _Output]) -> None:
        super().__init__(saved)
        self._outputs = outputs

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        call = self._saved_call(func)
        if call is None or call not in self._outputs:
            return func(*args, **(kwargs or {}))
        return self._outputs.pop(call).take(call)


class _Output:
    """What a call returned, and the random state that it left."""

    def __init__(self, func: OpOverload, result: object) -> None:
        leaves, self._structure = tree_flatten(result)
        self._leaves = [_alias(leaf) for leaf in leaves]
        self._versions = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in self._leaves]
        self._generator = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            device = next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
            self._generator = _generator(device)
            self._state = self._generator.get_state()

    def take(self, call: str) -> object:
        """Return it, and set the generator as it was after the call.

        Raises:
            RuntimeError: it was changed in place since.
        """
        if any(isinstance(leaf, torch.Tensor) and leaf._version != v for leaf, v in zip(self._leaves, self._versions, strict=True)):
            raise RuntimeError(
                f"The output of {call}, which the plan saves for backward, was changed in place; change a copy of it, or plan with"
                " recompute=True or False."
            )
        if self._generator is not None:
            self._generator.set_state(self._state)
        return tree_unflatten(self._leaves, self._structure)


def _alias(value: object) -> object:
    """Return a tensor's alias without history that shares its version counter."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


@functools.cache
def _warn_of_absent(calls: str) -> None:
    _log.warning("The plan saves the outputs of %s, which did not run; what needs them is recomputed. Plan again for this model.", calls)


def selective_contexts(saved: Collection[str]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of forward and of its second run, for `torch.utils.checkpoint.checkpoint(context_fn=...)`.

    Args:
        saved: the calls whose outputs are kept, by name (`addmm#0`); all others run again.
    """
    outputs: dict[str, _Output] = {}
    return _Save(saved, outputs), _Replay(saved, outputs)
