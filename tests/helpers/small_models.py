"""Make small models of transformers' classes, and samples with labels, by rules for the names of fields and
arguments.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel, ResNetConfig

from hf_osdp.errors import DescriptionError
from hf_osdp.modeling.batch import inner_configs, loss_of
from hf_osdp.tracing.pictures import UsualBatch

SAMPLES, TOKENS, WAVE, PICTURE, VOCABULARY = 8, 24, 3200, 32, 120
MOST_PARAMETERS = 4 * 10**7
_SIZES: dict[str, int] = {
    r"(.*hidden_sizes?(_global)?|d_model|n_embd|dim|.*embed_dims?|embedding_size|word_embed_proj_dim|.*projection_dim|lru_width|emb_dim)": 32,  # noqa: E501
    r"(conv_dim|dims|adapter_(in|out)_dim|adapter_input_size|x4_feat_dim)": 32,
    r"(.*_channels|decoder_hidden_size|encoder_hidden_dim|d_embed|pooler_size)": 32,
    r"(.*intermediate_size|.*ffn_dim|d_ff|d_inner|ffn_hidden_size|hidden_dim|n_inner|.*intermediate_dim)": 64,
    r"extract_layers": 1,
    r"(num_.*layers|n_layers?|num_layer|(encoder|decoder|.*_)?layers|num_blocks|depth)": 2,
    r"(.*attention_heads(_per_layer)?|(mamba_)?n_heads?|num_heads|rotary_dim)": 4,
    r"(.*num_key_value_heads(_per_layer)?|multi_query_group_num|.*num_kv_heads)": 2,
    r"(head_dim|qk_rope_head_dim|context_size)": 8,
    r"(.*head_dim|mamba_d_head|d_kv|d_head|attention_head_size|qk_nope_head_dim|kv_channels|q_lora_rank|kv_lora_rank|expand_v)": 16,  # noqa: E501
    r".*vocab_size(_per_layer_input)?": VOCABULARY,
    r"(mm_tokens_per_image|num_query_tokens)": 4,
    r"(max_.*positions?(_embeddings)?|n_positions)": 64,
    r"(num_(local_)?experts|n_routed_experts|moe_num_experts)": 4,
    r"window_size": 4,
    r"(num_experts_per_tok|moe_topk|moe_k|num_selected_experts|num_frames|moe_top_k)": 2,
    r"(n_group|topk_group|first_k_dense_replace|num_nextn_predict_layers|num_mtp_layers|depths)": 1,
    r"(attention_window|num_queries)": 8,
    r"(image_size|input_size)": PICTURE,
    r"(patch_size|tubelet_size)": 8,
    r"(num_groups|upsample_groups|num_windows|ple_embed_dim|num_filters)": 4,
    r"(d_latents|num_latents)": 32,
    r"num_self_attends_per_block": 2,
    r"(.*_group_vocab|ngram_vocab_size_base)": VOCABULARY,
}
"""Patterns of names of fields → their values, if the default is larger."""
_CONVOLUTIONS = (
    "vertical_long_to_small_conv_{}ratio", "horizontal_small_to_long_conv_{}ratio", "symmetric_conv_long_{}ratio",
)  # fmt: skip
_ABSENT: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "indexer_n_heads": 2,
    "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2,
    "top_k_experts": 2, "vocabulary_map": {"<image>": 99, "<|extra_200|>": 98}, "projector_scale_factors": [1.0],
    "class_thresholds": [0.5] * 100, "class_order": [*range(100)], "scale_factor_list": [1, 2, 4, 8],
    "kernel_list": [3, 2, 2], "upsample_out_channels": [32], "conv_out_channels": [32],
    "intraclass_block_config": {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0]}
    | {name.format(size): [3, 1, 1] for name in _CONVOLUTIONS for size in ("long", "mid", "short")},
}  # fmt: skip
"""Fields of which the default is None or empty, with which no model is made."""
_GIVEN: dict[str, dict[str, Any]] = {
    "BeitForSem.*|dpt": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "backbone_out_indices": [0, 1, 2, 3]},
    "DetrForSegmentation": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 8},
    "ReformerModelWithLMHead": {"is_decoder": True},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "(cosmos3_edge|ernie4_5_vl_moe)_text": {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
    "cvt": {"depth": [1, 2, 3]},
    "diffusion_gemma_text": {"num_experts": 4, "moe_intermediate_size": 32},
    "(donut-)?swin|mobilevitv2": {"image_size": 64, "window_size": 2},
    "efficientnet": {"width_coefficient": 0.05, "hidden_dim": 64},
    "levit": {"image_size": 64, "patch_size": 16},
    "mamba2|neomme": {"head_dim": 16, "n_groups": 2},
    "mistral_large4_text": {"no_rope_layers": [1] * 4},
    "mllama_(text|vision)_model": {
        "intermediate_layers_indices": [0, 1], "vision_output_dim": 96, "cross_attention_layers": [1],
    },
    "molmo2_(adapter|vision)": {"vision_feature_layer": [0, 1], "image_size": [32, 32]},
    "perceiver": {"num_cross_attention_heads": 1},
    "pp_doclayout_v2_reading_order|PPDocLayoutV2ReadingOrderConfig": {"max_2d_position_embeddings": 1024},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 6], "hash_seed": 0},
    "step3p5": {"sliding_window": 8},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
}  # fmt: skip
"""Types of configurations, or classes of them or of models → fields for which the rules give other values."""
_MISSING: dict[str, Any] = {
    "rope_theta": 1e4, "vision_start_token_id": 102, "decoder_start_token_id": 1, "num_key_value_heads": 4,
    "yes_token_index": 5, "no_token_index": 6, "clip_qkv": 8.0,
}  # fmt: skip
"""Fields that these configurations do not have, though their models read them."""
_READ = "DbrxAttentionConfig|qwen.*omni.*thinker|speech-encoder-decoder|moonshine_streaming|shieldgemma2"
_LAYERS = r"num_hidden_layers|n_layers?|num_layers|(encoder|decoder)_layers|depth"


def small(config: PreTrainedConfig, model: str = "") -> PreTrainedConfig:
    """Return a configuration of the same class with small sizes for a class of models; what the class derives from
    sizes is derived again.
    """
    usual, given = type(config)(), {}
    layers, kept = _kept_layers(config)
    defaults = {field.name: field.default for field in dataclasses.fields(config) if field.init}
    for name in defaults:
        own = type(config).attribute_map.get(name, name)
        value, known = vars(config).get(own), vars(usual).get(own)
        is_for_layers = isinstance(value, (list, tuple)) and len(value) == layers
        is_derived = (
            defaults.get(name) is None
            and not isinstance(value, PreTrainedConfig)
            and value == known
            and name != "attention_types"
        )
        if name in _ABSENT and value in (None, ()):
            given[name] = _ABSENT[name]
        if value is None or (is_derived and not is_for_layers):
            continue
        if isinstance(value, int) and re.fullmatch(_LAYERS, name):
            made: Any = min(value, len(kept))
        elif name == "num_key_value_heads" and value == vars(config).get("num_attention_heads"):
            made = _small("num_attention_heads", value)
        elif name == "d_model" and "encoder_n_points" in defaults:
            made = min(value, 64)  # GroupNorm(32) of one channel and pixel gives 0, and gradients of rounding alone
        elif name == "stem_channels" and "block_configs" in defaults:
            made = value  # the blocks have channels of their own
        else:
            made = _small(name, type(value)(value[index] for index in kept) if is_for_layers else value)
        if isinstance(value, PreTrainedConfig) or made != known:
            given[name] = made
    if len(outputs := _outputs(config)) > 1:
        given["out_indices"] = (
            outputs if max(outputs) <= 4 or "block_configs" in defaults else [*range(1, len(outputs) + 1)]
        )
    names = (config.model_type, type(config).__name__, model)
    for kind, fields in {**_GIVEN, _READ: _MISSING}.items():
        if any(re.fullmatch(kind, name) for name in names):
            given |= fields
    return type(config)(**given)


def _outputs(config: Any) -> list[int]:
    """Return the layers or stages whose outputs a backbone returns."""
    return list(getattr(config, "out_indices", None) or [])


def _kept_layers(config: PreTrainedConfig) -> tuple[int, list[int]]:
    """Return the number of layers, and the first of each kind, by the fields with a value for each layer; at least
    two.
    """
    values = vars(config)
    for layers in sorted(
        {v for k, v in values.items() if isinstance(v, int) and v > 2 and re.fullmatch(_LAYERS, k)}, reverse=True
    ):
        lists = [list(map(str, v)) for v in values.values() if isinstance(v, (list, tuple)) and len(v) == layers]
        if lists:
            kinds = list(zip(*lists, strict=True))
            kept = sorted({kinds.index(kind) for kind in kinds})
            return layers, kept[:4] if len(kept) > 1 else [0, layers - 1]
    return -1, [*range(max(2, len(_outputs(config))))]


def _small(name: str, value: Any) -> Any:
    """Return a field's value made small, and without random choices."""
    if type(value).__name__ == "TimmBackboneConfig":  # of a package that may not be there
        return small(ResNetConfig(layer_type="basic", depths=[1] * 4, out_indices=value.out_indices or [4]))
    if isinstance(value, PreTrainedConfig):
        return small(value)
    if name == "attention_types":  # of GPT-Neo
        return [[value[0][0], 1]]
    if isinstance(value, (list, tuple)):
        is_by_stage = re.fullmatch("num(_attention)?_heads|n_heads", name)
        return type(value)(1 if is_by_stage and isinstance(each, int) else _small(name, each) for each in value)
    if isinstance(value, bool):
        return value and name not in ("apply_spec_augment", "use_cache")
    if isinstance(value, float):
        return 0.0 if re.search(r"drop|mask_(time|feature)_prob|jitter", name) else value
    if not isinstance(value, int):
        return value
    if re.search(r"(token_(id|index)s?|patch_id)$", name):
        return 100 + value % 16 if value >= VOCABULARY else value
    return min(value, next((size for pattern, size in _SIZES.items() if re.fullmatch(pattern, name)), value))


