"""Split a model, or a copy of it; its changed parts for the rest of the package."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch import nn

from ...errors import PlanError
from ...planner.split import ModelSplit
from .loss_chunks import ChunkedHead, chunk_loss
from .loss_chunks import only_loss_read as only_loss_read
from .names import is_split
from .operators import split_operators


def apply_split(model: nn.Module, split: ModelSplit, *, gathers: bool = True) -> None:
    """Split a model in place, before it is sharded, unless it is split already; raise as `split_operators` and
    `chunk_loss`. Refuse slices of a model that `gathers` no unit: they save nothing, and state dicts would have their
    names.
    """
    if split.sliced and not gathers:
        raise PlanError("The plan has operators in slices, but no unit is sharded or on the host; plan again.")
    if split.sliced and not is_split(model):
        split_operators(model, split.sliced)
    if split.loss_chunks > 1:
        chunk_loss(model, split.loss_chunks)


def split_copy(model: nn.Module, split: ModelSplit) -> nn.Module:
    """Return a split copy on the meta device; the model is unchanged. Raise as `apply_split`."""
    memo: dict[int, object] = {
        id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()
    }
    memo |= {id(b): b.detach().to("meta") for b in model.buffers()}
    copied = copy.deepcopy(model, memo)
    apply_split(copied, split)
    return copied


def losses_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that compute losses of a split model, which are compiled beside its blocks."""
    return (module.loss for module in model.modules() if isinstance(module, ChunkedHead))
