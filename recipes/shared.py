"""What the recipes have in common and is not their lesson: arguments, text, tokenizer, model; `reporting.py` has the
rest.

Like an error of a script, a `ValueError` that is raised here is printed in one line.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from pydoc_data import topics
from typing import Any

import datasets
import torch
import transformers
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoTokenizer, TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from hf_osdp.integrations.arguments import one_line_errors

Rows = Dataset | IterableDataset
Batch = dict[str, list]
FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def option(default: object, text: str) -> Any:
    """A field of a dataclass of arguments, with its text for `--help`."""
    return field(default=default, metadata={"help": text})


def check_at_least_one(arguments: object, *names: str) -> None:
    """Raise ValueError for a number below 1."""
    for name in names:
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")


@dataclass
class ModelArguments:
    """The model: pretrained, or from scratch."""

    model_name_or_path: str | None = option(None, "Pretrained weights: a folder, or a name on the hub.")
    model_type: str = option("gpt2", "Architecture to train from scratch.")
    config_name: str | None = option(None, "Configuration to train from scratch: a folder, or a name on the hub.")
    config_overrides: str | None = option(
        None, "Changes to the configuration, such as n_layer=4,n_embd=128 (GPT-2) or num_hidden_layers=4 (BERT)."
    )
    tokenizer_name: str | None = option(None, "Tokenizer; default: the model's, or one trained on the text.")
    vocab_size: int = option(2048, "Vocabulary size of a tokenizer that is trained on the text.")

    def __post_init__(self) -> None:
        if self.model_name_or_path and (self.config_name or self.config_overrides):
            raise ValueError(
                "model_name_or_path has its own configuration; leave out config_name and config_overrides."
            )
        if self.vocab_size < 257:
            raise ValueError(f"vocab_size={self.vocab_size} is too small for byte-level text; use at least 257.")


@dataclass
class AdapterArguments(ModelArguments):
    """The model: pretrained, with LoRA adapters if they are wanted, or from scratch."""

    lora_rank: int | None = option(None, "Train LoRA adapters of this rank and freeze the rest (needs peft).")
    lora_alpha: int | None = option(None, "LoRA updates are scaled by alpha / rank; default: twice the rank.")
    lora_targets: str | None = option(
        None, "Projections with an adapter, such as c_attn,c_fc (GPT-2) or query,value (BERT); default: all."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_rank is None and (self.lora_alpha or self.lora_targets):
            raise ValueError("lora_alpha and lora_targets need lora_rank.")
        if self.lora_rank is not None and not self.model_name_or_path:
            raise ValueError(
                f"lora_rank={self.lora_rank} trains adapters of a pretrained model; give model_name_or_path."
            )


@dataclass
class FileArguments:
    """Samples from local files."""

    train_file: str | None = option(None, "Local text: .txt, or .json/.jsonl/.csv with a column `text`.")
    validation_file: str | None = option(None, "Local file in the same format, for evaluation.")
    max_train_samples: int | None = option(None, "Number of training samples to use, from the start.")
    max_eval_samples: int | None = option(None, "Number of evaluation samples to use, from the start.")

    def __post_init__(self) -> None:
        if self.validation_file and not self.train_file:
            raise ValueError("validation_file needs train_file.")
        check_at_least_one(self, "max_train_samples", "max_eval_samples")


@dataclass
class TextArguments(FileArguments):
    """The text; default: the language reference that is part of every Python installation."""

    dataset_name: str | None = option(None, "Dataset on the hub, for example Salesforce/wikitext.")
    dataset_config_name: str | None = option(None, "Configuration of the dataset, for example wikitext-2-raw-v1.")
    block_size: int | None = option(None, "Tokens per sample; default: the model's positions, at most 1024.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset_name and self.train_file:
            raise ValueError("Both dataset_name and train_file were given; choose one.")
        check_at_least_one(self, "block_size")


@dataclass
class StreamArguments(TextArguments):
    """The text, which may be read while training; default: Python's language reference."""

    validation_split_percentage: int = option(5, "Percentage to hold out if there is no validation split.")
    streaming: bool = option(False, "Read the text during training instead of before; needs max_steps.")
    shuffle_buffer: int = option(1000, "Buffer for shuffling a stream, in samples; 0 keeps the order.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_percentage(self.validation_split_percentage)
        if self.shuffle_buffer < 0:
            raise ValueError(
                f"shuffle_buffer={self.shuffle_buffer} must be at least 0; 0 keeps the order of the text."
            )


def check_percentage(share: int) -> None:
    """Raise ValueError for a validation split of nothing or all."""
    if not 0 < share < 100:
        raise ValueError(f"validation_split_percentage={share} must be between 1 and 99.")


def begin(seed: int, *, is_main: bool) -> None:
    """Set all seeds; progress of the data is shown on rank 0 alone."""
    # transformers cannot derive the loss from GPT-2's class name and logs a note about it; the note is harmless.
    logging.getLogger("transformers.modeling_utils").addFilter(
        lambda record: "`loss_type=None`" not in record.getMessage()
    )
    if not is_main:
        datasets.disable_progress_bars()
    transformers.set_seed(seed)


def begin_training(args: TrainingArguments, *, streaming: bool = False) -> str | bool | None:
    """Check arguments of a Trainer, `begin`, and return the wanted checkpoint; rank 0 alone logs."""
    if not (args.do_train or args.do_eval):
        raise ValueError("Nothing to do; give do_train, do_eval or both.")
    if args.do_train and streaming and args.max_steps < 1:
        raise ValueError("streaming=true needs max_steps, because the length of a stream is not known in advance.")
    known = get_available_reporting_integrations()
    if missing := [name for name in args.report_to if name not in known]:
        raise ValueError(
            f"report_to={','.join(missing)} is not installed here; install it, or use one of"
            f" {', '.join([*known, 'none'])}."
        )
    if args.process_index:
        logging.getLogger().setLevel(logging.ERROR)
    begin(args.seed, is_main=args.process_index == 0)
    resume = wanted_checkpoint(args.resume_from_checkpoint)
    if isinstance(resume, str) and not Path(resume).is_dir():
        raise ValueError(f"Can't find a valid checkpoint at {resume}; give the path of a checkpoint.")
    return resume


def wanted_checkpoint(asked: str | bool | None) -> str | bool | None:
    """Return `resume_from_checkpoint` as a path or a bool."""
    return {"true": True, "false": False}.get(str(asked).lower(), asked)


def read_rows(data: FileArguments, formats: dict[str, str] = FORMATS, **options: object) -> DatasetDict:
    """Read `train_file` and `validation_file`."""
    files = {"train": data.train_file, **({"validation": data.validation_file} if data.validation_file else {})}
    kinds = {formats.get(Path(file).suffix.lower()) for file in files.values()}
    if None in kinds or len(kinds) > 1:
        raise ValueError(f"use files of one kind: {', '.join(formats)}.")
    if kinds == {"text"}:
        options["keep_linebreaks"] = True
    return load_dataset(kinds.pop(), data_files=files, **options)


def load_text(data: StreamArguments) -> dict[str, Rows]:
    """Return the splits `train` and `validation` with a column `text`; some streams have no `validation`."""
    if not (source := data.dataset_name or data.train_file):
        splits = language_reference(max(2, round(100 / data.validation_split_percentage)))
        return {split: rows.to_iterable_dataset() if data.streaming else rows for split, rows in splits.items()}
    with one_line_errors(f"Cannot read {source}: ", DatasetGenerationError):
        if data.dataset_name:
            text = load_dataset(data.dataset_name, data.dataset_config_name, streaming=data.streaming)
        else:
            text = read_rows(data, streaming=data.streaming)
        row = next(iter(text["train"]), {"text": ""})
        if not isinstance(row.get("text"), str):
            raise ValueError(f"it needs a column `text` of text; its first row is {str(row)[:200]}.")
        if "validation" not in text and not data.streaming:
            text = split_end(text["train"], data.validation_split_percentage)
    return {split: text[split].select_columns("text") for split in ("train", "validation") if split in text}


def load_text_evenly_split(data: TextArguments) -> DatasetDict:
    """Return the splits `train` and `validation` with a column `text`; every 20th row is held out if there is none."""
    if not (source := data.dataset_name or data.train_file):
        return language_reference()
    with one_line_errors(f"Cannot read {source}: ", DatasetGenerationError):
        named = data.dataset_name
        text = load_dataset(named, data.dataset_config_name) if named else read_rows(data)
        rows = text["train"]
        if rows.num_rows < 20 or not isinstance(rows[0].get("text"), str):
            raise ValueError(
                f"it needs 20 rows with text in a column `text`; it has {rows.num_rows}, first {str(rows[:1])[:200]}."
            )
    text = text if "validation" in text else hold_out(rows)
    return DatasetDict({split: text[split].select_columns("text") for split in ("train", "validation")})


def split_end(rows: Dataset, percentage: int) -> DatasetDict:
    """Hold out the last rows for evaluation."""
    parts = rows.train_test_split(test_size=percentage / 100, shuffle=False)
    return DatasetDict(train=parts["train"], validation=parts["test"])


def language_reference(every: int = 20) -> DatasetDict:
    """Return the distinct paragraphs of Python's language reference; every n-th one is for evaluation."""
    paragraphs = (
        part for _, text in sorted(topics.topics.items()) for part in re.split(r"\n\s*\n", text) if part.strip()
    )
    return hold_out(Dataset.from_dict({"text": [f"{part}\n\n" for part in dict.fromkeys(paragraphs)]}), every)


def hold_out(rows: Dataset, every: int = 20) -> DatasetDict:
    """Hold out every n-th row for evaluation."""
    kept = [row for row in range(len(rows)) if (row + 1) % every]
    return DatasetDict(train=rows.select(kept), validation=rows.select(range(every - 1, len(rows), every)))


def packing(tokenizer, size: int) -> Callable[[Batch], Batch]:
    """Return a function that joins the tokens of a thousand rows and cuts them into blocks, without the remainder."""

    def cut(rows: Batch) -> Batch:
        tokens = list(chain.from_iterable(tokenizer(rows["text"], verbose=False)["input_ids"]))
        blocks = [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)]
        return {"input_ids": blocks, "labels": blocks}

    return cut