def _completed(config: Any) -> None:
    """Fill in what models read from configurations, in those inside, too."""
    for each in [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]:
        _completed(each)
        for name in ("num_mel_bins", "vocab_size"):
            if hasattr(each, name) and not hasattr(config, name):
                setattr(config, name, getattr(each, name))
    values = vars(config)
    _complete_vision(config, values)
    if values.get("vocab_size", 0) is None:
        config.vocab_size = VOCABULARY
    for name in ("image_token_index", "video_token_index"):
        if values.get(name, 0) is None:
            setattr(config, name, VOCABULARY - 1)
    if values.get("pad_token_id") is None:
        config.pad_token_id = 0
    if not hasattr(config, "image_size"):
        config.image_size = PICTURE
    if values.get("languages"):
        config.default_language = config.languages[0]
    if values.get("layer_types", 0) is None and isinstance(values.get("num_hidden_layers"), int):
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    if values.get("mlp_layer_types", 0) is None:
        config.mlp_layer_types = ["dense"] + ["sparse"] * (config.num_hidden_layers - 1)
    config._experts_implementation = "eager"
    if isinstance(values.get("hidden_size"), int) and isinstance(values.get("num_attention_heads"), int):
        _complete_heads(config, values)


def _complete_vision(config: Any, values: dict[str, Any]) -> None:
    """Derive sizes of vision towers, and the layers of which their features are, from the small sizes."""
    if values.get("window_size") and values.get("spatial_merge_size"):
        config.window_size = config.patch_size * config.spatial_merge_size
    if values.get("pixel_shuffle_ratio") and "projector_input_dim" in values:
        config.intermediate_size = int(config.hidden_size / config.pixel_shuffle_ratio**2)
        config.projector_input_dim = config.projector_output_dim = config.vision_output_dim = config.hidden_size
    for name in ("vision_feature_layer", "vision_feature_layers"):
        if isinstance(values.get(name), (list, tuple)):
            setattr(config, name, [-2, -1])


