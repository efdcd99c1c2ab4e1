"""Text → tokens → blocks of equal length, for language modelling."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

from datasets import Dataset, DatasetDict, IterableDatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from recipe_arguments import DataArguments, FileArguments
from transformers import PreTrainedTokenizerBase

_FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def load_text(data: DataArguments) -> DatasetDict:
    """Text for training and for evaluation, in a column `text`.

    Args:
        data: where the text is; by default Python's own language reference.

    Returns:
        Splits `train` and `validation`.

    Raises:
        ValueError: a file is missing, unreadable or of an unknown kind, it holds too little, or there is no column `text`.
    """
    if data.dataset_name:
        text = load_hub(data.dataset_name, data.dataset_config_name)
    elif data.train_file:
        text = load_files(data.train_file, data.validation_file)
    else:
        return language_reference(data.validation_split_percentage)
    if "train" not in text or "text" not in text["train"].column_names:
        raise ValueError(f"The data set needs a split `train` with a column `text`; it has {dict(text.column_names)}.")
    if (kind := text["train"].features["text"].dtype) not in ("string", "large_string"):
        raise ValueError(f"The column `text` holds {kind}; it must hold text.")
    return with_validation(text.select_columns("text"), data, data.train_file or data.dataset_name)


def with_validation(rows: DatasetDict, data: FileArguments, source: str) -> DatasetDict:
    """The same, or the last rows of `train` as `validation` where there is none.

    Raises:
        ValueError: `source` has too few rows for that.
    """
    if "validation" in rows:
        return rows
    if (number := rows["train"].num_rows) < 2:
        raise ValueError(f"{source} has too little text to split ({number} line); give more lines, or a validation_file.")
    parts = rows["train"].train_test_split(test_size=data.validation_split_percentage / 100, shuffle=False)
    return DatasetDict(train=parts["train"], validation=parts["test"])


def to_blocks(
    text: DatasetDict, tokenizer: PreTrainedTokenizerBase, block_size: int, data: DataArguments, *, frame: tuple[int, int] | None = None
) -> DatasetDict:
    """Tokenise, join, and cut into blocks; what is left at the end is dropped.

    Args:
        text: splits with a column `text`.
        tokenizer: any tokenizer.
        block_size: tokens of one block.
        data: where the text is from, for errors, and how many blocks of it are wanted.
        frame: tokens that begin and end every block, with no other special tokens in it; None leaves them to the tokenizer,
            which puts its own around each line of text.

    Returns:
        The same splits with `input_ids` of `block_size` tokens each.

    Raises:
        ValueError: a split is too short for one block, or a block has no room for text.
    """
    cutter = BlockCutter(tokenizer=tokenizer, block_size=block_size, frame=frame)
    tokens = text.map(cutter.tokenize, batched=True, remove_columns=["text"], desc="Tokenising")
    blocks = tokens.map(cutter.cut, batched=True, batch_size=1000, desc=f"Blocks of {block_size}")
    for split, rows in blocks.items():
        if not len(rows):
            have = sum(map(len, tokens[split]["input_ids"]))
            raise ValueError(f"{source_of(data)}: the {split} text has {have} tokens, less than one block of {block_size}; give more text.")
    return limited(blocks, data)


def source_of(data: DataArguments) -> str:
    """Where the text is from, for errors."""
    return data.train_file or data.dataset_name or "Python's language reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCutter:
    """Rows of text → tokens → blocks, a batch of rows at a time.

    Raises:
        ValueError: a block has no room for text.
    """

    tokenizer: PreTrainedTokenizerBase
    block_size: int
    frame: tuple[int, int] | None

    def __post_init__(self) -> None:
        if self._room < 1:
            raise ValueError(f"block_size={self.block_size} leaves no room for text between two special tokens; use at least 3.")

    @property
    def _room(self) -> int:
        return self.block_size - (0 if self.frame is None else 2)

    def tokenize(self, rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        """Tokens of each row."""
        tokens = self.tokenizer(rows["text"], add_special_tokens=self.frame is None, return_attention_mask=False, verbose=False)
        return {"input_ids": tokens["input_ids"]}

    def cut(self, rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        """All tokens joined, then cut; what is left at the end is dropped."""
        before, after = ([], []) if self.frame is None else ([self.frame[0]], [self.frame[1]])
        joined, size = [token for row in rows["input_ids"] for token in row], self._room
        return {"input_ids": [before + joined[start : start + size] + after for start in range(0, len(joined) - size + 1, size)]}


def limited(blocks: DatasetDict, data: FileArguments) -> DatasetDict:
    """The first so many samples of each split, where that was asked for."""
    limits = {"train": data.max_train_samples, "validation": data.max_eval_samples}
    return DatasetDict(
        {split: blocks[split].select(range(min(limit or len(blocks[split]), len(blocks[split])))) for split, limit in limits.items()}
    )


def load_hub(name: str, config_name: str | None, *, streaming: bool = False) -> DatasetDict | IterableDatasetDict:
    """A data set of the hub, or a stream of it.

    Raises:
        ValueError: there is none of that name, or no network.
    """
    try:
        return load_dataset(name, config_name, streaming=streaming)
    except (DatasetNotFoundError, ConnectionError) as error:
        raise ValueError(f"Cannot load the data set {name}: {error}") from None


def load_files(train_file: str, validation_file: str | None, *, streaming: bool = False) -> DatasetDict | IterableDatasetDict:
    """Local files as splits `train` and, where it is given, `validation`; a stream of them is not read here.

    Raises:
        ValueError: a file is missing, unreadable or of an unknown kind.
    """
    files = {"train": train_file, "validation": validation_file}
    files = {split: name for split, name in files.items() if name}
    for split, name in files.items():
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"{split} file {name} does not exist; give a .txt, .json, .jsonl or .csv file.")
        if path.suffix.lower() not in _FORMATS:
            raise ValueError(f"{split} file {name} is of no known kind; give a .txt, .json, .jsonl or .csv file.")
        if not streaming:
            _check_readable(path, split)
    suffixes = {Path(name).suffix.lower() for name in files.values()}
    if len({_FORMATS[suffix] for suffix in suffixes}) > 1:
        raise ValueError(f"train_file and validation_file are of different kinds ({', '.join(sorted(suffixes))}); use one kind.")
    kind = _FORMATS[suffixes.pop()]
    try:
        return load_dataset(kind, data_files=files, streaming=streaming, **({"keep_linebreaks": True} if kind == "text" else {}))
    except DatasetGenerationError as error:
        names = " and ".join(files.values())
        raise ValueError(f"{names} cannot be read as {kind}: {error.__cause__ or error}. Correct the file.") from error


def _check_readable(path: Path, split: str) -> None:
    """Refuse what is no UTF-8 text, holds nothing, or has a line that is not JSON; the loader's words name no line."""
    empty, lines, number = True, path.suffix.lower() == ".jsonl", 0
    try:
        with path.open(encoding="utf-8") as content:
            for line in content:
                number += 1
                empty = empty and not line.strip()
                if lines and line.strip():
                    json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{split} file {path} is not UTF-8 text ({error.reason}); save it as UTF-8.") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{split} file {path}, line {number}, is not JSON ({error.msg}); write one object a line.") from None
    except OSError as error:
        raise ValueError(f"{split} file {path} cannot be read: {error.strerror}.") from None
    if empty:
        raise ValueError(f"{split} file {path} is empty; give a file with text.")


def language_reference(validation_percentage: int) -> DatasetDict:
    """The paragraphs of Python's language reference, each once; every n-th is for evaluation."""
    paragraphs = dict.fromkeys(part for _, text in sorted(topics.topics.items()) for part in re.split(r"\n\s*\n", text) if part.strip())
    texts = [f"{paragraph}\n\n" for paragraph in paragraphs]
    every = max(2, round(100 / validation_percentage))
    held_out = texts[every - 1 :: every]
    kept = [text for index, text in enumerate(texts) if index % every != every - 1]
    return DatasetDict(train=Dataset.from_dict({"text": kept}), validation=Dataset.from_dict({"text": held_out}))
