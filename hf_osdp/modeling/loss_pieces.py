"""The cross-entropy of a vocabulary projection in pieces of the tokens: logits of all tokens at once never exist."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from ..errors import OSDPError
from .units import embedding_and_head

_log = logging.getLogger(__name__)
_Change = tuple[Any, ...]
_SUMMED_AT_ONCE = 8
"""Parts of a weight's gradient that are added to a sum of higher precision one after the other."""
_Real = float  # in a class with a method of that name


class SumOfLosses(nn.Module):
    """The loss of a piece; a module, so that it can be compiled like a block."""

    def forward(
        self, logits: torch.Tensor, targets: torch.Tensor, changes: tuple[_Change, ...], ignore_index: int, label_smoothing: float
    ) -> torch.Tensor:
        """Return the sum over tokens, of logits `[n, vocabulary]` and targets `[n]`."""
        logits = changed(logits, changes)
        return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing)


def changed(logits: torch.Tensor, changes: tuple[_Change, ...]) -> torch.Tensor:
    """Return logits after changes, each a method of a tensor with its arguments."""
    for name, *args in changes:
        logits = getattr(logits, name)(*args)
    return logits


class DeferredLogits:
    """Logits that are computed where something reads them, and in pieces where that is `F.cross_entropy`.

    Casts, views that keep the vocabulary as the last dimension, slices of tokens, scales by numbers and tanh are kept for the
    pieces. All else gets a tensor of all logits.
    """

    def __init__(self, head: HeadInPieces, hidden: torch.Tensor, changes: tuple[_Change, ...] = ()) -> None:
        self._head, self._hidden, self._changes = head, hidden, changes

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._head.out_features))

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self._hidden.dim()

    def to(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return self._changed("to", *args) if not kwargs else self.whole().to(*args, **kwargs)

    def contiguous(self) -> DeferredLogits:
        return self

    def tanh(self) -> DeferredLogits:
        return self._changed("tanh")

    def view(self, *sizes: Any) -> Any:  # noqa: ANN401 - a tensor, where the vocabulary does not stay last
        shape = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
        if not isinstance(shape, (tuple, list)) or not shape or shape[-1] != self._head.out_features:
            return self.whole().view(*sizes)
        return DeferredLogits(self._head, self._hidden.reshape(*shape[:-1], self._hidden.shape[-1]), self._changes)

    reshape = view

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401
        keys = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(one, slice) or one is Ellipsis for one in keys):
            return self.whole()[key]
        cuts_vocabulary = (len(keys) == self.dim() or Ellipsis in keys) and keys[-1] not in (Ellipsis, slice(None))
        if cuts_vocabulary:
            return self.whole()[key]
        return DeferredLogits(self._head, self._hidden[key], self._changes)

    def __mul__(self, other: Any) -> Any:  # noqa: ANN401
        return self._scaled("mul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:  # noqa: ANN401
        return self._scaled("div", other)

    def float(self) -> DeferredLogits:
        return self._changed("float")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse_in_place(name)
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
        given = kwargs or {}
        if func is F.cross_entropy:
            bound = _CROSS_ENTROPY.bind(*args, **given)
            bound.apply_defaults()
            found = bound.arguments["input"]._cross_entropy(**bound.arguments) if isinstance(bound.arguments["input"], cls) else None
            if found is not None:
                return found
        if func is torch.tanh and len(args) == 1 and not given:
            return args[0].tanh()
        _refuse_in_place(getattr(func, "__name__", ""))
        return func(*(_whole(arg) for arg in args), **{name: _whole(value) for name, value in given.items()})

    def whole(self) -> torch.Tensor:
        """Compute all logits, as the model would have had them."""
        self._head.warn_of_whole()
        return changed(self._head.project(self._hidden), self._changes)

    def _changed(self, *change: Any) -> DeferredLogits:
        return DeferredLogits(self._head, self._hidden, (*self._changes, change))

    def _scaled(self, method: str, other: Any) -> Any:  # noqa: ANN401
        return self._changed(method, other) if isinstance(other, (int, _Real)) else getattr(self.whole(), method)(other)

    def _cross_entropy(
        self, target: torch.Tensor, ignore_index: int, reduction: str, label_smoothing: _Real, weight: object, **deprecated: Any
    ) -> torch.Tensor | None:
        """Return the loss, or None where it is not a sum or mean over tokens with one class each."""
        classes = target.dim() == 1 and not target.is_floating_point() and self.dim() == 2
        is_plain = weight is deprecated["size_average"] is deprecated["reduce"] is None
        if not classes or not is_plain or reduction not in ("sum", "mean"):
            return None
        total = self._head.sum_of(self._hidden, target, self._changes, ignore_index, label_smoothing)
        return total if reduction == "sum" else total / (target != ignore_index).sum()


def _of_whole(name: str) -> Callable[..., Any]:
    return lambda logits, *others: getattr(logits.whole(), name)(*map(_whole, others))


_CROSS_ENTROPY = inspect.signature(F.cross_entropy)
for _name in "add radd sub rsub rtruediv matmul rmatmul pow neg abs lt le gt ge eq ne len iter".split():
    setattr(DeferredLogits, f"__{_name}__", _of_whole(f"__{_name}__"))


def _refuse_in_place(name: str) -> None:
    """Refuse what would change, or watch, a tensor of all logits that the loss does not use."""
    if (name.endswith("_") and not name.endswith("__")) or name in ("register_hook", "retain_grad"):
        raise OSDPError(
            f"{name} of the logits has no effect on a loss in pieces; write logits = logits.{name.rstrip('_')}(...), or plan with"
            " split_vocabulary=False."
        )


def _whole(value: Any) -> Any:  # noqa: ANN401
    return value.whole() if isinstance(value, DeferredLogits) else value


class HeadInPieces(nn.Linear):
    """A vocabulary projection that returns `DeferredLogits` in training with labels."""

    pieces: int
    loss: SumOfLosses
    defers: bool = False
    """Whether the model that is running has labels and trains."""
    _has_warned: bool = False

    def __call__(self, hidden: torch.Tensor) -> Any:  # noqa: ANN401
        """Defer the projection before any hook of the module runs: FSDP2 gathers the weight where it is used."""
        return DeferredLogits(self, hidden) if self.defers else self.project(hidden)

    def project(self, *arguments: Any) -> torch.Tensor:
        """Call the module now, with what `forward` takes."""
        return cast(torch.Tensor, super().__call__(*arguments))

    def forward(self, hidden: torch.Tensor, *losses: Any) -> torch.Tensor:
        """Hidden states `[..., in]` → logits; with what `SumOfLosses` takes after them, of `[N, in]`, → the sum of the tokens' losses."""
        if not losses:
            return super().forward(hidden)
        inputs: tuple[torch.Tensor | None, ...] = (hidden, self.weight, self.bias)
        if not torch.is_grad_enabled():  # autograd functions look at their inputs alone
            inputs = tuple(None if one is None else one.detach() for one in inputs)
        return cast(torch.Tensor, _SumOfPieces.apply(*inputs, self.pieces, self.loss, *losses))

    def sum_of(self, hidden: torch.Tensor, *losses: Any) -> torch.Tensor:
        """Return the sum of the tokens' losses; refuse float16, whose gradients vanish without the loss scale that is not known yet."""
        if _compute_dtype(hidden) is torch.float16:
            raise OSDPError(
                "The loss in pieces takes gradients before the loss is scaled, which loses them in fp16; use bf16, or plan again."
            )
        return self.project(hidden, *losses)

    def warn_of_whole(self) -> None:
        """Warn once that something reads the logits, which are then computed whole."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "The logits are read in training, so that the loss in %d pieces saves no memory; the training is the same.", self.pieces
            )


class _SumOfPieces(torch.autograd.Function):
    """Σ_n ℓ(W h_n + c) piece by piece; each piece's gradients are taken in forward, so that its logits are made once.

    With δ = ∂ℓ/∂logits, ∂h = δ W, ∂W = Σ δᵀ h, ∂c = Σ δ. Sums over pieces are in float32 at least.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        pieces: int,
        sum_of_losses: SumOfLosses,
        targets: torch.Tensor,
        *options: Any,
    ) -> torch.Tensor:
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        dtype = _compute_dtype(hidden)
        projection, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        hidden_grad = torch.empty_like(hidden) if of_hidden else None
        sums = torch.promote_types(weight.dtype, torch.float32)
        weight_sum = weight.new_zeros(weight.shape, dtype=sums) if of_weight else None
        bias_sum = weight.new_zeros(weight.shape[:1], dtype=sums) if of_bias else None
        total: torch.Tensor | None = None
        start = 0
        for part, its_targets in zip(hidden.tensor_split(pieces), targets.tensor_split(pieces), strict=True):
            part = part.to(dtype)
            with torch.set_grad_enabled(of_hidden or of_weight or of_bias):
                logits = F.linear(part, projection, offset).detach().requires_grad_(torch.is_grad_enabled())
                loss = sum_of_losses(logits, its_targets, *options)
                gradient = torch.autograd.grad(loss, logits)[0] if torch.is_grad_enabled() else logits
            total = loss.detach() if total is None else total + loss.detach()  # in the dtype that the whole loss has
            del logits, loss
            if hidden_grad is not None:
                hidden_grad[start : start + len(part)] = gradient @ projection
            if weight_sum is not None:
                _add_product(weight_sum, gradient, part)
            if bias_sum is not None:
                bias_sum += gradient.sum(0, dtype=sums)
            start += len(part)
            del gradient
        ctx.gradients = hidden_grad, *(None if s is None else s.to(weight.dtype) for s in (weight_sum, bias_sum))
        return cast(torch.Tensor, total)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        if ctx.gradients is None:
            raise OSDPError("The loss in pieces is differentiated twice, but its gradients are kept for one backward; plan without it.")
        gradients = tuple(None if gradient is None else gradient.mul_(grad) for gradient in ctx.gradients)
        ctx.gradients = None
        return *gradients, *[None] * 6


