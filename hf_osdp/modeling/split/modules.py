"""Linear operators and embeddings in slices; each slice is a module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..parts import InParts
from .deferred_logits import Change, changed


def slice_sizes(features: int, slices: int) -> tuple[int, ...]:
    """Return the output features of each slice, as equal as possible, larger slices first."""
    least, larger = divmod(features, slices)
    return (least + 1,) * larger + (least,) * (slices - larger)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' `Conv1D`, without importing transformers."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


class LinearSlice(nn.Module):
    """Some of an operator's output features: a part of its weight and of its bias.

    The weight is `[features, in]`, or `[in, features]` if `transposed`, as in GPT-2's `Conv1D`; contiguous slices
    share memory.
    """

    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, transposed: bool) -> None:
        super().__init__()
        self.transposed, self.weight = transposed, weight
        self.register_parameter("bias", bias)

    def forward(self, x: torch.Tensor) -> Any:  # noqa: ANN401
        """`[..., in]` → `[..., features]`, with the same function as the whole operator."""
        if not self.transposed:
            return F.linear(x, self.weight, self.bias)
        y = torch.addmm(cast(torch.Tensor, self.bias), x.view(-1, x.shape[-1]), self.weight)
        # Not a view: FSDP2 hooks a unit's output and warns about views, because in-place changes of a view lose the
        # hook.
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], self.weight.shape[1]))


class VocabularySlice(LinearSlice):
    """Part of the vocabulary: computes its logits, their statistics for the loss, and its rows of a tied embedding.

    All three use `forward`, so that FSDP2 gathers the slice for each.
    """

    padding: int | None = None
    """Padding row of a tied embedding, which is not trained, if it is in this slice."""

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None, changes: tuple[Change, ...] = ()) -> Any:  # noqa: ANN401
        """Compute logits; with targets in `other`, their statistics after `changes`; with ids in `x`, the rows of
        these ids.

        Hidden states `[..., in]` give `[..., features]`; with targets `[...]` in the slice, log-sum-exp and target's
        logit, each `[...]`. Ids in the slice, of any shape, give `[..., in]`; `other` is then one float that requires
        grad if the lookup is trained.
        """
        if not x.is_floating_point():
            return _Lookup.apply(self.weight, x, other, self.padding)
        if other is None:
            return super().forward(x)
        if not torch.is_grad_enabled():
            return self._statistics(x, other, changes)
        # logits are recomputed in backward
        return checkpoint(self._statistics, x, other, changes, use_reentrant=False, preserve_rng_state=False)

    def _statistics(self, hidden: torch.Tensor, targets: torch.Tensor, changes: tuple[Change, ...]) -> object:
        """Return log-sum-exp and the targets' logits; low-precision logits are cast to float32 first, as in
        transformers' losses.
        """
        logits = changed(super().forward(hidden), changes)
        return _Statistics.apply(logits.float() if logits.itemsize < 4 else logits, targets)


class SplitOperator(InParts):
    slices: nn.ModuleList
    sizes: tuple[int, ...]
    """Output features (rows of an embedding) of each slice."""
    leaves: dict[str, int]
    """Parameters of the whole operator, with the dimension in which each is split."""

    def part_modules(self) -> nn.ModuleList:
        return self.slices

    def parts(self, leaf: str) -> Iterator[nn.Parameter]:
        return (getattr(part, leaf) for part in self.slices)

    def local(self, ids: torch.Tensor) -> Iterator[tuple[nn.Module, torch.Tensor, torch.Tensor]]:
        """Yield each slice with the ids relative to its first, 0 for ids of other slices, and a mask of the ids in it.

        Ids outside the vocabulary belong to the first or the last slice, where they fail as in the whole operator.
        """
        local, last = ids, len(self.sizes) - 1
        for index, (part, size) in enumerate(zip(self.slices, self.sizes, strict=True)):
            inside = local < size if index == 0 else local >= 0 if index == last else (local >= 0) & (local < size)
            yield part, local.masked_fill(~inside, 0), inside
            local = local - size

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name in ("weight", "bias") and "leaves" in self.__dict__:
            raise AttributeError(
                f"{type(self).__name__} has no {name!r}: it is split into {len(self.sizes)} slices; leave it whole."
            )
        return super().__getattr__(name)


class SplitLinear(SplitOperator):
    """An `nn.Linear` or GPT-2 `Conv1D` whose output features are computed slice by slice and concatenated.

    Outputs are bitwise equal to the whole operator's if the BLAS uses one kernel for both widths; in float64 MKL uses
    another, which rounds the last digits differently. The slices take the source's weights; do not use the source
    afterwards.
    """

    slice_class = LinearSlice

    def __init__(self, source: nn.Module, slices: int) -> None:
        super().__init__()
        transposed = is_conv1d(source)
        dim = 1 if transposed else 0
        weight, bias = cast(nn.Parameter, source.weight), cast("nn.Parameter | None", source.bias)
        self.in_features, self.out_features = weight.shape[1 - dim], weight.shape[dim]
        self.sizes = slice_sizes(self.out_features, slices)
        self.leaves = {"weight": dim} if bias is None else {"weight": dim, "bias": 0}
        weights = _split_parameter(weight, self.sizes, dim)
        biases: Sequence[nn.Parameter | None] = (
            [None] * slices if bias is None else _split_parameter(bias, self.sizes, 0)
        )
        self.slices = nn.ModuleList(
            self.slice_class(w, b, transposed=transposed) for w, b in zip(weights, biases, strict=True)
        )
        self.train(source.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` → `[..., out_features]`."""
        return torch.cat([part(x) for part in self.slices], dim=-1)


