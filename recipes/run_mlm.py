"""Train a masked language model, such as BERT, under a memory limit.

    accelerate launch --config_file accelerate_configs/osdp_cpu.yaml recipes/run_mlm.py recipes/bert_large/demo.yaml
    --output_dir out

The first argument may be a YAML or JSON file of arguments; flags override it. The arguments are those below, those of
`TrainingArguments`, and every option of `hf_osdp.OSDPConfig`, such as `--memory_limit 8GiB`. `--osdp false` runs the
stock Trainer.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
import warnings
from collections import Counter
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
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer, TrainerCallback, TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from hf_osdp import Trainer, checkpoint_to_resume
from hf_osdp.integrations.arguments import one_line_errors, parse_arguments
from hf_osdp.integrations.launch import run_script

Rows = Dataset | IterableDataset
GROUPINGS = {"group_sharding": "hsdp", "communication_with_groups": "two_stage", "none": "fsdp"}
FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv"}


@dataclass
class ModelArguments:
    """The model: pretrained, or from scratch."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Pretrained weights: a folder, or a name on the hub."}
    )
    model_type: str = field(default="bert", metadata={"help": "Architecture to train from scratch."})
    config_name: str | None = field(
        default=None, metadata={"help": "Configuration to train from scratch: a folder, or a name on the hub."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Changes to the configuration, for example num_hidden_layers=4."}
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Tokenizer; default: the model's, or one trained on the text."}
    )
    vocab_size: int = field(
        default=2048, metadata={"help": "Vocabulary size of a tokenizer that is trained on the text."}
    )
    mlm_probability: float = field(default=0.15, metadata={"help": "Fraction of the tokens that are masked."})
    grouping: str | None = field(
        default=None, metadata={"help": f"How machines form groups, the same for every unit: {GROUPINGS}."}
    )

    def __post_init__(self) -> None:
        if self.model_name_or_path and (self.config_name or self.config_overrides):
            raise ValueError(
                "model_name_or_path has its own configuration; leave out config_name and config_overrides."
            )
        if self.vocab_size < 257:
            raise ValueError(f"vocab_size={self.vocab_size} is too small for byte-level text; use at least 257.")
        if not 0 < self.mlm_probability < 1:
            raise ValueError(f"mlm_probability={self.mlm_probability} must be between 0 and 1; BERT uses 0.15.")
        if self.grouping not in (None, *GROUPINGS):
            raise ValueError(f"grouping={self.grouping!r} is not known; use one of {', '.join(GROUPINGS)}.")


@dataclass
class DataArguments:
    """The text; default: the language reference that is part of every Python installation."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "Dataset on the hub, for example Salesforce/wikitext."}
    )
    dataset_config_name: str | None = field(
        default=None, metadata={"help": "Configuration of the dataset, for example wikitext-2-raw-v1."}
    )
    train_file: str | None = field(
        default=None, metadata={"help": "Local text: .txt, or .json/.jsonl/.csv with a column `text`."}
    )
    validation_file: str | None = field(
        default=None, metadata={"help": "Local text in the same format, for evaluation."}
    )
    validation_split_percentage: int = field(
        default=5, metadata={"help": "Percentage to hold out if there is no validation split."}
    )
    block_size: int | None = field(
        default=None, metadata={"help": "Tokens per sample; default: the model's positions, at most 1024."}
    )
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Number of training samples to use, from the start."}
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Number of evaluation samples to use, from the start."}
    )
    streaming: bool = field(
        default=False, metadata={"help": "Read the text during training instead of before; needs max_steps."}
    )
    shuffle_buffer: int = field(
        default=1000, metadata={"help": "Buffer for shuffling a stream, in samples; 0 keeps the order."}
    )

    def __post_init__(self) -> None:
        if self.dataset_name and self.train_file:
            raise ValueError("Both dataset_name and train_file were given; choose one.")
        if self.validation_file and not self.train_file:
            raise ValueError("validation_file needs train_file.")
        if not 0 < self.validation_split_percentage < 100:
            raise ValueError(
                f"validation_split_percentage={self.validation_split_percentage} must be between 1 and 99."
            )
        for name in ("block_size", "max_train_samples", "max_eval_samples"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if self.shuffle_buffer < 0:
            raise ValueError(
                f"shuffle_buffer={self.shuffle_buffer} must be at least 0; 0 keeps the order of the text."
            )


def main() -> None:
    """Load the text, tokenizer and model, train under a plan, evaluate, and save the model."""
    model_args, data_args, args, osdp = parse_arguments(
        (ModelArguments, DataArguments, TrainingArguments), sys.argv[1:]
    )
    osdp = with_grouping(model_args.grouping, osdp)
    check(data_args, args)
    # BERT's logits are a view, and torch warns about in-place operations on it; this recipe has none.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    if args.process_index:  # only rank 0 logs
        datasets.disable_progress_bars()
        logging.getLogger().setLevel(logging.ERROR)
    transformers.set_seed(args.seed)
    resume = {"true": True, "false": False}.get(str(args.resume_from_checkpoint).lower(), args.resume_from_checkpoint)
    if isinstance(resume, str) and not Path(resume).is_dir():
        raise ValueError(f"Can't find a valid checkpoint at {resume}; give the path of a checkpoint.")

    config = load_config(model_args)
    with args.main_process_first(desc="text"):
        text = load_text(data_args)
        tokenizer = load_tokenizer(model_args, config, text["train"])
    positions = getattr(config, "max_position_embeddings", None) or 2**30
    block_size = data_args.block_size or min(positions, 1024)
    if block_size > positions:
        raise ValueError(
            f"block_size={block_size} is longer than the model's {positions} positions; use at most {positions}."
        )
    with args.main_process_first(desc="tokens"):
        train, validation = make_blocks(text, tokenizer, block_size, data_args, args)
        validation = validation and with_fixed_masks(validation, tokenizer, model_args.mlm_probability, args.seed)

    seed = (
        args.seed + 1000 * args.process_index
    )  # a different one for each rank; workers of a data loader add their number
    collator = MaskingCollator(tokenizer, mlm_probability=model_args.mlm_probability, seed=seed)
    trainer = Trainer(
        model=load_model(model_args, config, tokenizer),
        args=args,
        train_dataset=train if args.do_train else None,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=collator,
        compute_loss_func=mean_over_labels,
        osdp=osdp and {"sequence_length": block_size, **osdp},  # False is the stock Trainer
    )
    trainer.add_callback(JSONLog(trainer, block_size))
    checkpoint = checkpoint_to_resume(args.output_dir, resume)
    if args.do_train and not checkpoint and args.process_index == 0:
        (Path(args.output_dir) / "log.jsonl").unlink(missing_ok=True)  # left by an earlier run
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


def with_grouping(grouping: str | None, osdp: dict | bool) -> dict | bool:
    """Return the options of OSDP, with the strategy for the paper's name of the grouping."""
    if grouping and (osdp is False or {"strategy", "plan"} & osdp.keys()):
        raise ValueError(
            f"grouping={grouping} is strategy {GROUPINGS[grouping]}; leave out strategy, plan and osdp false."
        )
    return {**osdp, "strategy": GROUPINGS[grouping]} if grouping else osdp


def check(data_args: DataArguments, args: TrainingArguments) -> None:
    """Raise ValueError for arguments that would make the run fail later."""
    if not (args.do_train or args.do_eval):
        raise ValueError("Nothing to do; give do_train, do_eval or both.")
    if args.do_train and data_args.streaming and args.max_steps < 1:
        raise ValueError("streaming=true needs max_steps, because the length of a stream is not known in advance.")
    known = get_available_reporting_integrations()
    if missing := [name for name in args.report_to if name not in known]:
        raise ValueError(
            f"report_to={','.join(missing)} is not installed here; install it, or use one of"
            f" {', '.join([*known, 'none'])}."
        )


def load_text(data: DataArguments) -> dict[str, Rows]:
    """Return the splits `train` and `validation` with a column `text`; some streams have no `validation`."""
    if not (source := data.dataset_name or data.train_file):
        return language_reference(data)
    with one_line_errors(f"Cannot read {source}: ", DatasetGenerationError):
        if data.dataset_name:
            text = load_dataset(data.dataset_name, data.dataset_config_name, streaming=data.streaming)
        else:
            files = {
                "train": data.train_file,
                **({"validation": data.validation_file} if data.validation_file else {}),
            }
            formats = {FORMATS.get(Path(file).suffix.lower()) for file in files.values()}
            if None in formats or len(formats) > 1:
                raise ValueError(f"use files of one kind: {', '.join(FORMATS)}.")
            options = {"keep_linebreaks": True} if formats == {"text"} else {}
            text = load_dataset(formats.pop(), data_files=files, streaming=data.streaming, **options)
        row = next(iter(text["train"]), {"text": ""})
        if not isinstance(row.get("text"), str):
            raise ValueError(f"it needs a column `text` of text; its first row is {str(row)[:200]}.")
        if "validation" not in text and not data.streaming:
            parts = text["train"].train_test_split(test_size=data.validation_split_percentage / 100, shuffle=False)
            text = {"train": parts["train"], "validation": parts["test"]}
    return {split: text[split].select_columns("text") for split in ("train", "validation") if split in text}


def language_reference(data: DataArguments) -> dict[str, Rows]:
    """Return the distinct paragraphs of Python's language reference; every n-th one is for evaluation."""
    paragraphs = dict.fromkeys(
        part for _, text in sorted(topics.topics.items()) for part in re.split(r"\n\s*\n", text) if part.strip()
    )
    texts, every = (
        [f"{paragraph}\n\n" for paragraph in paragraphs],
        max(2, round(100 / data.validation_split_percentage)),
    )
    train = [text for index, text in enumerate(texts, start=1) if index % every]
    splits = {
        "train": Dataset.from_dict({"text": train}),
        "validation": Dataset.from_dict({"text": texts[every - 1 :: every]}),
    }
    return {split: rows.to_iterable_dataset() if data.streaming else rows for split, rows in splits.items()}


def make_blocks(
    text: dict[str, Rows], tokenizer, size: int, data: DataArguments, args: TrainingArguments
) -> tuple[Rows, Dataset | None]:
    """Return samples of `size` tokens for training and for evaluation.

    A stream repeats; its evaluation samples are held in memory.
    """

    def cut(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        """Join the tokens of a thousand rows and cut them into blocks between special tokens; the remainder is
        dropped.
        """
        tokens = list(
            chain.from_iterable(tokenizer(rows["text"], add_special_tokens=False, verbose=False)["input_ids"])
        )
        parts = [tokens[start : start + size - 2] for start in range(0, len(tokens) - size + 3, size - 2)]
        return {"input_ids": [[tokenizer.cls_token_id, *part, tokenizer.sep_token_id] for part in parts]}

    if missing := [name for name in ("cls_token", "sep_token", "mask_token") if getattr(tokenizer, name) is None]:
        raise ValueError(
            f"The tokenizer has no {missing[0]}; name one of a masked language model with tokenizer_name."
        )
    if size < 3:
        raise ValueError(f"block_size={size} leaves no room for text between two special tokens; use at least 3.")

    blocks = {split: rows.map(cut, batched=True, remove_columns="text") for split, rows in text.items()}
    train, validation = blocks["train"], blocks.get("validation")
    if validation is None and args.do_eval:
        if data.max_eval_samples is None:
            raise ValueError(
                "The stream has no validation text; give validation_file, or max_eval_samples, to hold out its first"
                " samples."
            )
        validation, train = take_first(train, data.max_eval_samples), train.skip(data.max_eval_samples)
    train, validation = take_first(train, data.max_train_samples), take_first(validation, data.max_eval_samples)
    for split, rows in (("train", train), ("validation", validation)):
        if rows is not None and next(iter(rows), None) is None:
            raise ValueError(
                f"{data.train_file or 'The data set'}: the {split} text has less than one block of {size} tokens; give"
                " more."
            )
    if data.streaming:
        train = train.repeat(None).shuffle(seed=args.seed, buffer_size=max(1, data.shuffle_buffer))
        validation = None if validation is None else Dataset.from_list(list(validation))
    return train, validation


def take_first(rows: Rows | None, number: int | None) -> Rows | None:
    """Return the first `number` rows, or all."""
    if rows is None or number is None:
        return rows
    return rows.take(min(number, len(rows)) if isinstance(rows, Dataset) else number)


class MaskingCollator(transformers.DataCollatorForLanguageModeling):
    """Mask training samples anew in each batch; evaluation samples have their masks already."""

    def torch_call(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        return (
            transformers.default_data_collator(examples)
            if "labels" in examples[0]
            else dict(super().torch_call(examples))
        )


def with_fixed_masks(rows: Dataset, tokenizer, probability: float, seed: int) -> Dataset:
    """Return samples with fixed masks, so that evaluations before and after training can be compared."""
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability, seed=seed)

    def mask(rows: dict[str, list[list[int]]]) -> dict[str, np.ndarray]:
        batch = collator([{"input_ids": row} for row in rows["input_ids"]])
        return {name: batch[name].numpy() for name in ("input_ids", "labels")}

    return rows.map(mask, batched=True)


def mean_over_labels(outputs, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean cross-entropy over all masked tokens of an optimizer step, for any number of micro-batches."""
    losses = cross_entropy(outputs.logits.flatten(0, -2), labels.flatten(), reduction="none")
    total = losses.sum(
        dtype=torch.promote_types(losses.dtype, torch.float32)
    )  # bf16 has too few digits for a sum of thousands
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def load_config(model_args: ModelArguments):
    """Return the named configuration, or the default one of the model type."""
    name = model_args.model_name_or_path or model_args.config_name
    with one_line_errors(f"Cannot use {name or f'model_type={model_args.model_type!r}'}: "):
        config = AutoConfig.from_pretrained(name) if name else transformers.CONFIG_MAPPING[model_args.model_type]()
        if type(config) not in transformers.MODEL_FOR_MASKED_LM_MAPPING:
            raise ValueError(f"{config.model_type} is not a masked language model; use one such as bert or roberta.")
    return config


def load_tokenizer(model_args: ModelArguments, config, text: Rows):
    """Return the named tokenizer, or train BERT's WordPiece or RoBERTa's BPE on the text.

    A new model gets the size of its vocabulary.
    """
    lines = (row["text"] for row in islice(text, None if isinstance(text, Dataset) else 20_000))
    if name := model_args.tokenizer_name or model_args.model_name_or_path:
        with one_line_errors(f"Cannot load the tokenizer {name}: "):
            tokenizer = AutoTokenizer.from_pretrained(name)
    elif transformers.TOKENIZER_MAPPING.get(type(config), None) is transformers.BertTokenizer:
        tokenizer = transformers.BertTokenizer(vocab=wordpiece_vocabulary(list(lines), model_args.vocab_size))
    else:
        tokenizer = transformers.RobertaTokenizer().train_new_from_iterator(
            lines, model_args.vocab_size, show_progress=False
        )
    if not model_args.model_name_or_path:
        numbers = {
            f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "cls", "sep")
        }
        config.update(
            {"vocab_size": len(tokenizer), **{name: n for name, n in numbers.items() if hasattr(config, name)}}
        )
    if model_args.config_overrides:
        with one_line_errors(f"Cannot use config_overrides={model_args.config_overrides}: "):
            config.update_from_string(model_args.config_overrides)
            if config.vocab_size < len(tokenizer):
                raise ValueError(
                    f"vocab_size={config.vocab_size} is less than the {len(tokenizer)} entries of the tokenizer."
                )
    return tokenizer


def wordpiece_vocabulary(texts: list[str], size: int) -> dict[str, int]:
    """Train a WordPiece vocabulary that is the same in each run.

    The trainer numbers one-character pieces in the order of a hash map, so they are given to it in a fixed order, as
    special tokens.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    counts = Counter(char for text in texts for char in tokenizer.normalizer.normalize_str(text) if not char.isspace())
    pieces = sorted(f"##{char}" for char, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:1000])
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, limit_alphabet=1000, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.get_vocab()


def load_model(model_args: ModelArguments, config, tokenizer):
    """Return the model in float32, pretrained or new."""
    if not model_args.model_name_or_path:
        return AutoModelForMaskedLM.from_config(config, dtype=torch.float32)
    model = AutoModelForMaskedLM.from_pretrained(model_args.model_name_or_path, config=config, dtype=torch.float32)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    return model


def evaluate(trainer: Trainer, when: str) -> None:
    """Print the perplexity, exp(mean loss per masked token) on the validation text, and save it with the other
    metrics.
    """
    metrics = trainer.evaluate()
    metrics["perplexity"] = np.exp(metrics["eval_loss"])
    trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        print(f"perplexity{when}: {metrics['perplexity']:.2f}", flush=True)


class JSONLog(TrainerCallback):
    """Write `log.jsonl`: one line every `logging_steps` and one for each evaluation.

    Rates exclude evaluations and checkpoints.
    """

    def __init__(self, trainer: Trainer, tokens_per_sample: int):
        self.trainer, self.tokens_per_sample = trainer, tokens_per_sample
        self.tokens, self.seconds, self.last = 0, 0.0, 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.last = time.perf_counter()

    on_evaluate = on_save = on_train_begin

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now = time.perf_counter()
        self.seconds, self.last = self.seconds + now - self.last, now
        self.tokens += (
            args.train_batch_size * args.gradient_accumulation_steps * args.world_size * self.tokens_per_sample
        )

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if not state.is_world_process_zero or not {"loss", "eval_loss"} & logs.keys():
            return
        line = {"step": state.global_step, **logs}
        if "loss" in logs:
            scaler, cuda = self.trainer.accelerator.scaler, args.device.type == "cuda"
            line |= {"perplexity": np.exp(logs["loss"]), "tokens_per_s": self.tokens / self.seconds}
            line["loss_scale"] = scaler.get_scale() if scaler and scaler.is_enabled() else 1.0
            line["free_device_memory_bytes"] = (
                torch.cuda.mem_get_info()[0] if cuda else psutil.virtual_memory().available
            )
            self.tokens, self.seconds = 0, 0.0
        else:
            line["eval_perplexity"] = np.exp(logs["eval_loss"])
        with (Path(args.output_dir) / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({name: value if math.isfinite(value) else None for name, value in line.items()}) + "\n"
            )


if __name__ == "__main__":
    run_script(main)