def _complete_heads(config: Any, values: dict[str, Any]) -> None:
    """Derive the number and width of heads from the sizes, and the sections of rotary embeddings from the width."""
    width, heads = values["hidden_size"] // values["num_attention_heads"], values["num_attention_heads"]
    for name, derived in (("head_dim", width), ("num_key_value_heads", heads)):
        if values.get(name, 0) is None:
            setattr(config, name, derived)
    rope = values.get("rope_parameters") or {}
    if "rope_type" in rope:  # models have a default for absent sections
        pairs = int((values.get("head_dim") or width) * rope.get("partial_rotary_factor", 1.0)) // 2
        if sum(rope.get("mrope_section") or [0]) != pairs:
            rope["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]


def built(name: str) -> PreTrainedModel:
    """Return a small model of a class in float64; the same weights at each call."""
    cls = getattr(transformers, name)
    config = small(cls.config_class(), name)
    _completed(config)
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in cls(config).parameters())
    if numel > MOST_PARAMETERS:
        raise ValueError(f"{numel:,} parameters with small sizes")
    torch.manual_seed(0)
    model: PreTrainedModel = cls(config).double()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    made = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # some start as zeros, which hide differences
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=made)
    return model


def batch_with_loss(model: PreTrainedModel, count: int) -> dict[str, Any]:
    """Return a batch of `count` samples with which the model computes a loss, without labels if it has none with any;
    raise ValueError if none is found.
    """
    problems: list[str] = []
    model = copy.deepcopy(model)  # some keep states
    with InDouble():
        for batch in _possible_batches(model, count):
            try:
                output = model.train()(**part_of(batch, 0, 2))
                loss = output.loss if any("label" in name for name in batch) else loss_of(output)
            except TimeoutError:
                raise
            except Exception as error:  # a model can raise any exception
                problems.append(f"{type(error).__name__}: {error}")
                continue
            if (
                isinstance(loss, torch.Tensor)
                and loss.numel() == 1
                and loss.requires_grad
                and loss.isfinite()
                and loss
            ):
                return batch
            problems.append("no loss")
    raise ValueError(problems[0] if problems else "no labels")


