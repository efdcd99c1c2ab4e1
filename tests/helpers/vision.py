"""Tiny vision-language models."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

_TEXT = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 120,
}  # fmt: skip
_SIGHT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TOKENS = {"image_token_id": 107, "video_token_id": 108, "vision_start_token_id": 104, "vision_end_token_id": 105}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_PATCHES = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2, "image_size": 32}
VISION: dict[str, dict[str, Any]] = {
    "LlavaForConditionalGeneration": {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "clip_vision_model", **_SIGHT, "image_size": 32, "patch_size": 8},
        "image_token_index": 100,
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": {**_TEXT, "rope_parameters": _ROPE}, **_TOKENS,
        "vision_config": {
            **_PATCHES, "intermediate_size": 64, "out_hidden_size": 32, "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    },
    "Qwen3VLForConditionalGeneration": {
        "text_config": {**_TEXT, "head_dim": 8, "rope_parameters": _ROPE}, **_TOKENS,
        "vision_config": {
            **_PATCHES, "intermediate_size": 64, "out_hidden_size": 32, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    },
    "Gemma3ForConditionalGeneration": {
        "text_config": {**_TEXT, "head_dim": 8}, "vision_config": {**_SIGHT, "image_size": 32, "patch_size": 8},
        "mm_tokens_per_image": 4, "image_token_index": 100, "boi_token_index": 101, "eoi_token_index": 102,
    },
    "MllamaForConditionalGeneration": {
        "text_config": {**_TEXT, "cross_attention_layers": [1], "pad_token_id": 0}, "image_token_index": 121,
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_global_layers": 1,
            "attention_heads": 4, "vision_output_dim": 64, "image_size": 32, "patch_size": 8, "max_num_tiles": 2,
            "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
    },
    "IdeficsForVisionText2Text": {
        **_TEXT, "cross_layer_interval": 1, "alpha_initializer": "ones", "use_resampler": False,
        "vision_config": {**_SIGHT, "embed_dim": 32, "image_size": 32, "patch_size": 8},
    },
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "text_config": {
            **_TEXT, "head_dim": 8, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [16, 8],
            "mlp_layer_types": ["dense", "sparse"], "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
        },
        "image_token_id": 107, "video_token_id": 108, "image_start_token_id": 104, "image_end_token_id": 105,
        "vision_config": {**_PATCHES, "intermediate_size": 64},
    },
    "Molmo2ForConditionalGeneration": {
        "text_config": {**_TEXT, "head_dim": 8, "additional_vocab_size": 8}, "image_patch_id": 107,
        "image_start_token_id": 104,
        "vision_config": {**_SIGHT, "num_key_value_heads": 4, "head_dim": 8, "image_size": [32, 32], "patch_size": 8},
        "adapter_config": {
            "vision_feature_layer": [1, 0], "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4,
            "head_dim": 8, "intermediate_size": 64, "text_hidden_size": 32,
        },
    },
    "Gemma4ForConditionalGeneration": {
        "text_config": {
            **_TEXT, "head_dim": 8, "global_head_dim": 8, "vocab_size_per_layer_input": 120,
            "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
        },
        "vision_config": {
            **_SIGHT, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 8, "pooling_kernel_size": 2,
            "position_embedding_size": 64, "image_size": 32,
        },
        "audio_config": None, "image_token_id": 107, "video_token_id": 108, "audio_token_id": 109, "boi_token_id": 104,
    },
}  # fmt: skip
"""Class of the model → sizes that make it tiny."""


def tiny_vision(name: str) -> nn.Module:
    """The same weights at each call, in float64."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    config = cls.config_class(**VISION[name])
    config._experts_implementation = "eager"  # the usual one has no float64
    model: nn.Module = cls._from_config(config).double().train().requires_grad_()
    for parameter in model.parameters():  # some gates and projections start as zeros
        parameter.data += 0.02 * torch.randn(parameter.shape, dtype=torch.float64)
    return model
