"""Names of modules and parameters, and slices of operators, which are units of their own."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module"


def canonical_name(name: str) -> str:
    """Return the name of a module or parameter without the parts that torch's `checkpoint_wrapper` inserts."""
    return ".".join(part for part in name.split(".") if part != CHECKPOINT_WRAPPER)


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
