"""Train a causal language model, such as GPT-2 or Llama, under a memory limit.

    accelerate launch --config_file accelerate_configs/osdp_cpu.yaml recipes/run_clm.py recipes/gpt2/demo.yaml --output_dir out

A YAML or JSON file of arguments may come first; flags win over it. Arguments are those below, those of `TrainingArguments`, and every
option of `hf_osdp.OSDPConfig`, such as `--memory_limit 8GiB`. `--osdp false` is the stock Trainer.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from pydoc_data import topics

import datasets
import numpy as np
import psutil
import torch
import transformers
from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from hf_osdp import Trainer, checkpoint_to_resume
from hf_osdp.integrations.arguments import parse_arguments, said_in_one_line
from hf_osdp.integrations.launch import run_script

Rows = Dataset | IterableDataset
KINDS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv"}


@dataclass
class ModelArguments:
    """Which model: a pretrained one, or one from scratch."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Weights to start from: a folder, or a name on the hub."})
    model_type: str = field(default="gpt2", metadata={"help": "Architecture to train from scratch."})
    config_name: str | None = field(default=None, metadata={"help": "Configuration to train from scratch: a folder, or a name on the hub."})
    config_overrides: str | None = field(default=None, metadata={"help": "Changes to the configuration, such as n_layer=4,n_embd=128."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "A tokenizer; by default the model's, or one trained on the text."})
    vocab_size: int = field(default=2048, metadata={"help": "Entries of a tokenizer that is trained on the text."})
    lora_rank: int | None = field(default=None, metadata={"help": "Train LoRA adapters of this rank and freeze the rest (needs peft)."})
    lora_alpha: int | None = field(default=None, metadata={"help": "Their weight, as a multiple of 1 / rank; by default twice the rank."})
    lora_targets: str | None = field(default=None, metadata={"help": "Projections with an adapter, such as c_attn,c_fc; by default all."})

    def __post_init__(self) -> None:
        if self.model_name_or_path and (self.config_name or self.config_overrides):
            raise ValueError("model_name_or_path brings its own configuration; leave out config_name and config_overrides.")
        if self.vocab_size < 257:
            raise ValueError(f"vocab_size={self.vocab_size} is too small for byte-level text; use at least 257.")
        if self.lora_rank is None and (self.lora_alpha or self.lora_targets):
            raise ValueError("lora_alpha and lora_targets need lora_rank beside them.")
        if self.lora_rank is not None and not self.model_name_or_path:
            raise ValueError(f"lora_rank={self.lora_rank} trains adapters of a model that was trained; give model_name_or_path.")


