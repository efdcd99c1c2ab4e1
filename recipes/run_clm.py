"""Train a causal language model under a memory limit.

    accelerate launch --config_file accelerate_configs/osdp_cpu.yaml recipes/run_clm.py recipes/gpt2/demo.yaml --output_dir out

The YAML file holds any of the arguments below and those of `TrainingArguments`; flags win over it.
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from pathlib import Path

import torch
from datasets import DatasetDict, disable_progress_bars
from recipe_arguments import DataArguments, ModelArguments, OSDPArguments, parse_arguments
from text_data import load_text, to_blocks, train_tokenizer, wrap_tokenizer
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_osdp import Trainer
from hf_osdp.integration.exits import run_script
from hf_osdp.runtime.agree import on_rank_zero

LONGEST_DEFAULT_BLOCK = 1024


def main() -> None:
    """Text, tokenizer, model, plan, training, evaluation, saved model."""
    types = (ModelArguments, DataArguments, OSDPArguments, TrainingArguments)
    model_args, data_args, osdp_args, args = parse_arguments(types, sys.argv[1:])
    if not (args.do_train or args.do_eval):
        raise ValueError("Nothing to do; give do_train, do_eval or both.")
    quiet_other_ranks(args)
    set_seed(args.seed)
    checkpoint = find_checkpoint(args)

    with args.main_process_first(desc="text"):
        text = load_text(data_args)
    tokenizer = load_tokenizer(model_args, text, checkpoint)
    config = load_config(model_args, tokenizer)
    block_size = choose_block_size(data_args.block_size, config)
    osdp = osdp_args.options(block_size)
    with args.main_process_first(desc="tokens"):
        source = data_args.train_file or data_args.dataset_name or "Python's language reference"
        blocks = to_blocks(text, tokenizer, block_size, source=source)
    train_set, eval_set = limited(blocks, data_args)
    model = load_model(model_args, config, tokenizer)

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_set if args.do_train else None,
        eval_dataset=eval_set,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        osdp=osdp,
    )
    if args.do_eval:
        say(args, f"perplexity before training: {perplexity(trainer):.2f}" if args.do_train else f"perplexity: {perplexity(trainer):.2f}")
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
        if args.do_eval:
            say(args, f"perplexity after training: {perplexity(trainer):.2f}")
        say(args, f"model saved in {args.output_dir}")
    trainer.accelerator.end_training()


def quiet_other_ranks(args: TrainingArguments) -> None:
    """One voice: progress and notes come from rank 0. Errors come from everyone."""
    warnings.filterwarnings("ignore", message=r".*pin_memory.*")
    # GPT-2's class name does not say which loss it has, and the note that follows sounds like a fault.
    logging.getLogger("transformers.modeling_utils").addFilter(lambda record: "`loss_type=None`" not in record.getMessage())
    if args.process_index != 0:
        disable_progress_bars()
        logging.getLogger().setLevel(logging.ERROR)


def say(args: TrainingArguments, text: str) -> None:
    """Print on rank 0."""
    if args.process_index == 0:
        print(text, flush=True)


def find_checkpoint(args: TrainingArguments) -> str | None:
    """The checkpoint to go on from: a folder, or with `true` the last one in the output folder, if there is one."""
    wanted = args.resume_from_checkpoint
    if wanted is None or str(wanted).lower() == "false":
        return None
    if str(wanted).lower() in ("true", "last"):
        return get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    if not (Path(wanted) / "trainer_state.json").is_file():
        raise ValueError(f"resume_from_checkpoint={wanted} holds no checkpoint; give a checkpoint-N folder, or true for the last one.")
    return wanted


def load_tokenizer(model_args: ModelArguments, text: DatasetDict, checkpoint: str | None) -> PreTrainedTokenizerBase:
    """The named tokenizer, the model's, the checkpoint's, or one trained on the text."""
    name = model_args.tokenizer_name or model_args.model_name_or_path or checkpoint
    if name is not None:
        try:
            return AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ValueError(f"Cannot load the tokenizer {name}: {error}") from None
    return wrap_tokenizer(on_rank_zero(lambda: train_tokenizer(text["train"]["text"], model_args.vocab_size)))


def load_config(model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The model's configuration; from scratch, with the tokenizer's vocabulary."""
    name = model_args.model_name_or_path or model_args.config_name
    if name is not None:
        try:
            config = AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ValueError(f"Cannot load the configuration {name}: {error}") from None
    elif model_args.model_type in CONFIG_MAPPING:
        config = CONFIG_MAPPING[model_args.model_type]()
    else:
        raise ValueError(f"model_type={model_args.model_type!r} is not known to transformers; use one such as gpt2 or llama.")
    if model_args.model_name_or_path is None:
        config.vocab_size = len(tokenizer)
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        override(config, model_args.config_overrides)
    return config


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


def choose_block_size(asked: int | None, config: PreTrainedConfig) -> int:
    """Tokens of one sample, at most as many as the model has positions."""
    positions = getattr(config, "max_position_embeddings", None)
    if asked is None:
        return min(positions or LONGEST_DEFAULT_BLOCK, LONGEST_DEFAULT_BLOCK)
    if positions is not None and asked > positions:
        raise ValueError(f"block_size={asked} is longer than the model's {positions} positions; use at most {positions}.")
    return asked


def limited(blocks: DatasetDict, data_args: DataArguments):
    """The first so many samples of each split, where that was asked for."""
    limits = {"train": data_args.max_train_samples, "validation": data_args.max_eval_samples}
    return tuple(blocks[split].select(range(min(limit or len(blocks[split]), len(blocks[split])))) for split, limit in limits.items())


def load_model(model_args: ModelArguments, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Weights in float32, from the hub, a folder, or the initialisation of the configuration."""
    if model_args.model_name_or_path is None:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, config=config, dtype=torch.float32)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    return model


def perplexity(trainer: Trainer) -> float:
    """exp of the mean loss of a token on the validation text; also saved with the other metrics."""
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 700.0))
    trainer.save_metrics("eval", metrics)
    return metrics["perplexity"]


if __name__ == "__main__":
    run_script(main)
