"""Train a causal language model under a memory limit.

    accelerate launch --config_file accelerate_configs/osdp_cpu.yaml recipes/run_clm.py recipes/gpt2/demo.yaml --output_dir out

The YAML file holds any of the arguments below and those of `TrainingArguments`; flags win over it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch
from model_loading import Task, choose_block_size, fit_config, load_config, load_model, load_tokenizer
from recipe_arguments import ModelArguments, OSDPArguments, parse_arguments
from streamed_text import StreamArguments, blocks_of, lines_of, text_of
from trained_tokenizers import train_causal_tokenizer
from training import begin, train_and_evaluate
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, TrainingArguments, default_data_collator

from hf_osdp import Trainer
from hf_osdp.integrations.launch import run_script

TASK = Task(
    kind="causal language model",
    examples="gpt2 or llama",
    model_class=AutoModelForCausalLM,
    configs=MODEL_FOR_CAUSAL_LM_MAPPING,
    adapter_type="CAUSAL_LM",
)


def main() -> None:
    """Text, tokenizer, model, plan, training, evaluation, saved model."""
    types = (ModelArguments, StreamArguments, OSDPArguments, TrainingArguments)
    model_args, data_args, osdp_args, args = parse_arguments(types, sys.argv[1:])
    checkpoint = begin(args)
    if args.do_train:
        data_args.check_steps(args.max_steps)
    config = load_config(model_args, TASK)

    with args.main_process_first(desc="text"):
        text = text_of(data_args)
    tokenizer = load_tokenizer(model_args, checkpoint, lambda: train_causal_tokenizer(lines_of(text), model_args.vocab_size))
    fit_config(config, model_args, tokenizer)
    block_size = choose_block_size(data_args.block_size, config)
    with args.main_process_first(desc="tokens"):
        blocks = blocks_of(text, tokenizer, block_size, data_args, seed=args.seed, evaluates=args.do_eval)

    trainer = Trainer(
        model=load_model(model_args, TASK, config, tokenizer),
        args=args,
        train_dataset=blocks["train"] if args.do_train else None,
        eval_dataset=blocks["validation"],
        processing_class=tokenizer,
        data_collator=next_tokens,
        osdp=osdp_args.options(block_size),
    )
    train_and_evaluate(trainer, checkpoint, tokens_per_sample=block_size)


def next_tokens(blocks: Sequence[Mapping[str, object]]) -> dict[str, torch.Tensor]:
    """A batch whose labels are its own tokens; the model shifts them."""
    batch = default_data_collator(blocks)
    return {**batch, "labels": batch["input_ids"].clone()}


if __name__ == "__main__":
    run_script(main)
