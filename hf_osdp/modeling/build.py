"""Build the model of a transformers configuration on the meta device, add adapters, and enable activation
checkpointing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import CheckpointingError, DescriptionError, first_line
from .units import class_of

_SEQ_TO_SEQ = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
_BY_PREFERENCE = (
    "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageClassification",
    "AutoModelForAudioClassification",
    "AutoModelForImageTextToText", "AutoModelForSequenceClassification", "AutoModel",
)  # fmt: skip


def build_on_meta(config: object, auto_class: object = None) -> nn.Module:
    """Build a configuration's model on the meta device; tied weights stay tied.

    `auto_class` is an auto class, a model class, or the name of either; None uses the first of `config.architectures`,
    else the language model, classifier or bare model that the configuration supports. Raise DescriptionError if there
    is none, or building it fails.
    """
    from transformers.initialization import no_init_weights

    cls: Any = _model_class(config, auto_class)
    build = cls.from_config if hasattr(cls, "from_config") else cls._from_config
    try:
        with torch.device("meta"), no_init_weights():
            model: nn.Module = build(config)
        model.tie_weights()  # type: ignore[operator]  # part of the skipped initialization
        return model
    except Exception as error:  # a model's `__init__` may raise any for a configuration with a wrong value
        raise DescriptionError(
            f"{cls.__name__} cannot be built from {type(config).__name__}: {first_line(error)}. Correct the"
            " configuration, or pass auto_class or the model itself."
        ) from error


def with_lora(model: nn.Module, rank: int, target_modules: Sequence[str] = ()) -> nn.Module:
    """Add LoRA adapters to a model on the meta device with `peft`, and freeze the rest. Needs the extra `peft`.

    An adapter's two matrices are `[rank, in]` and `[out, rank]`. `target_modules` are endings of names of the
    projections that get an adapter; if empty, all linear ones except the head. Change the model, and return peft's
    wrapper around it.
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
        raise DescriptionError(
            f"LoRA adapters cannot be added to {type(model).__name__}: {first_line(error)}."
        ) from None


def checkpoint_blocks(model: nn.Module, block_classes: Sequence[str], *, trains: bool = False) -> None:
    """Enable non-reentrant activation checkpointing of a model's blocks, in place; raise CheckpointingError if that is
    impossible.

    A transformers model does it itself; in other models, blocks of these classes run under `torch.utils.checkpoint`,
    which replays random numbers, as dropout needs, if the model really `trains`.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or getattr(
        model, "gradient_checkpointing_enable", None
    )
    if enable is not None:
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            raise CheckpointingError(f"{first_line(error)}. Leave activation checkpointing off.") from None
        return
    blocks = [module for module in model.modules() if class_of(module).__name__ in block_classes]
    if not blocks:
        raise CheckpointingError(f"{class_of(model).__name__} has no blocks to checkpoint; give block_classes.")
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=trains)


def disable_cache(model: nn.Module) -> list[Any]:
    """Switch the key-value cache off, which only takes memory in training and which a recomputed block would extend
    twice; a vision-language model's text part has its own switch. Return the configurations in which it was on.
    """
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    switched = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    for config in switched:
        config.use_cache = False
    return switched


def drops_layers(model: nn.Module) -> bool:
    """Return whether forward leaves out layers at random (LayerDrop), by transformers' names for it."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    settings = (setting for config in configs.values() for setting in getattr(config, "__dict__", {}).items())
    return any(name.endswith("layerdrop") and bool(value) for name, value in settings)


def is_checkpointed(model: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def _model_class(config: object, auto_class: object) -> object:
    import transformers

    if auto_class is not None and not isinstance(auto_class, str):
        return auto_class
    if auto_class is not None:
        if not hasattr(transformers, auto_class):
            raise DescriptionError(f"transformers has no class {auto_class!r}; use for example AutoModelForCausalLM.")
        return getattr(transformers, auto_class)
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    candidates: tuple[str, ...] = _BY_PREFERENCE
    if getattr(config, "is_encoder_decoder", False):
        candidates = (*_SEQ_TO_SEQ, *_BY_PREFERENCE)
    elif not getattr(config, "is_decoder", False):  # BERT-like models also have a causal head, which needs is_decoder
        candidates = ("AutoModelForMaskedLM", *_BY_PREFERENCE)
    for name in candidates:
        cls = getattr(transformers, name, None)
        if cls is not None and type(config) in cls._model_mapping:
            return cls
    raise DescriptionError(
        f"No model class is known for {type(config).__name__}; pass auto_class or the model itself."
    )
