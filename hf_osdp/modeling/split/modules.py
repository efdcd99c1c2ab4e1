"""Linear operators in slices; each slice is a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from ..parts import LinearSlice


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' `Conv1D`, without importing transformers."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


class SplitLinear(nn.Module):
    """An `nn.Linear` or GPT-2 `Conv1D` whose output features are computed slice by slice and concatenated.

    Outputs are bitwise equal to the whole operator's if the BLAS uses one kernel for both widths; in float64 MKL uses
    another, which rounds the last digits differently. The slices take the source's weights; do not use the source
    afterwards.
    """

    slices: nn.ModuleList
    sizes: tuple[int, ...]
    """Output features of each slice."""
    leaves: dict[str, int]
    """Parameters of the whole operator, with the dimension in which each is split."""

    def __init__(self, source: nn.Module, slices: int) -> None:
        super().__init__()
        transposed = is_conv1d(source)
        dim = 1 if transposed else 0
        weight, bias = cast(nn.Parameter, source.weight), cast("nn.Parameter | None", source.bias)
        self.in_features, self.out_features = weight.shape[1 - dim], weight.shape[dim]
        self.leaves = {"weight": dim} if bias is None else {"weight": dim, "bias": 0}
        weights = _split_parameter(weight, slices, dim)
        self.sizes = tuple(part.shape[dim] for part in weights)
        biases: Sequence[nn.Parameter | None] = [None] * slices if bias is None else _split_parameter(bias, slices, 0)
        self.slices = nn.ModuleList(
            LinearSlice(w, b, transposed=transposed) for w, b in zip(weights, biases, strict=True)
        )
        self.train(source.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` → `[..., out_features]`."""
        return torch.cat([part(x) for part in self.slices], dim=-1)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name in ("weight", "bias") and "leaves" in self.__dict__:
            raise AttributeError(
                f"{type(self).__name__} has no {name!r}: it is split into {len(self.sizes)} slices; leave it whole."
            )
        return super().__getattr__(name)


def _split_parameter(parameter: nn.Parameter, slices: int, dim: int) -> list[nn.Parameter]:
    """Split a parameter into slices, as equal as possible, with memory of their own: FSDP2 frees what it shards, and a
    view of the whole weight would keep all of it.
    """
    parts = torch.tensor_split(parameter.detach(), slices, dim)
    copies = [part.clone(memory_format=torch.contiguous_format) for part in parts]
    return [nn.Parameter(copy, requires_grad=parameter.requires_grad) for copy in copies]
