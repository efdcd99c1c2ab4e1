"""What a cross-entropy needs of a part of the logits, without keeping them for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


def sliced_statistics(
    project: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp over a slice's logits, and each target's logit; the logits are made again in backward.

    Low-precision logits go to float32 first, as in transformers' losses; float64 stays.

    Args:
        project: hidden states `[N, in]` → logits `[N, features]`.
        hidden: `[N, in]`.
        targets: `[N]`, indices into the slice.

    Returns:
        Both `[N]`.
    """

    def statistics(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = project(hidden)
        return _Statistics.apply(logits.float() if logits.itemsize < 4 else logits, targets)

    if not torch.is_grad_enabled():
        return statistics(hidden, targets)
    return checkpoint(statistics, hidden, targets, use_reentrant=False, preserve_rng_state=False)


class _Statistics(torch.autograd.Function):
    """lse_n = log Σ_v exp(x_nv) and x_n,target; dx = softmax(x) · dlse + onehot(target) · dtarget, written over x."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lse = logits.logsumexp(dim=-1)
        ctx.save_for_backward(logits, lse, targets)
        # A copy: FSDP2 hooks a unit's outputs, and warns of views.
        return lse, logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, lse_grad: torch.Tensor, target_grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, lse, targets = ctx.saved_tensors
        # In place: under checkpoint these logits were made for this backward alone.
        grad = logits.sub_(lse.unsqueeze(-1)).exp_().mul_(lse_grad.unsqueeze(-1))
        return grad.scatter_add_(-1, targets.unsqueeze(-1), target_grad.unsqueeze(-1)), None