def make_blocks(
    text: dict[str, Rows], cut: Callable[[Batch], Batch], size: int, data, *, seed: int = 0, do_eval: bool = True
) -> tuple[Rows, Dataset | None]:
    """Return samples of `size` tokens for training and for evaluation.

    A stream repeats; its evaluation samples are held in memory.
    """
    blocks = {split: rows.map(cut, batched=True, remove_columns="text") for split, rows in text.items()}
    train, validation = blocks["train"], blocks.get("validation")
    if validation is None and do_eval:
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
    if isinstance(train, IterableDataset):
        train = train.repeat(None).shuffle(seed=seed, buffer_size=max(1, data.shuffle_buffer))
        validation = None if validation is None else Dataset.from_list(list(validation))
    return train, validation


def take_first(rows: Rows | None, number: int | None) -> Rows | None:
    """Return the first `number` rows, or all."""
    if rows is None or number is None:
        return rows
    return rows.take(min(number, len(rows)) if isinstance(rows, Dataset) else number)


def load_config(arguments: ModelArguments, classes, wanted: str):
    """Return the named configuration, or the default one of the model type; `classes` has its class."""
    name = arguments.model_name_or_path or arguments.config_name
    with one_line_errors(f"Cannot use {name or f'model_type={arguments.model_type!r}'}: "):
        config = AutoConfig.from_pretrained(name) if name else transformers.CONFIG_MAPPING[arguments.model_type]()
        if type(config) not in classes:
            raise ValueError(f"{config.model_type} is not a {wanted}.")
    return config


