"""Compute the cross-entropy of a vocabulary projection in chunks of the tokens, without the logits of all tokens at
once.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from ...errors import OSDPError
from ..replaced import replaced
from ..units import embedding_and_head
from .deferred_logits import Change, DeferredLogits, changed

_log = logging.getLogger(__name__)
_SUMMED_AT_ONCE = 8
"""Number of parts in which a weight's gradient is added to a sum of higher precision."""


class SumOfLosses(nn.Module):
    """Loss of a chunk, as a module so that it can be compiled like a block."""

    def forward(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        changes: tuple[Change, ...],
        ignore_index: int,
        label_smoothing: float,
    ) -> torch.Tensor:
        """Return the sum of losses over tokens, from logits `[n, vocabulary]` and targets `[n]`."""
        logits = changed(logits, changes)
        return F.cross_entropy(
            logits, targets, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
        )


class ChunkedHead(nn.Linear):
    """A vocabulary projection whose loss is computed in chunks of the tokens. While the model trains with labels, it
    returns `DeferredLogits`.
    """

    loss: SumOfLosses
    chunks: int
    defers: bool = False
    """Whether the running model trains and received labels."""
    loss_alone: bool = False
    """Whether a caller reads only the loss, in evaluation too."""
    _has_warned: bool = False

    def __call__(self, hidden: torch.Tensor) -> Any:  # noqa: ANN401
        """Defer the projection before any hook of the module runs, so that FSDP2 gathers the weight when it is
        used.
        """
        return DeferredLogits(self, hidden) if self.defers else self.project(hidden)

    def project(self, *arguments: Any) -> torch.Tensor:
        """Call the module immediately, with the arguments of `forward`."""
        return cast(torch.Tensor, super().__call__(*arguments))

    def warn_of_whole(self) -> None:
        """Warn once that something reads the logits, so that all of them are computed."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "The logits are read in training, so the loss in %d chunks saves no memory; the results are the same.",
                self.chunks,
            )

    def forward(self, hidden: torch.Tensor, *losses: Any) -> torch.Tensor:
        """Return logits of hidden states `[..., in]`; with further arguments of `SumOfLosses`, the sum of the
        losses of `[N, in]`.
        """
        if not losses:
            return super().forward(hidden)
        inputs: tuple[torch.Tensor | None, ...] = (hidden, self.weight, self.bias)
        if not torch.is_grad_enabled():  # autograd functions ignore the grad mode and look only at their inputs
            inputs = tuple(None if one is None else one.detach() for one in inputs)
        return cast(torch.Tensor, _SumOfChunks.apply(*inputs, self.chunks, self.loss, *losses))

    def sum_of(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        changes: tuple[Change, ...],
        ignore_index: int,
        label_smoothing: float,
    ) -> torch.Tensor:
        """Return the sum of the tokens' losses; refuse float16, whose gradients underflow because the loss scale is
        not known yet.
        """
        if torch.is_grad_enabled() and _compute_dtype(hidden) is torch.float16:
            raise OSDPError(
                "The loss in chunks computes gradients before the loss is scaled, so they underflow in fp16; use bf16,"
                " or plan again."
            )
        return self.project(hidden, targets, changes, ignore_index, label_smoothing)


class _SumOfChunks(torch.autograd.Function):
    """Σ_n ℓ(W h_n + c) chunk by chunk; forward also computes each chunk's gradients, so that its logits are computed
    once.

    With δ = ∂ℓ/∂logits, ∂h = δ W, ∂W = Σ δᵀ h, ∂c = Σ δ. Sums over chunks are in float32 or higher precision.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        chunks: int,
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
        for part, its_targets in zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True):
            part = part.to(dtype)
            with torch.set_grad_enabled(of_hidden or of_weight or of_bias):
                logits = F.linear(part, projection, offset).detach().requires_grad_(torch.is_grad_enabled())
                loss = sum_of_losses(logits, its_targets, *options)
                gradient = torch.autograd.grad(loss, logits)[0] if torch.is_grad_enabled() else logits
            total = loss.detach() if total is None else total + loss.detach()  # in the dtype of the whole loss
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
            raise OSDPError(
                "The loss in chunks keeps its gradients for one backward, but is differentiated twice; plan without"
                " it."
            )
        gradients = tuple(None if gradient is None else gradient.mul_(grad) for gradient in ctx.gradients)
        ctx.gradients = None
        return *gradients, *[None] * 6


def _add_product(total: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add δᵀ h to a sum `[vocabulary, in]`; in parts if the sum has higher precision, so that the temporary product
    is small.
    """
    if total.dtype is gradient.dtype:
        total.addmm_(gradient.t(), hidden)
        return
    for into, of_part in zip(
        total.tensor_split(_SUMMED_AT_ONCE), gradient.tensor_split(_SUMMED_AT_ONCE, dim=1), strict=True
    ):
        into += of_part.t() @ hidden


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a linear operator computes, with or without autocast."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def chunk_loss(model: nn.Module, chunks: int) -> None:
    """Change a model in place so that `F.cross_entropy` of its logits in forward is computed in chunks of the tokens.

    Training gives the same results; `outputs.logits` is computed when it is read.

    Raises:
        OSDPError: the model takes no labels, or its vocabulary projection is not a plain `nn.Linear`.
    """
    head = embedding_and_head(model)[1]
    owner = next(
        (one for one in model.modules() if "labels" in arguments_of(one) and embedding_and_head(one)[1] is head), None
    )
    if isinstance(head, ChunkedHead) and head.chunks == chunks:
        return
    problem = (
        "it has no vocabulary projection with labels" if head is None or owner is None
        else f"it is already in {head.chunks} chunks" if isinstance(head, ChunkedHead)
        else f"its vocabulary projection is a {type(head).__name__}, not a plain nn.Linear" if type(head) is not nn.Linear  # noqa: E501
        else "its vocabulary projection has hooks, which would see no logits" if head._forward_hooks or head._forward_pre_hooks  # noqa: E501
        else ""
    )  # fmt: skip
    if problem or head is None or owner is None:
        raise OSDPError(
            f"The loss of {type(model).__name__} cannot be computed in {chunks} chunks: {problem}; leave it whole."
        )
    head.__class__ = ChunkedHead
    chunked = cast(ChunkedHead, head)
    chunked.chunks, chunked.loss = chunks, SumOfLosses().train(head.training)
    at = arguments_of(owner).index("labels")
    owner.register_forward_pre_hook(partial(_start_deferring, chunked, at), with_kwargs=True)
    owner.register_forward_hook(partial(_stop_deferring, chunked), always_call=True)


@contextmanager
def only_loss_read(model: nn.Module) -> Iterator[None]:
    """Let a model whose loss is in chunks compute it so in evaluation too; nothing may read its logits."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, ChunkedHead):
                stack.enter_context(replaced(module, loss_alone=True))
        yield


def arguments_of(module: nn.Module) -> list[str]:
    """Return the names of a forward's arguments, in order."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _start_deferring(
    head: ChunkedHead, labels_at: int, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    labels = args[labels_at] if len(args) > labels_at else kwargs.get("labels")
    head.defers = labels is not None and (model.training or head.loss_alone)


def _stop_deferring(head: ChunkedHead, model: nn.Module, args: tuple[Any, ...], output: object) -> None:
    head.defers = False