def _possible_batches(model: PreTrainedModel, count: int) -> Iterator[dict[str, Any]]:
    made, without = torch.Generator().manual_seed(2), []
    for inputs in _possible_inputs(model, made, count):
        usual = inputs.pop("labels", None)
        without.append(inputs)
        for labels in _possible_labels(model, usual, made, count):
            yield {**inputs, **(labels if isinstance(labels, dict) else {"labels": labels})}
    for inputs in without:
        for labels in _labels_like_outputs(model, inputs, made):
            yield {**inputs, "labels": labels}
    yield from without


def _labels_like_outputs(model: PreTrainedModel, inputs: dict[str, Any], made: torch.Generator) -> Iterator[Any]:
    """Yield classes for all positions of which the model returns logits, as indices and as vectors of 0 and 1."""
    try:
        with torch.no_grad():
            logits = model(**inputs).logits
    except Exception:  # a model can raise any exception
        return
    classes = torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=made)
    yield classes
    yield nn.functional.one_hot(classes, logits.shape[-1])
    if books := getattr(model.config, "num_codebooks", None):
        yield classes.view(-1, books, classes.shape[-1]).transpose(1, 2)


def part_of(batch: Mapping[str, Any], part: int, parts: int) -> dict[str, Any]:
    """Return one of equal parts of a batch, of which each value's first dimension is cut."""
    size = {name: len(value) // parts for name, value in batch.items()}
    return {name: value[part * size[name] : (part + 1) * size[name]] for name, value in batch.items()}


def _possible_inputs(model: Any, made: torch.Generator, count: int) -> Iterator[dict[str, Any]]:
    """Yield batches: the usual one, with tokens or boxes too, and with pictures or sounds of other shapes."""
    taken = inspect.signature(model.forward).parameters
    most = min(90, getattr(model.config, "vocab_size", None) or 90)
    batch = _usual_inputs(model, made, count, most)
    if getattr(taken.get("input_ids"), "default", None) is inspect.Parameter.empty and "input_ids" not in batch:
        batch["input_ids"] = torch.randint(3, most, (count, TOKENS), generator=made)
    yield dict(batch)
    if (needed := _needed(model, batch, made, count, most)).keys() != batch.keys():
        yield needed
    if books := getattr(model.config, "num_codebooks", None):
        yield {"input_ids": torch.randint(3, most, (count, TOKENS, books + 1), generator=made)}
        yield {"input_ids": torch.randint(3, most, (count * books, TOKENS), generator=made)}
    if "input_ids" in taken and "input_ids" not in batch:
        yield {**batch, "input_ids": torch.randint(3, most, (count, TOKENS), generator=made)}
    if "bbox" in taken:
        batch["bbox"] = torch.tensor([1, 1, 5, 5]).repeat(count, TOKENS, 1)
        yield dict(batch)
    if "spatial_shapes" in taken and "pixel_values" in batch:  # patches of pictures
        yield {
            "pixel_values": torch.randn(
                (count, 16, 3 * getattr(model.config, "vision_config", model.config).patch_size ** 2), generator=made
            ),
            "pixel_attention_mask": torch.ones((count, 16), dtype=torch.long),
            "spatial_shapes": torch.tensor([[4, 4]] * count),
        }
    for name, shape in _shapes(model.config):
        if name in taken:
            given = {**batch, name: torch.randn((count, *shape), generator=made)}
            if name == "flattened_patches":  # which begin with the row and column
                given[name].abs_()
            if name == "input_features" and "attention_mask" in taken:
                yield {**given, "attention_mask": torch.ones(count, shape[0], dtype=torch.long)}
            yield given
    short = min(TOKENS, _positions(model.config))
    text = {name: batch[name][:, :short] for name in ("input_ids", "attention_mask") if name in batch}
    yield {**batch, **text}
    if "input_ids" in taken and "pixel_values" in taken:
        yield {"input_ids": torch.randint(3, most, (count, short), generator=made)}
        yield {**batch, "input_ids": torch.tensor([[101, 5, 6, 7, 102] * 4] * count)}  # two phrases or more
    yield {name: value for name, value in batch.items() if name != "decoder_input_ids"}


def _needed(model: Any, batch: dict[str, Any], made: torch.Generator, count: int, most: int) -> dict[str, Any]:
    """Return a batch with everything that the forward needs: tokens, masks, pictures, and a class for each sample."""
    shapes, made_up = dict(reversed(_shapes(model.config))), dict(batch)
    if "Video" in type(model).__name__:
        shapes["pixel_values"] = (4, *shapes["pixel_values"])
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.default is not parameter.empty or parameter.kind is parameter.VAR_KEYWORD or name in batch:
            continue
        if name in shapes:
            made_up[name] = torch.randn((count, *shapes[name]), generator=made)
        elif name == "classes_structure" or "mask" in name:
            made_up[name] = torch.ones((count, TOKENS) if "mask" in name else count, dtype=torch.long)
        else:
            made_up[name] = torch.randint(
                3, most, (count, getattr(model.config, "task_seq_len", TOKENS)), generator=made
            )
    if "state" in made_up:  # of a robot, with what it sees and does
        made_up["actions"] = torch.randn((count, *shapes["actions"]), generator=made)
        made_up["pixel_values"] = torch.randn((count, 1, *shapes["pixel_values"]), generator=made)
        made_up["pixel_attention_mask"] = torch.ones((count, 1), dtype=torch.bool)
        made_up["input_ids"] = torch.randint(3, most, (count, TOKENS), generator=made)
    if queries := getattr(model.config, "num_query_tokens", 0):
        made_up["input_ids"] = torch.randint(3, most, (count, TOKENS), generator=made)
        if "Video" in type(model).__name__:
            made_up["input_ids"][:, : 4 * queries] = getattr(model.config, "video_token_index", 0)
        else:
            made_up["input_ids"][:, :queries] = getattr(model.config, "image_token_index", 0)
    return made_up


def _positions(config: Any) -> int:
    return min(
        (getattr(each, "max_position_embeddings", None) or TOKENS for each in inner_configs(config)), default=TOKENS
    )


def _usual_inputs(model: Any, made: torch.Generator, count: int, most: int) -> dict[str, torch.Tensor]:
    """Return the package's own batch for the class with random values, or nothing if it has none."""
    length = WAVE if model.main_input_name == "input_values" else TOKENS
    try:
        usual = _with_pictures(model, length)(count)
    except Exception:  # inputs of another kind
        return {}
    batch = {name: value for name, value in usual.items() if isinstance(value, torch.Tensor)}
    for name, value in batch.items():
        if value.is_floating_point():
            batch[name] = torch.randn(value.shape, generator=made)
        elif name == "decoder_input_ids" and length == WAVE:
            batch[name] = torch.randint(3, most, (count, TOKENS), generator=made)
        elif name in ("input_ids", "decoder_input_ids"):
            values = vars(model.config).items()
            placeholders = [v for n, v in values if re.search("image.*(token|patch_id)", n) and isinstance(v, int)]
            random = torch.randint(3, most, value.shape, generator=made)
            kept = torch.isin(torch.stack((value, random)), torch.tensor(placeholders or [-1])).any(0)
            batch[name] = torch.where(kept, value, random)
            if isinstance(end := getattr(model.config, "eos_token_id", None), int):
                batch[name][..., -1] = end  # some classifiers look for it
    return batch


def _with_pictures(model: PreTrainedModel, length: int) -> UsualBatch:
    """Return the usual batch, in rows long enough for a picture."""
    try:
        return UsualBatch(model, length)
    except DescriptionError as error:
        if (needed := re.search(r"no room for .* use at least (\d+)", str(error))) is None:
            raise
        return UsualBatch(model, int(needed[1]))


def _shapes(config: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return names of arguments, and shapes of a sample's pictures, videos and sounds to try for them."""
    channels, bins = getattr(config, "num_channels", 3) or 3, getattr(config, "num_mel_bins", 80) or 80
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or PICTURE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    video = (getattr(config, "num_frames", 2), channels, height, width)
    return [
        ("pixel_values", (channels, height, width)), ("pixel_values", video), ("pixel_values_videos", video),
        ("flattened_patches", (16, 2 + getattr(vision, "patch_embed_hidden_size", 0))), ("state", (32,)),
        ("actions", (50, 32)), ("input_features", (64, bins)), ("input_features", (bins, 64)),
        ("input_values", (WAVE,)), ("audio_values", (1, WAVE)), ("input_values", (3 * WAVE,)),
        ("input_features", (64, 4 * bins)), ("input_features", (bins, 8 * TOKENS)),
    ]  # fmt: skip


def _possible_labels(model: Any, usual: torch.Tensor | None, made: torch.Generator, count: int) -> Iterator[Any]:
    """Yield labels of several shapes: tokens of which some are ignored, classes, numbers, maps, pictures and boxes."""
    kind, most = type(model).__name__, getattr(model.config, "num_labels", None) or 2
    if usual is not None and not usual.is_floating_point():
        known = min(VOCABULARY, getattr(model.config, "vocab_size", None) or VOCABULARY)
        ids = torch.randint(
            0, most if usual.dim() == 1 or "TokenClass" in kind else known, usual.shape, generator=made
        )
        if usual.dim() > 1 and "CTC" not in kind:
            ignored = torch.rand(usual.shape, generator=made) < torch.linspace(0.1, 0.6, count).view(
                -1, *[1] * (usual.dim() - 1)
            )
            ignored[:, -1] = False
            yield ids.masked_fill(ignored, -100)
        yield ids.clamp(min=3) if "CTC" in kind else ids
    taken = inspect.signature(model.forward).parameters
    if "mask_labels" in taken:
        mask = torch.zeros(2, PICTURE, PICTURE)
        mask[0, 8:20, 8:20] = mask[1, 4:12, 16:28] = 1
        yield {"mask_labels": [mask] * count, "class_labels": [torch.tensor([i % most, 1]) for i in range(count)]}
    if re.search("Detection|Segmentation|Detr", kind):
        box, mask = torch.tensor([[0.5, 0.5, 0.4, 0.3], [0.3, 0.6, 0.2, 0.2]]), torch.zeros(2, PICTURE, PICTURE)
        mask[:, 8:20, 8:20] = 1
        yield [
            {"class_labels": torch.tensor([i % most, 1]), "boxes": box + i / 100, "masks": mask} for i in range(count)
        ]
    tokens = torch.randint(0, 50, (count, TOKENS), generator=made)
    yield tokens.masked_fill(torch.rand(tokens.shape, generator=made) < 0.3, -100)
    yield torch.randint(0, most, (count,), generator=made)
    yield torch.randint(0, most, (count, TOKENS), generator=made)
    yield torch.randn(count, generator=made)
    yield torch.rand((count, most), generator=made).round()
    size = getattr(model.config, "image_size", None) or PICTURE
    size = size[0] if isinstance(size, (list, tuple)) else size
    yield torch.randint(0, most, (count, size, size), generator=made)
    yield torch.rand((count, 3, size, size), generator=made)
    yield torch.rand((count, size, size), generator=made)


class InDouble(TorchFunctionMode):
    """Compute in float64 where models change to float32, as most losses do, so that sums of other sizes agree."""

    def __enter__(self) -> InDouble:
        self.__dict__.setdefault("before", []).append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.set_default_dtype(self.before.pop())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        if func is torch.Tensor.float:
            return args[0].double()
        if (
            func is torch.Tensor.backward
        ):  # in which blocks may be recomputed: this mode is off while it handles a call
            engine, given = torch.autograd.Variable._execution_engine, kwargs or {}
            loss, gradient = args[0], args[1] if len(args) > 1 else given.get("gradient")
            first, keep = torch.ones_like(loss) if gradient is None else gradient, bool(given.get("retain_graph"))
            with self:
                return engine.run_backward(
                    (loss,), (first,), keep, False, (), allow_unreachable=True, accumulate_grad=True
                )
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        return func(
            *args,
            **{name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()},
        )