def length_of_samples(config, asked: int | None, usual: int, name: str = "block_size") -> int:
    """Return the asked length, or the usual one; the model must have as many positions."""
    positions = getattr(config, "max_position_embeddings", None) or 2**30
    if (length := asked or min(positions, usual)) > positions:
        raise ValueError(f"{name}={length} is longer than the model's {positions} positions; use at most {positions}.")
    return length


def load_tokenizer(arguments: ModelArguments, config, lines: Iterable[str], *, masked: bool):
    """Return the named tokenizer, or train one on the lines; a new model gets its size and the numbers of its tokens.

    Masked models have BERT's WordPiece or RoBERTa's byte-level BPE, causal ones a byte-level BPE like GPT-2's.
    """
    if name := arguments.tokenizer_name or arguments.model_name_or_path:
        with one_line_errors(f"Cannot load the tokenizer {name}: "):
            tokenizer = AutoTokenizer.from_pretrained(name)
    elif masked and transformers.TOKENIZER_MAPPING.get(type(config), None) is transformers.BertTokenizer:
        tokenizer = transformers.BertTokenizer(vocab=wordpiece_vocabulary(list(lines), arguments.vocab_size))
    else:
        kind = transformers.RobertaTokenizer if masked else transformers.GPT2Tokenizer
        tokenizer = kind().train_new_from_iterator(lines, arguments.vocab_size, show_progress=False)
    if not arguments.model_name_or_path:
        known = [f"{kind}_token_id" for kind in ("bos", "eos", "pad", "cls", "sep")]
        names = [name for name in known if hasattr(config, name)] if masked else known[:2]
        config.update({"vocab_size": len(tokenizer), **{name: getattr(tokenizer, name) for name in names}})
    if arguments.config_overrides:
        with one_line_errors(f"Cannot use config_overrides={arguments.config_overrides}: "):
            config.update_from_string(arguments.config_overrides)
            if config.vocab_size < len(tokenizer):
                raise ValueError(
                    f"vocab_size={config.vocab_size} is less than the {len(tokenizer)} entries of the tokenizer."
                )
    return tokenizer


