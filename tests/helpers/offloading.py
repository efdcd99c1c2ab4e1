"""The two ways in which a block's activations wait on the host."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hf_osdp.modeling.activations import offload
from hf_osdp.modeling.wrapping import recompute

Way = Callable[[nn.Module], None]


def recompute_and_offload(module: nn.Module) -> None:
    recompute(module)
    offload(module)


WAYS: dict[str, Way] = {"offload": offload, "recompute and offload": recompute_and_offload}
