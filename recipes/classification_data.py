"""Labelled sentences, or pairs of them → tokens, for classification."""

from __future__ import annotations

from dataclasses import dataclass

from datasets import ClassLabel, DatasetDict
from made_reviews import made_reviews
from recipe_arguments import GLUE_TASKS, ClassificationArguments
from text_data import limited, load_files, load_hub, with_validation
from transformers import PreTrainedTokenizerBase

GLUE = "nyu-mll/glue"
_SHAPES = (("sentence",), ("sentence1", "sentence2"))
"""Columns of text that local files may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledText:
    """Sentences with numbers for labels."""

    rows: DatasetDict
    """Splits `train` and `validation`, with `columns` and `label`."""
    columns: tuple[str, ...]
    """One column of sentences, or two of pairs."""
    label_names: tuple[str, ...]
    """What each number means."""

    def texts(self) -> list[str]:
        """All that there is to train on, to make a tokenizer from."""
        return [text for column in self.columns for text in self.rows["train"][column]]


def load_labelled(data: ClassificationArguments) -> LabelledText:
    """Labelled sentences from files, from GLUE, or made ones.

    Raises:
        ValueError: they cannot be had, or columns or labels are not such as can be learned.
    """
    if data.train_file:
        source, rows = data.train_file, load_files(data.train_file, data.validation_file)
    elif data.task_name:
        source, rows = f"{GLUE}/{data.task_name}", load_hub(GLUE, data.task_name)
    else:
        source, rows = "made reviews", made_reviews(data.validation_split_percentage)
    columns = _columns_of(rows, data, source)
    rows = DatasetDict({split: rows[split].select_columns([*columns, "label"]) for split in ("train", "validation") if split in rows})
    rows = limited(with_validation(rows, data, source), data)
    return LabelledText(rows=rows, columns=columns, label_names=_label_names(rows, source))


def tokenize(text: LabelledText, tokenizer: PreTrainedTokenizerBase, length: int) -> DatasetDict:
    """Sentences and pairs as the tokenizer joins them, cut to `length` tokens, not padded.

    Raises:
        ValueError: the tokenizer cannot pad.
    """
    if tokenizer.pad_token is None:
        source = tokenizer.name_or_path or type(tokenizer).__name__
        raise ValueError(f"The tokenizer {source} has no pad_token; name one such as BERT's with tokenizer_name.")

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return dict(tokenizer(*(rows[column] for column in text.columns), truncation=True, max_length=length))

    return text.rows.map(encode, batched=True, remove_columns=list(text.columns), desc="Tokenising")


def _columns_of(rows: DatasetDict, data: ClassificationArguments, source: str) -> tuple[str, ...]:
    """The columns of text: those of the task, or those that are there."""
    wanted = (GLUE_TASKS[data.task_name][0],) if data.task_name else _SHAPES
    names = set.intersection(*(set(rows[split].column_names) for split in rows if split != "test"))
    found = next((columns for columns in wanted if {*columns, "label"} <= names), None)
    if found is None:
        shapes = " or ".join(", ".join((*columns, "label")) for columns in wanted)
        raise ValueError(f"{source} has the columns {', '.join(sorted(names))}; it needs {shapes}.")
    for column in found:
        if (kind := rows["train"].features[column].dtype) not in ("string", "large_string"):
            raise ValueError(f"The column `{column}` of {source} holds {kind}; it must hold text.")
    return found


def _label_names(rows: DatasetDict, source: str) -> tuple[str, ...]:
    """What the labels 0, 1, ... are called."""
    feature = rows["train"].features["label"]
    if not isinstance(feature, ClassLabel) and not feature.dtype.startswith("int"):
        raise ValueError(f"The labels of {source} are {feature.dtype}; they must be whole numbers from 0 on.")
    seen = {split: rows[split].unique("label") for split in rows}
    if None in (numbers := {number for labels in seen.values() for number in labels}) or min(numbers) < 0:
        raise ValueError(f"{source} has rows without a label; give each a whole number from 0 on.")
    names = feature.names if isinstance(feature, ClassLabel) else [f"LABEL_{number}" for number in range(max(numbers) + 1)]
    if len(set(seen["train"])) < 2:
        raise ValueError(
            f"{source} has {seen['train'][0]} for all of its {rows['train'].num_rows} labels; give samples of two classes or more."
        )
    return tuple(names)
