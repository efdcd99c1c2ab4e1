"""Find out what a loss divides by: whether it is a sum over samples divided by the number of items of a whole
optimizer step.

The model's forward runs on fake tensors, so a model of any size can be examined. Where an operator needs parameters,
its result gets stand-in values, random numbers of their own for each sample; everything computed from these alone is
computed really, as the loss is.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import ExitStack
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map, tree_map_only

from ..modeling.batch import Inputs, loss_of, plain_batch
from ..modeling.replaced import replaced
from .equal_blocks import TRACED, RecordedCall, block_key, call_key
from .fake_model import fake_copy, stored_tensors_releaser
from .known_values import KnownValues, on_fake_tensors
from .tensors import tensors_in

CountedLoss = Callable[[nn.Module, dict[str, Any], torch.Tensor], Any]
"""Function from a model, a batch and the number of items to the loss, or to an output that holds it.

It may change the batch.
"""

_log = logging.getLogger(__name__)
_MAX_FLOATS = 2**27
"""Most elements of a floating-point tensor whose values are computed, for example logits of 16 tokens of any
vocabulary.
"""
_COUNT, _RATIO = 8, 2**20
"""A number of items, and how many times larger another is, so that a part of the loss that is not divided stands
out.
"""
_TOLERANCE = 1e-2
"""Relative: bf16 rounds the sum of a batch by less, and a mean in place of a sum differs by a factor of 2."""


class LossKind(Enum):
    """How a micro-batch's loss depends on the number of items of the optimizer step."""

    SHARE = "share"
    """A sum over samples divided by the number: losses of micro-batches add up to the step's, whatever their sizes."""
    MEAN = "mean"
    """It does not depend on the number, and is the mean of the losses of each half of a batch."""
    WHOLE = "whole"
    """It does not depend on the number in another way, as the mean over a micro-batch's own items."""
    MIXED = "mixed"
    """A part depends on the number, a part does not, or on the other samples of the micro-batch."""
    UNKNOWN = "unknown"
    """It cannot be computed in a trace."""


def find_loss_kind(model: nn.Module, inputs: Inputs, loss: CountedLoss) -> LossKind:
    """Find the kind of a loss by computing it for two samples together, and for each alone with another number of
    items; if torch runs other operators for a batch of one, for four samples and their halves, and for six and theirs.
    Two sizes, so that a loss over pairs of neighbours is not taken for a sum over samples.

    The loss of samples s with n items is f(s, n). It is a share if f(s₁s₂, n) = f(s₁, n) + k·f(s₂, k·n).

    Args:
        model: real or on the meta device; it is not modified.
        inputs: a function from a number of samples to the batch of the loss.
        loss: as the training loop computes it.
    """
    try:
        try:
            return _Examination(model, inputs, loss, half=1).kind()
        except _OtherOperatorsError:
            kinds = {_Examination(model, inputs, loss, half=half).kind() for half in (2, 3)}
            return kinds.pop() if len(kinds) == 1 else LossKind.MIXED
    except Exception:  # under fake tensors a model can raise any exception
        _log.debug("The kind of the loss is not known.", exc_info=True)
        return LossKind.UNKNOWN


class _OtherOperatorsError(Exception):
    """Half of the samples run other operators than all of them."""


class _Examination:
    """Compute one loss for some samples or half of them, with stand-in values for results of the model's weights."""

    def __init__(self, model: nn.Module, inputs: Inputs, loss: CountedLoss, *, half: int) -> None:
        self._model, self._loss = model, loss
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fake = fake_copy(model, self._mode)
        one, both = (tree_map_only(torch.Tensor, torch.clone, plain_batch(inputs(n))) for n in (half, 2 * half))
        one, both = _with_valid_labels(one), _with_valid_labels(both)
        self._batches: dict[int | None, dict[str, Any]] = {None: both}
        self._batches |= {part: _part_of_batch(both, one, part) for part in (0, 1)}
        self._calls: list[tuple[OpOverload | None, torch.Size]] = []

    def kind(self) -> LossKind:
        """Return the kind."""
        together, depends = self._value(None, _COUNT)
        other = LossKind.UNKNOWN if depends else LossKind.WHOLE
        if together is None:
            return other
        first, second = (self._value(part, count)[0] for part, count in ((0, _COUNT), (1, _COUNT * _RATIO)))
        if first is None or second is None or together == 0:
            return other
        added_up = first + second * _RATIO if depends else (first + second) / 2
        fits = abs(together - added_up) <= _TOLERANCE * abs(together)
        if depends:
            return LossKind.SHARE if fits else LossKind.MIXED
        return LossKind.MEAN if fits else LossKind.WHOLE

    def _value(self, part: int | None, count: int) -> tuple[float | None, bool]:
        """Return the loss of one half or (None) of all samples, None if it is not known, and whether it depends on
        the count.
        """
        values, number = _StandIns(self._calls, part), {"items": torch.tensor(count)}
        release = stored_tensors_releaser(self._fake)
        called = replaced(self._model, forward=self._fake.__call__)  # the loss may call the original model
        with on_fake_tensors(self._mode, values, gradients=False), called, ExitStack() as stack:
            self._replay_equal_blocks(values, stack)
            items = values.fakes_of(number, self._mode)["items"]
            values.follow(items)
            loss = loss_of(self._loss(self._fake, values.fakes_of(self._batches[part], self._mode), items))
            value = values.value(loss)
        release()
        return None if value is None or not value.isfinite() else float(value), values.depends(loss)

    def _replay_equal_blocks(self, values: _StandIns, stack: ExitStack) -> None:
        """Run only the first two of equal blocks until the stack is closed; the outputs of the others are
        stand-ins.
        """
        calls: dict[Hashable, list[RecordedCall]] = defaultdict(list)

        def replaying(block: nn.Module) -> Callable[..., Any]:
            original, key = block.forward, block_key(block)

            def forward(*args: Any, **kwargs: Any) -> object:
                traced = calls[key, call_key(args, kwargs)]
                if len(traced) == TRACED:
                    output = traced[-1].replay(args, kwargs, None)
                    values.stand_in_for(output)
                    return output
                output = original(*args, **kwargs)
                traced += [call] if (call := RecordedCall.of(args, kwargs, output)) is not None else []
                return output

            return forward

        for blocks in [module for module in self._fake.modules() if isinstance(module, nn.ModuleList)]:
            for block in blocks:
                stack.enter_context(replaced(block, forward=replaying(block)))