def lines_of(text: Rows) -> Iterable[str]:
    """Yield the text of all rows; of a stream, that of the first 20,000."""
    return (row["text"] for row in islice(text, None if isinstance(text, Dataset) else 20_000))


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


def load_model(auto_class, arguments: ModelArguments, config, tokenizer) -> tuple[Any, list[str]]:
    """Return the model in float32, pretrained or new, and the names of parameters that a pretrained one lacked."""
    if not (name := arguments.model_name_or_path):
        return auto_class.from_config(config, dtype=torch.float32), []
    model, info = auto_class.from_pretrained(name, config=config, dtype=torch.float32, output_loading_info=True)
    if len(tokenizer) > (entries := model.get_input_embeddings().num_embeddings):
        if getattr(arguments, "lora_rank", None):
            raise ValueError(
                f"The tokenizer has {len(tokenizer)} entries, the model {entries}; adapters cannot train new"
                " embeddings."
            )
        model.resize_token_embeddings(len(tokenizer))
    return model, info["missing_keys"]


def with_adapters(model, arguments: AdapterArguments, task_type: str, heads: list[str] | None = None):
    """Return the model with LoRA adapters, if a rank is given; the modules `heads` are trained and saved in full."""
    if not (rank := arguments.lora_rank):
        return model
    from peft import LoraConfig, get_peft_model

    targets = arguments.lora_targets.split(",") if arguments.lora_targets else "all-linear"
    lora = LoraConfig(
        r=rank, lora_alpha=arguments.lora_alpha or 2 * rank, target_modules=targets, task_type=task_type,
        modules_to_save=heads,
    )  # fmt: skip
    with one_line_errors(f"Cannot use lora_targets={arguments.lora_targets}: "):
        return get_peft_model(model, lora)
