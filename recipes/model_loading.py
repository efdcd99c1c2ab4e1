"""Configuration, tokenizer and model: pretrained ones, or from scratch."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from adapters import with_adapters
from recipe_arguments import ModelArguments
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

LONGEST_DEFAULT_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What kind of model a recipe trains."""

    kind: str
    """In words, for errors."""
    examples: str
    """Model types that it knows, for errors."""
    model_class: Any
    """Of transformers, such as `AutoModelForCausalLM`."""
    configs: Container[type]
    """Classes of configurations that there is such a model for."""
    adapter_type: str | None = None
    """What peft calls the task."""


def load_config(model_args: ModelArguments, task: Task) -> PreTrainedConfig:
    """The model's configuration, as it is named or as transformers has it by default.

    Raises:
        ValueError: it cannot be loaded, or is for another kind of model.
    """
    name = model_args.model_name_or_path or model_args.config_name
    if name is not None:
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"Cannot load the configuration {name}: {error}") from None
    elif model_args.model_type in CONFIG_MAPPING:
        config = CONFIG_MAPPING[model_args.model_type]()
    else:
        raise ValueError(f"model_type={model_args.model_type!r} is not known to transformers; use one such as {task.examples}.")
    if type(config) not in task.configs:
        what = f"model_type={config.model_type!r}" if name is None else f"{name} (model_type {config.model_type})"
        raise ValueError(f"{what} is no {task.kind}; use one such as {task.examples}.")
    return config


def load_tokenizer(
    model_args: ModelArguments, checkpoint: str | None, train: Callable[[], PreTrainedTokenizerBase]
) -> PreTrainedTokenizerBase:
    """The named tokenizer, the model's, the checkpoint's, or one that `train` makes."""
    name = model_args.tokenizer_name or model_args.model_name_or_path or checkpoint
    if name is None:
        return train()
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"Cannot load the tokenizer {name}: {error}") from None


def fit_config(config: PreTrainedConfig, model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> None:
    """From scratch: the tokenizer's vocabulary and special tokens, then `config_overrides`. A pretrained model keeps its own.

    Raises:
        ValueError: an override cannot be used, or leaves the tokenizer with more entries than the model.
    """
    if model_args.model_name_or_path is not None:
        return
    config.vocab_size = len(tokenizer)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    for name in ("pad_token_id", "cls_token_id", "sep_token_id"):
        if (number := getattr(tokenizer, name)) is not None and hasattr(config, name):
            setattr(config, name, number)
    override(config, model_args.config_overrides)
    if config.vocab_size < len(tokenizer):
        raise ValueError(
            f"config_overrides has vocab_size={config.vocab_size}, less than the {len(tokenizer)} entries of the tokenizer;"
            f" use at least {len(tokenizer)}."
        )


def override(config: PreTrainedConfig, overrides: str | None) -> None:
    """Apply `n_layer=4,n_embd=128`, each value in the type that the configuration has it in."""
    for item in (overrides or "").split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not item.strip():
            continue
        if not equals or not hasattr(config, name):
            raise ValueError(f"config_overrides has {item!r}; write name=value with a name that {type(config).__name__} has.")
        old = getattr(config, name)
        try:
            new = value.lower() in ("true", "1") if isinstance(old, bool) else value if old is None else type(old)(value)
        except (TypeError, ValueError):
            raise ValueError(f"config_overrides has {item!r}, but {name} takes a {type(old).__name__}, such as {old!r}.") from None
        setattr(config, name, int(new) if old is None and str(new).isdigit() else new)


def choose_block_size(
    asked: int | None, config: PreTrainedConfig, *, name: str = "block_size", longest: int = LONGEST_DEFAULT_BLOCK
) -> int:  # fmt: skip
    """Tokens of one sample, at most as many as the model has positions; `name` is the argument, `longest` its greatest default."""
    positions = getattr(config, "max_position_embeddings", None)
    if asked is None:
        return min(positions or longest, longest)
    if positions is not None and asked > positions:
        raise ValueError(f"{name}={asked} is longer than the model's {positions} positions; use at most {positions}.")
    return asked


def load_model(
    model_args: ModelArguments, task: Task, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:  # fmt: skip
    """Weights in float32, from the hub, a folder, or the initialisation of the configuration; with adapters, if wanted."""
    if model_args.model_name_or_path is None:
        return task.model_class.from_config(config, dtype=torch.float32)
    model, loaded = task.model_class.from_pretrained(
        model_args.model_name_or_path, config=config, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
    )
    if len(tokenizer) > (entries := model.get_input_embeddings().num_embeddings):
        if model_args.lora_rank is not None:
            raise ValueError(
                f"The tokenizer has {len(tokenizer)} entries, the model {entries}, and adapters train no embeddings;"
                " use the model's own tokenizer, or leave lora_rank out."
            )
        model.resize_token_embeddings(len(tokenizer))
    return with_adapters(model, model_args, task.adapter_type, new=loaded["missing_keys"])