class _StandIns(KnownValues):
    """Values that also stand in for results of parameters: each sample's are the same in its half and together with
    the other.
    """

    def __init__(self, calls: list[tuple[OpOverload | None, torch.Size]], part: int | None) -> None:
        super().__init__(alone=True, max_floats=_MAX_FLOATS)
        self._calls, self._part, self._number = calls, part, 0
        if part is None:
            calls.clear()
        self._counted: dict[int, torch.UntypedStorage] = {}
        """Storages of tensors that depend on the number of items; held, so that no other storage gets their
        address.
        """
        self._is_lost = False
        """Whether the number was read, or mixed with values that are not known, so that anything may depend on it."""

    def depends(self, tensor: torch.Tensor) -> bool:
        return self._is_lost or tensor.untyped_storage()._cdata in self._counted

    def follow(self, tensor: torch.Tensor) -> None:
        """Note that a tensor depends on the number of items."""
        storage = tensor.untyped_storage()
        self._counted[storage._cdata] = storage

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        given = list(tensors_in((args, kwargs or {})))
        is_known = any(self.value(tensor) is not None for tensor in given)
        depends = any(tensor.untyped_storage()._cdata in self._counted for tensor in given)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if depends:
            for tensor in tensors_in(result):
                self.follow(tensor)
            # `prim.device` reads no value
            self._is_lost |= func.namespace != "prim" and not any(
                self.value(tensor) is not None for tensor in tensors_in(result)
            )
        if is_known:
            self.stand_in_for(result, func)
        return result

    def stand_in_for(self, result: object, func: OpOverload | None = None) -> None:
        """Store values for the floating-point tensors in the result of an operator, or of a block (None), that have
        none.
        """
        for tensor in tensors_in(result):
            if tensor.is_floating_point() and self.value(tensor) is None and self._is_small(tensor):
                self.store(tensor, self._stand_in(tensor, func))

    def _stand_in(self, tensor: torch.Tensor, func: OpOverload | None) -> torch.Tensor:
        """Return random numbers by the number of the call; for one half, its part of those for all samples."""
        if self._part is None:
            self._calls.append((func, tensor.shape))
        name, shape = self._calls[self._number]
        if name is not func:
            raise _OtherOperatorsError(f"Half of the samples call {func} where all call {name}.")
        self._number += 1
        with _disable_current_modes():
            made = torch.randn(shape, generator=torch.Generator().manual_seed(self._number)).to(tensor.dtype)
            return made if self._part is None else _part_of(made, tensor.shape, self._part)


def _part_of(both: torch.Tensor, shape: torch.Size, part: int) -> torch.Tensor:
    """Return the first or last part of a tensor for all samples, of the shape that half of them have; the whole if
    that is its shape.
    """
    dims = [dim for dim, (whole, own) in enumerate(zip(both.shape, shape, strict=True)) if whole != own]
    if not dims:
        return both
    (dim,) = dims
    return both.narrow(dim, part * (both.shape[dim] - shape[dim]), shape[dim])


def _part_of_batch(both: Mapping[str, Any], half: Mapping[str, Any], part: int) -> dict[str, Any]:
    """Return the batch of the first or last half of the samples; `half` has the shapes."""

    def own(whole: object, single: object) -> object:
        return (
            _part_of(whole, single.shape, part)
            if isinstance(whole, torch.Tensor) and isinstance(single, torch.Tensor)
            else single
        )

    return {name: tree_map(own, both[name], half[name]) for name in half}


def _with_valid_labels(batch: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return a batch without ignored labels (-100), of which a few tokens may have no others."""

    def valid(labels: torch.Tensor) -> torch.Tensor:
        return labels if labels.is_floating_point() else labels.masked_fill(labels == -100, 0)

    return {
        name: tree_map_only(torch.Tensor, valid, value) if "label" in name else value for name, value in batch.items()
    }
