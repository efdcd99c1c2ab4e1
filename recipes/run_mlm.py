"""Train a masked language model, such as BERT, under a memory limit.

    accelerate launch --config_file accelerate_configs/osdp_cpu.yaml recipes/run_mlm.py recipes/bert_large/demo.yaml --output_dir out

The YAML file holds any of the arguments below and those of `TrainingArguments`; flags win over it.
"""

from __future__ import annotations

import sys

from losses import mean_over_labels
from masking import Masking, frame_of
from model_loading import Task, choose_block_size, fit_config, load_config, load_model, load_tokenizer
from recipe_arguments import MaskedModelArguments, OSDPArguments, parse_arguments
from streamed_text import StreamArguments, blocks_of, lines_of, text_of
from trained_tokenizers import train_masked_tokenizer
from training import begin, train_and_evaluate
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoModelForMaskedLM, TrainingArguments

from hf_osdp import Trainer
from hf_osdp.integrations.launch import run_script

TASK = Task(
    kind="masked language model",
    examples="bert or roberta",
    model_class=AutoModelForMaskedLM,
    configs=MODEL_FOR_MASKED_LM_MAPPING,
)


def main() -> None:
    """Text, tokenizer, masks, model, plan, training, evaluation, saved model."""
    types = (MaskedModelArguments, StreamArguments, OSDPArguments, TrainingArguments)
    model_args, data_args, osdp_args, args = parse_arguments(types, sys.argv[1:])
    checkpoint = begin(args)
    if args.do_train:
        data_args.check_steps(args.max_steps)
    config = load_config(model_args, TASK)

    with args.main_process_first(desc="text"):
        text = text_of(data_args)
    tokenizer = load_tokenizer(model_args, checkpoint, lambda: train_masked_tokenizer(lines_of(text), model_args.vocab_size, config))
    masking = Masking(tokenizer=tokenizer, probability=model_args.mlm_probability, seed=args.seed)
    fit_config(config, model_args, tokenizer)
    block_size = choose_block_size(data_args.block_size, config)
    with args.main_process_first(desc="tokens"):
        blocks = blocks_of(text, tokenizer, block_size, data_args, seed=args.seed, evaluates=args.do_eval, frame=frame_of(tokenizer))
        evaluated = None if blocks["validation"] is None else masking.once(blocks["validation"])

    trainer = Trainer(
        model=load_model(model_args, TASK, config, tokenizer),
        args=args,
        train_dataset=blocks["train"] if args.do_train else None,
        eval_dataset=evaluated,
        processing_class=tokenizer,
        data_collator=masking.collator(args.process_index),
        compute_loss_func=mean_over_labels,
        osdp=osdp_args.options(block_size),
    )
    train_and_evaluate(trainer, checkpoint, tokens_per_sample=block_size)


if __name__ == "__main__":
    run_script(main)
