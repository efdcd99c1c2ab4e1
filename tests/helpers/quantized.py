"""Models whose base is in 4 bits by bitsandbytes, made without files."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def in_4_bits(model: nn.Module, **options: Any) -> nn.Module:
    """Quantize a model's linear layers but the head, in place, as `from_pretrained` does with `load_in_4bit`."""
    import bitsandbytes as bnb

    for name, linear in list(model.named_modules()):
        if type(linear) is not nn.Linear or linear is model.get_output_embeddings():
            continue
        dtype = linear.weight.dtype
        layer = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=linear.bias is not None,
            **{"compute_dtype": dtype, "quant_type": "nf4", **options},
        )  # fmt: skip
        layer.load_state_dict(linear.state_dict())
        model.set_submodule(name, layer.to(dtype).to("cpu").requires_grad_(False))
    model.is_loaded_in_4bit = True
    return model


def adapted(model: nn.Module, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """Add LoRA adapters, whose matrices are both random, as after some training."""
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": False,
                                "task_type": "CAUSAL_LM", **options})  # fmt: skip
    found = peft.get_peft_model(model, config, autocast_adapter_dtype=False).train()
    for parameter in found.parameters():
        parameter.data = parameter.data.to(dtype) if parameter.requires_grad else parameter.data
    return found