@dataclass
class DataArguments:
    """Which text; by default the English language reference that every Python carries."""

    dataset_name: str | None = field(default=None, metadata={"help": "Data set on the hub, such as Salesforce/wikitext."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration, such as wikitext-2-raw-v1."})
    train_file: str | None = field(default=None, metadata={"help": "Local text: .txt, or .json/.jsonl/.csv with a column `text`."})
    validation_file: str | None = field(default=None, metadata={"help": "Local text of the same kind for evaluation."})
    validation_split_percentage: int = field(default=5, metadata={"help": "Part of the text to evaluate on where there is no other."})
    block_size: int | None = field(default=None, metadata={"help": "Tokens of a sample; by default what the model takes, at most 1024."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many samples."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first so many samples."})
    streaming: bool = field(default=False, metadata={"help": "Read the training text while training; needs max_steps."})
    shuffle_buffer: int = field(default=1000, metadata={"help": "Samples of a stream that are held and drawn from in random order."})

    def __post_init__(self) -> None:
        if self.dataset_name and self.train_file:
            raise ValueError("Both dataset_name and train_file were given; choose one.")
        if self.validation_file and not self.train_file:
            raise ValueError("validation_file needs train_file beside it.")
        if not 0 < self.validation_split_percentage < 100:
            raise ValueError(f"validation_split_percentage={self.validation_split_percentage} must be between 1 and 99.")
        for name in ("block_size", "max_train_samples", "max_eval_samples"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if self.shuffle_buffer < 0:
            raise ValueError(f"shuffle_buffer={self.shuffle_buffer} must be at least 0, which keeps the order of the text.")


def main() -> None:
    """Text, tokenizer, model, plan, training, evaluation, saved model."""
    model_args, data_args, args, osdp = parse_arguments((ModelArguments, DataArguments, TrainingArguments), sys.argv[1:])
    check(data_args, args)
    # GPT-2's class name does not say which loss it has, and transformers' note on that sounds like a fault.
    logging.getLogger("transformers.modeling_utils").addFilter(lambda record: "`loss_type=None`" not in record.getMessage())
    if args.process_index:  # rank 0 speaks for all
        datasets.disable_progress_bars()
        logging.getLogger().setLevel(logging.ERROR)
    transformers.set_seed(args.seed)
    resume = {"true": True, "false": False}.get(str(args.resume_from_checkpoint).lower(), args.resume_from_checkpoint)
    checkpoint = checkpoint_to_resume(args.output_dir, resume)

    config = load_config(model_args)
    with args.main_process_first(desc="text"):
        text = load_text(data_args)
        tokenizer = load_tokenizer(model_args, config, text["train"])
    positions = getattr(config, "max_position_embeddings", None) or 2**30
    block_size = data_args.block_size or min(positions, 1024)
    if block_size > positions:
        raise ValueError(f"block_size={block_size} is longer than the model's {positions} positions; use at most {positions}.")
    with args.main_process_first(desc="tokens"):
        train, validation = make_blocks(text, tokenizer, block_size, data_args, args)

    trainer = Trainer(
        model=load_model(model_args, config, tokenizer), args=args, train_dataset=train if args.do_train else None, eval_dataset=validation,
        processing_class=tokenizer, data_collator=transformers.default_data_collator, osdp=osdp and {"sequence_length": block_size, **osdp},
    )  # fmt: skip
    trainer.add_callback(JSONLog(trainer, block_size))
    if args.do_train and not checkpoint and args.process_index == 0:
        (Path(args.output_dir) / "log.jsonl").unlink(missing_ok=True)  # of an earlier run
    if args.do_eval:
        evaluate(trainer, " before training" if args.do_train else "")
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
        if args.do_eval:
            evaluate(trainer, " after training")
        if args.process_index == 0:
            print(f"model saved in {args.output_dir}", flush=True)
    trainer.accelerator.end_training()


def check(data_args: DataArguments, args: TrainingArguments) -> None:
    """Refuse a run that could not end well."""
    if not (args.do_train or args.do_eval):
        raise ValueError("Nothing to do; give do_train, do_eval or both.")
    if args.do_train and data_args.streaming and args.max_steps < 1:
        raise ValueError("streaming=true needs max_steps: where a stream ends is not known before.")
    known = get_available_reporting_integrations()
    if missing := [name for name in args.report_to if name not in known]:
        raise ValueError(f"report_to={','.join(missing)} is not installed here; install it, or use one of {', '.join([*known, 'none'])}.")


def load_text(data: DataArguments) -> dict[str, Rows]:
    """Splits `train` and, but for some streams, `validation`, with a column `text`."""
    if not (source := data.dataset_name or data.train_file):
        return language_reference(data)
    with said_in_one_line(f"Cannot read {source}: ", DatasetGenerationError):
        if data.dataset_name:
            text = load_dataset(data.dataset_name, data.dataset_config_name, streaming=data.streaming)
        else:
            files = {"train": data.train_file, **({"validation": data.validation_file} if data.validation_file else {})}
            kinds = {KINDS.get(Path(file).suffix.lower()) for file in files.values()}
            if None in kinds or len(kinds) > 1:
                raise ValueError(f"use files of one kind: {', '.join(KINDS)}.")
            options = {"keep_linebreaks": True} if kinds == {"text"} else {}
            text = load_dataset(kinds.pop(), data_files=files, streaming=data.streaming, **options)
        row = next(iter(text["train"]), {"text": ""})
        if not isinstance(row.get("text"), str):
            raise ValueError(f"it needs a column `text` of text; its first row is {str(row)[:200]}.")
        if "validation" not in text and not data.streaming:
            parts = text["train"].train_test_split(test_size=data.validation_split_percentage / 100, shuffle=False)
            text = {"train": parts["train"], "validation": parts["test"]}
    return {split: text[split].select_columns("text") for split in ("train", "validation") if split in text}


def language_reference(data: DataArguments) -> dict[str, Rows]:
    """The paragraphs of Python's language reference, each once; every n-th is for evaluation."""
    paragraphs = dict.fromkeys(part for _, text in sorted(topics.topics.items()) for part in re.split(r"\n\s*\n", text) if part.strip())
    texts, every = [f"{paragraph}\n\n" for paragraph in paragraphs], max(2, round(100 / data.validation_split_percentage))
    train = [text for index, text in enumerate(texts, start=1) if index % every]
    splits = {"train": Dataset.from_dict({"text": train}), "validation": Dataset.from_dict({"text": texts[every - 1 :: every]})}
    return {split: rows.to_iterable_dataset() if data.streaming else rows for split, rows in splits.items()}


def make_blocks(text: dict[str, Rows], tokenizer, size: int, data: DataArguments, args: TrainingArguments) -> tuple[Rows, Dataset | None]:
    """Samples of `size` tokens, for training and for evaluation. A stream begins anew where it ends; its evaluation is held in memory."""

    def cut(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        """All tokens of a thousand rows joined, then cut; what is left at the end is dropped."""
        tokens = list(chain.from_iterable(tokenizer(rows["text"], verbose=False)["input_ids"]))
        blocks = [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)]
        return {"input_ids": blocks, "labels": blocks}

    blocks = {split: rows.map(cut, batched=True, remove_columns="text") for split, rows in text.items()}
    train, validation = blocks["train"], blocks.get("validation")
    if validation is None and args.do_eval:
        if data.max_eval_samples is None:
            raise ValueError("The stream has no validation text; give validation_file, or max_eval_samples, to hold out its first samples.")
        validation, train = first(train, data.max_eval_samples), train.skip(data.max_eval_samples)
    train, validation = first(train, data.max_train_samples), first(validation, data.max_eval_samples)
    for split, rows in (("train", train), ("validation", validation)):
        if rows is not None and next(iter(rows), None) is None:
            raise ValueError(f"{data.train_file or 'The data set'}: the {split} text has less than one block of {size} tokens; give more.")
    if data.streaming:
        train = train.repeat(None).shuffle(seed=args.seed, buffer_size=max(1, data.shuffle_buffer))
        validation = None if validation is None else Dataset.from_list(list(validation))
    return train, validation


def first(rows: Rows | None, number: int | None) -> Rows | None:
    """The first so many rows, or all."""
    if rows is None or number is None:
        return rows
    return rows.take(min(number, len(rows)) if isinstance(rows, Dataset) else number)


def load_config(model_args: ModelArguments):
    """The configuration that is named, or transformers' own of the model type."""
    name = model_args.model_name_or_path or model_args.config_name
    with said_in_one_line(f"Cannot use {name or f'model_type={model_args.model_type!r}'}: "):
        config = AutoConfig.from_pretrained(name) if name else transformers.CONFIG_MAPPING[model_args.model_type]()
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"{config.model_type} is no causal language model; use one such as gpt2 or llama.")
    return config


def load_tokenizer(model_args: ModelArguments, config, text: Rows):
    """The tokenizer that is named, or a byte-level BPE as GPT-2 has it, trained on the text. A new model gets its vocabulary."""
    if name := model_args.tokenizer_name or model_args.model_name_or_path:
        with said_in_one_line(f"Cannot load the tokenizer {name}: "):
            tokenizer = AutoTokenizer.from_pretrained(name)
    else:
        lines = (row["text"] for row in islice(text, None if isinstance(text, Dataset) else 20_000))
        tokenizer = transformers.GPT2Tokenizer().train_new_from_iterator(lines, model_args.vocab_size, show_progress=False)
    if not model_args.model_name_or_path:
        config.vocab_size, config.bos_token_id, config.eos_token_id = len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id
    if model_args.config_overrides:
        with said_in_one_line(f"Cannot use config_overrides={model_args.config_overrides}: "):
            config.update_from_string(model_args.config_overrides)
            if config.vocab_size < len(tokenizer):
                raise ValueError(f"vocab_size={config.vocab_size} is less than the {len(tokenizer)} entries of the tokenizer.")
    return tokenizer


def load_model(model_args: ModelArguments, config, tokenizer):
    """Weights in float32, pretrained or new; with adapters, if wanted."""
    if not model_args.model_name_or_path:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, config=config, dtype=torch.float32)
    if len(tokenizer) > (entries := model.get_input_embeddings().num_embeddings):
        if model_args.lora_rank:
            raise ValueError(f"The tokenizer has {len(tokenizer)} entries, the model {entries}, and adapters train no embeddings.")
        model.resize_token_embeddings(len(tokenizer))
    if rank := model_args.lora_rank:
        from peft import LoraConfig, get_peft_model

        targets = model_args.lora_targets.split(",") if model_args.lora_targets else "all-linear"
        with said_in_one_line(f"Cannot use lora_targets={model_args.lora_targets}: "):
            alpha = model_args.lora_alpha or 2 * rank
            model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM"))
    return model


def evaluate(trainer: Trainer, when: str) -> None:
    """Print the perplexity, exp of the mean loss of a token of the validation text, and save it with the other metrics."""
    metrics = trainer.evaluate()
    metrics["perplexity"] = np.exp(metrics["eval_loss"])
    trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        print(f"perplexity{when}: {metrics['perplexity']:.2f}", flush=True)


class JSONLog(TrainerCallback):
    """Write `log.jsonl`: a line for every `logging_steps` and for each evaluation. Those and checkpoints are no training time."""

    def __init__(self, trainer: Trainer, tokens_per_sample: int):
        self.trainer, self.tokens_per_sample = trainer, tokens_per_sample
        self.tokens, self.seconds, self.last = 0, 0.0, 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.last = time.perf_counter()

    on_evaluate = on_save = on_train_begin

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now = time.perf_counter()
        self.seconds, self.last = self.seconds + now - self.last, now
        self.tokens += args.train_batch_size * args.gradient_accumulation_steps * args.world_size * self.tokens_per_sample

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if not state.is_world_process_zero or not {"loss", "eval_loss"} & logs.keys():
            return
        line = {"step": state.global_step, **logs}
        if "loss" in logs:
            scaler, cuda = self.trainer.accelerator.scaler, args.device.type == "cuda"
            line |= {"perplexity": np.exp(logs["loss"]), "tokens_per_s": self.tokens / self.seconds}
            line["loss_scale"] = scaler.get_scale() if scaler and scaler.is_enabled() else 1.0
            line["free_device_memory_bytes"] = torch.cuda.mem_get_info()[0] if cuda else psutil.virtual_memory().available
            self.tokens, self.seconds = 0, 0.0
        else:
            line["eval_perplexity"] = np.exp(logs["eval_loss"])
        with (Path(args.output_dir) / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: value if math.isfinite(value) else None for name, value in line.items()}) + "\n")


if __name__ == "__main__":
    run_script(main)
