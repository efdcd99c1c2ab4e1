"""Train a causal language model, such as GPT-2 or Llama, under a memory limit.

    accelerate launch --config_file accelerate_configs/osdp_cpu.yaml recipes/run_clm.py recipes/gpt2/demo.yaml
    --output_dir out

The first argument may be a YAML or JSON file of arguments; flags override it. The arguments are those of the two
classes below, those of `TrainingArguments`, and every option of `hf_osdp.OSDPConfig`, such as `--memory_limit 8GiB`.
`--osdp false` runs the stock Trainer.
"""

from __future__ import annotations

import sys

import reporting
import shared
import transformers
from shared import AdapterArguments as ModelArguments
from shared import StreamArguments as DataArguments
from transformers import TrainingArguments

from hf_osdp import Trainer
from hf_osdp.integrations.arguments import parse_arguments
from hf_osdp.integrations.launch import run_script


def main() -> None:
    """Load the text, tokenizer and model, train under a plan, evaluate, and save the model."""
    model_args, data_args, args, osdp = parse_arguments(
        (ModelArguments, DataArguments, TrainingArguments), sys.argv[1:]
    )
    resume = shared.begin_training(args, streaming=data_args.streaming)

    classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    config = shared.load_config(model_args, classes, "causal language model; use one such as gpt2 or llama")
    with args.main_process_first(desc="text"):
        text = shared.load_text(data_args)
        tokenizer = shared.load_tokenizer(model_args, config, shared.lines_of(text["train"]), masked=False)
    block_size = shared.length_of_samples(config, data_args.block_size, usual=1024)
    with args.main_process_first(desc="tokens"):
        cut = shared.packing(tokenizer, block_size)
        train, validation = shared.make_blocks(text, cut, block_size, data_args, seed=args.seed, do_eval=args.do_eval)
    model, _ = shared.load_model(transformers.AutoModelForCausalLM, model_args, config, tokenizer)

    trainer = Trainer(
        model=shared.with_adapters(model, model_args, "CAUSAL_LM"),
        args=args,
        train_dataset=train if args.do_train else None,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=transformers.default_data_collator,
        osdp=osdp and {"sequence_length": block_size, **osdp},  # False is the stock Trainer
    )
    trainer.add_callback(reporting.JSONLog(trainer, block_size))
    reporting.train_and_save(trainer, resume, reporting.print_perplexity)


if __name__ == "__main__":
    run_script(main)