def _add_product(total: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add δᵀ h to a sum `[vocabulary, in]`; in parts where the sum is of higher precision, so that the product stays small."""
    if total.dtype is gradient.dtype:
        total.addmm_(gradient.t(), hidden)
        return
    for into, of_part in zip(total.tensor_split(_SUMMED_AT_ONCE), gradient.tensor_split(_SUMMED_AT_ONCE, dim=1), strict=True):
        into += of_part.t() @ hidden


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a linear operator computes, under autocast too."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def loss_in_pieces(model: nn.Module, pieces: int) -> None:
    """Compute the model's loss in pieces of the tokens wherever its forward takes it from the logits by `F.cross_entropy`, in place.

    The training is the same; `outputs.logits` is computed where it is read.

    Raises:
        OSDPError: the model takes no labels, or its vocabulary projection is no plain `nn.Linear`.
    """
    head = embedding_and_head(model)[1]
    owner = next((module for module in model.modules() if "labels" in _arguments(module) and embedding_and_head(module)[1] is head), None)
    if isinstance(head, HeadInPieces) and head.pieces == pieces:
        return
    problem = (
        "it has no vocabulary projection with labels" if head is None or owner is None
        else f"it is in {head.pieces} pieces already" if isinstance(head, HeadInPieces)
        else f"its vocabulary projection is a {type(head).__name__}, not a plain nn.Linear" if type(head) is not nn.Linear
        else "its vocabulary projection has hooks, which would see no logits" if head._forward_hooks or head._forward_pre_hooks
        else ""
    )  # fmt: skip
    if problem or head is None or owner is None:
        raise OSDPError(f"The loss of {type(model).__name__} cannot be in {pieces} pieces: {problem}; leave it whole.")
    head.__class__ = HeadInPieces
    in_pieces = cast(HeadInPieces, head)
    in_pieces.pieces, in_pieces.loss = pieces, SumOfLosses().train(head.training)
    owner.register_forward_pre_hook(partial(_defer, in_pieces, _arguments(owner).index("labels")), with_kwargs=True)
    owner.register_forward_hook(partial(_defer_no_more, in_pieces), always_call=True)


def heads_in_pieces(model: nn.Module) -> Iterator[HeadInPieces]:
    """Yield the vocabulary projections of a model whose loss is in pieces."""
    return (module for module in model.modules() if isinstance(module, HeadInPieces))


def _arguments(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _defer(head: HeadInPieces, labels_at: int, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    labels = args[labels_at] if len(args) > labels_at else kwargs.get("labels")
    head.defers = labels is not None and model.training


def _defer_no_more(head: HeadInPieces, model: nn.Module, args: tuple[Any, ...], output: object) -> None:
    head.defers = False
