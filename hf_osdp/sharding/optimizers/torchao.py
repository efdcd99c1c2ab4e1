"""torchao's optimizers with quantized states."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...planner.optimizers import LOW_BIT
from ...planner.training_job import OptimizerSpec
from .kind import Kind


class Torchao(Kind):
    """Their states are saved and loaded in float32, on the host.

    Quantized again in the same blocks, Fp8 states are restored exactly; 8-bit and 4-bit states too, except blocks
    whose largest element is negative, which their tables round.
    """

    packages = ("torchao.optim.",)
    lr_is_tensor = True

    def known(self, device_type: str = "cuda") -> OptimizerSpec | None:
        """Return what it holds; None without quantized states, and for amsgrad, which has a third state."""
        names = [
            cls.__name__.lower() for cls in type(self.optimizer).__mro__ if cls.__module__.startswith(self.packages)
        ]
        known = (LOW_BIT.get(name.replace("adamw", "adam").replace("adam", "adamw")) for name in names)
        spec = next(filter(None, known), None)
        # transformers passes text from `optim_args`, with which torchao fails
        block_size = getattr(self.optimizer, "block_size", None)
        if spec is None or self.optimizer.defaults["amsgrad"] or not isinstance(block_size, int):
            return None
        return spec.with_block_size(block_size)

    def saved_states(self, parameter: nn.Parameter, shown: dict[str, Any]) -> dict[str, Any]:
        return {key: value.dequantize().cpu() if _is_quantized(value) else value for key, value in shown.items()}

    def load_states(self, parameter: nn.Parameter, saved: dict[str, Any]) -> dict[str, Any]:
        held = self.optimizer.state.get(parameter, {})
        loaded = super().load_states(parameter, saved)
        for key in [key for key in loaded if _is_quantized(held.get(key))]:
            loaded[key] = held[key].copy_(loaded[key].to(held[key].device))
        return loaded


def _is_quantized(value: object) -> bool:
    return type(value).__module__.startswith(Torchao.packages)
