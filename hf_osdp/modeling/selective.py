"""Recompute a module's forward in backward, except for chosen operators, whose outputs are saved.

Torch's own `create_selective_checkpoint_contexts` looks up every operator of the second run, which fails if FSDP2
gathers a nested unit in only one of the two runs, and it ignores random numbers: after a saved dropout, later dropouts
would draw other masks.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

_log = logging.getLogger(__name__)
_NEVER_COUNTED = frozenset({"detach", "_to_copy"})
"""Operators that may run more often in one of the two runs: for saved tensors, and for casts that autocast or FSDP2
cache.
"""


class CallCounter:
    """Name the calls of operators, such as `addmm#0` for the first `addmm`, and keep the history of a run.

    Calls without gradients or inside `record_function`, such as FSDP2's gathers, are not counted: the second run of a
    forward may make them at another place, or not at all.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._recorded = 0
        """Number of `record_function` contexts that are open."""
        self.history = 0
        """Hash of all calls so far, in order."""

    def name(self, func: OpOverload) -> str | None:
        """Return the name of the current call; None if it is not counted."""
        operator = operator_name(func)
        if func.namespace == "profiler":
            self._recorded += -1 if "exit" in operator else 1
        uncounted = self._recorded or func.namespace in ("prim", "profiler") or operator in _NEVER_COUNTED
        if uncounted or not (torch.is_grad_enabled() or operator == "attention"):
            return None
        call = f"{operator}#{self._counts[operator]}"
        self._counts[operator] += 1
        self.history = hash((self.history, operator))
        return call


@functools.cache
def operator_name(func: OpOverload) -> str:
    """Return an operator's name, such as `addmm`; all kernels of attention on every device are `attention`."""
    space, _, name = func._schema.name.partition("::")
    if ("scaled_dot_product" in name and not name.endswith("backward")) or (space, name) == ("hf_osdp", "attention"):
        return "attention"
    return name if space == "aten" else f"{space}.{name}"


class _Calls(TorchDispatchMode):
    """Base of the modes that follow the calls of one run of a forward."""

    def __init__(self, saved: Collection[str], outputs: dict[str, _Output]) -> None:
        super().__init__()
        self._saved, self._outputs = frozenset(saved), outputs

    def __enter__(self) -> _Calls:
        self._counter = CallCounter()
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        return self._run(self._counter.name(func) or "", func, args, kwargs or {})

    def _run(self, call: str, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        raise NotImplementedError


class _Save(_Calls):
    """Save the outputs of the chosen calls, except those that are changed in place."""

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if exception[0] is None and (missing := self._saved - set(self._outputs)):
            _warn_of_missing(", ".join(sorted({call.partition("#")[0] for call in missing})))

    def _run(self, call: str, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if func._schema.is_mutable and self._outputs:  # outputs whose memory it may write are recomputed
            written = _storages(tree_leaves((args, kwargs)))
            for changed in [name for name, output in self._outputs.items() if not written.isdisjoint(output.storages)]:
                del self._outputs[changed]
        result = func(*args, **kwargs)
        if call in self._saved:
            self._outputs[call] = _Output(func, args, result, self._counter.history)
        return result


class _Replay(_Calls):
    """Return the saved outputs of the chosen calls, as long as this run makes the same calls as the first.

    A run may make other calls, for example if a block filled a cache in the first run. From there on all calls run
    again, which is correct.
    """

    def _run(self, call: str, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        output = self._outputs.pop(call, None)
        if output is None or output.made_after != (self._counter.history, _shapes(args)):
            return func(*args, **kwargs)
        return output.take(call)


class _Output:
    """The saved output of a call, the history of calls before it, and the random state after it."""

    def __init__(self, func: OpOverload, args: tuple[Any, ...], result: object, history: int) -> None:
        self.made_after = history, _shapes(args)
        leaves, self._structure = tree_flatten(result)
        self._leaves = [_alias(leaf) for leaf in leaves]
        self.storages = _storages(leaves)
        self._versions = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in self._leaves]
        self._generator = None
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        # operators of other packages may draw random numbers without the tag
        if device is not None and (
            torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in ("aten", "hf_osdp")
        ):
            self._generator = _generator(device)
            self._state = self._generator.get_state()

    def take(self, call: str) -> object:
        """Return the saved output and restore the random state after the call; raise RuntimeError if the output was
        changed in place.
        """
        if any(
            isinstance(leaf, torch.Tensor) and leaf._version != v
            for leaf, v in zip(self._leaves, self._versions, strict=True)
        ):
            raise RuntimeError(
                f"The output of {call}, which the plan saves for backward, was changed in place; change a copy of it,"
                " or plan with"
                " recompute=True or False."
            )
        if self._generator is not None:
            self._generator.set_state(self._state)
        return tree_unflatten(self._leaves, self._structure)


def _shapes(args: tuple[Any, ...]) -> tuple[object, ...]:
    """Return the shapes and dtypes of tensor arguments."""
    return tuple((tuple(arg.shape), arg.dtype) for arg in args if isinstance(arg, torch.Tensor))


def _storages(leaves: Iterable[object]) -> set[int]:
    """Return the identities of the tensors' storages, if they have one."""
    found = set()
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            with suppress(NotImplementedError, RuntimeError):
                found.add(int(leaf.untyped_storage()._cdata))
    return found


def _alias(value: object) -> object:
    """Return an alias of a tensor without autograd history that shares its version counter."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


@functools.cache
def _warn_of_missing(operators: str) -> None:
    _log.warning(
        "The plan saves outputs of %s that this step did not compute, or changed in place; they are recomputed.",
        operators,
    )


def selective_contexts(saved: Collection[str]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of forward and of its second run, for `checkpoint(context_fn=...)`; all calls except
    `saved` run again.
    """
    outputs: dict[str, _Output] = {}
    return _Save(saved, outputs), _Replay(saved, outputs)
