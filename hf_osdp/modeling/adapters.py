"""LoRA adapters on a model that is planned. Needs the extra `peft`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..errors import DescriptionError


def with_lora(model: nn.Module, rank: int, target_modules: Sequence[str] = ()) -> nn.Module:
    """Put LoRA adapters into a model on the meta device, as `peft` does, and freeze the rest.

    Args:
        model: on the meta device; it is changed.
        rank: of the adapters' two matrices, `[rank, in]` and `[out, rank]`.
        target_modules: endings of the names of the projections that get one; none takes every linear one but the head.

    Returns:
        The model that `peft` wraps around it.

    Raises:
        ValueError: `rank` is below 1, or peft is not installed.
        DescriptionError: no projection has such a name.
    """
    if rank < 1:
        raise ValueError(f"A LoRA rank of {rank} leaves nothing to train; use at least 1.")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError('LoRA adapters need peft; install it with: pip install "hf_osdp[peft]".') from None
    options = LoraConfig(r=rank, target_modules=list(target_modules) or "all-linear")
    try:
        return get_peft_model(model, options, low_cpu_mem_usage=True)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise DescriptionError(f"LoRA adapters cannot be put into {type(model).__name__}: {reason}.") from None