class SplitEmbedding(SplitOperator):
    """An `nn.Embedding` that shares the vocabulary slices, as modules, with the head that it is tied to."""

    several_calls = True

    def __init__(self, source: nn.Embedding, slices: nn.ModuleList, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = (
            source.num_embeddings,
            source.embedding_dim,
            source.padding_idx,
        )
        self.sizes, self.leaves, self.slices = sizes, {"weight": 0}, slices
        start = 0
        for part, size in zip(cast("list[VocabularySlice]", slices), sizes, strict=True):
            local = -1 if source.padding_idx is None else source.padding_idx - start
            part.padding = local if 0 <= local < size else None
            start += size
        self.train(source.training)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids of any shape → `[..., embedding_dim]`."""
        rows: torch.Tensor | None = None
        for part, local, inside in self.local(ids):
            # FSDP2 frees and reduces a unit when its inputs have gradients, but ids have none
            found = part(
                local, torch.zeros(1, device=ids.device, requires_grad=True) if torch.is_grad_enabled() else None
            )
            rows = found if rows is None else torch.where(inside.unsqueeze(-1), found, rows)
        assert rows is not None
        return rows


class _Lookup(torch.autograd.Function):
    """Look up rows of a weight. The third input only receives a gradient, after the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        weight: torch.Tensor,
        ids: torch.Tensor,
        anchor: torch.Tensor | None,
        padding: int | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding = weight.shape[0], -1 if padding is None else padding
        return F.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        (ids,) = ctx.saved_tensors
        rows = (
            torch.ops.aten.embedding_dense_backward(grad, ids, ctx.rows, ctx.padding, False)
            if ctx.needs_input_grad[0]
            else None
        )
        return rows, None, grad.new_zeros(1) if ctx.needs_input_grad[2] else None, None


class _Statistics(torch.autograd.Function):
    """lse_n = log Σ_v exp(x_nv) and x_n,target; dx = softmax(x) · dlse + onehot(target) · dtarget, written over x."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        lse = logits.logsumexp(dim=-1)
        ctx.save_for_backward(logits, lse, targets)
        # A copy, because FSDP2 hooks a unit's outputs and warns about views.
        return lse, logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1).clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, lse_grad: torch.Tensor, target_grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        logits, lse, targets = ctx.saved_tensors
        # In place: under checkpoint only this backward uses these logits.
        grad = logits.sub_(lse.unsqueeze(-1)).exp_().mul_(lse_grad.unsqueeze(-1))
        return grad.scatter_add_(-1, targets.unsqueeze(-1), target_grad.unsqueeze(-1)), None


def _split_parameter(parameter: nn.Parameter, sizes: tuple[int, ...], dim: int) -> list[nn.Parameter]:
    """Split a parameter; contiguous slices share its memory, others are copied, because FSDP2 needs contiguous
    parameters.
    """
    # .data again: otherwise slices of one storage share a version counter, and each would see the others' in-place
    # updates.
    parts = [part.contiguous().data for part in torch.split(parameter.data, list(sizes), dim)]
    return [nn.Parameter(part, requires_grad=parameter.requires_grad) for part in parts]
