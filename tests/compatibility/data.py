"""Generated data, the same at each call."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset, default_collate

from .models import VOCABULARY

LENGTH, COUNT = 12, 32
_WORDS = "the a cat dog bird sees likes finds eats red small old and then fish tree house .".split()


def _generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _samples(**columns: Any) -> list[dict[str, Any]]:
    """Return a sample for each row of the columns."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _ids(count: int = COUNT, *, length: int = LENGTH, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Return rows of ids, of which 0 to 2 are reserved for special tokens."""
    return torch.randint(3, vocabulary, (count, length), generator=_generator())


def _classes(count: int, labels: int) -> torch.Tensor:
    return torch.randint(0, labels, (count,), generator=_generator(6))


def _features(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator())


def tokens(count: int = COUNT, **sizes: int) -> list[dict[str, torch.Tensor]]:
    """Return samples of one length for a causal model."""
    return _samples(input_ids=_ids(count, **sizes), labels=_ids(count, **sizes))


def uneven_tokens(count: int = COUNT) -> list[dict[str, list[int]]]:
    """Return samples of different lengths, so that processes have different numbers of tokens; the longest is
    first.
    """
    lengths = torch.randint(4, LENGTH + 1, (count,), generator=_generator(4)).tolist()
    return [{"input_ids": row[:n].tolist()} for row, n in zip(_ids(count), [LENGTH, *lengths[1:]], strict=True)]


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate samples of different lengths, padded to the longest; padding does not count in the loss."""
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    kinds = {"input_ids": (rows, 0), "attention_mask": ([torch.ones_like(row) for row in rows], 0)}
    kinds["labels"] = (rows, -100)
    return {name: pad_sequence(own, batch_first=True, padding_value=value) for name, (own, value) in kinds.items()}


def masked(count: int = COUNT, *, evenly: bool = False) -> list[dict[str, torch.Tensor]]:
    """Return samples for masked language modelling; with `evenly`, each has the same number of masked positions."""
    ids, places = _ids(count), torch.arange(LENGTH).expand(count, -1)
    counts = places < 4 if evenly else (torch.rand(count, LENGTH, generator=_generator(5)) < 0.4) | (places == 0)
    return _samples(input_ids=ids, labels=torch.where(counts, ids, -100))


def classes(count: int = COUNT) -> list[dict[str, torch.Tensor]]:
    return _samples(input_ids=_ids(count), labels=_classes(count, 3))


def images() -> list[dict[str, torch.Tensor]]:
    return _samples(pixel_values=_features(COUNT, 3, 32, 32), labels=_classes(COUNT, 5))


def captions() -> list[dict[str, torch.Tensor]]:
    ids = _ids(vocabulary=VOCABULARY - 1)
    ids[:, -1] = VOCABULARY - 1
    return _samples(pixel_values=_features(COUNT, 3, 32, 32), input_ids=ids, return_loss=[True] * COUNT)


def with_return_loss(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {**default_collate(samples), "return_loss": True}


def speech() -> list[dict[str, torch.Tensor]]:
    return _samples(input_features=_features(COUNT, 8, 60), labels=_ids())


def waves() -> list[dict[str, torch.Tensor]]:
    return _samples(input_values=_features(COUNT, 2000), labels=_ids(length=6, vocabulary=32))


def scored(count: int, *, rounded: bool) -> list[dict[str, torch.Tensor]]:
    """Return samples with so many scores each, or a single one; `rounded`, they are 0 or 1."""
    targets = torch.rand(64, count, generator=_generator(4))
    return _samples(input_ids=_ids(64), labels=targets.round() if rounded else targets[:, 0])


def packed_tokens() -> list[dict[str, torch.Tensor]]:
    """Return rows with two texts each, separated by position ids that start again."""
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6])
    return _samples(input_ids=_ids(), labels=_ids(), position_ids=positions.expand(COUNT, -1))


def tasks_of_ranks() -> list[dict[str, torch.Tensor]]:
    return _samples(input_ids=_ids(), labels=_ids(), task=torch.arange(COUNT) // 2 % 2)


def some_pictures() -> list[dict[str, torch.Tensor]]:
    """Return texts of which each fourth has a picture, in the place of four tokens."""
    samples = tokens(vocabulary=VOCABULARY - 1)
    for sample, picture in list(zip(samples, _features(COUNT, 3, 16, 16), strict=True))[::4]:
        sample["input_ids"][1:5] = VOCABULARY - 1
        sample["labels"][1:5] = -100
        sample["pixel_values"] = picture
    return samples


def with_some_pictures(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    texts = [{name: sample[name] for name in ("input_ids", "labels")} for sample in samples]
    pictures = [sample["pixel_values"] for sample in samples if "pixel_values" in sample]
    return {**default_collate(texts), **({"pixel_values": torch.stack(pictures)} if pictures else {})}


def two_sets() -> dict[str, list[dict[str, list[int]]]]:
    return {"one": uneven_tokens(8), "two": uneven_tokens(5)}


def texts() -> list[dict[str, str]]:
    return [{"text": text} for text in sentences()]


def tokenised(samples: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    batch = dict(tokenizer()([sample["text"] for sample in samples], padding=True, return_tensors="pt"))
    names = ("input_ids", "attention_mask")
    return {**{name: batch[name] for name in names}, "labels": batch["input_ids"].clone()}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(tokens())


class OneShotStream(IterableDataset):
    """A dataset that continues where the last reader stopped, like a queue or a socket."""

    def __init__(self) -> None:
        self._rest = iter(tokens(400))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self._rest


def sentences(count: int = COUNT, *, words: int = 6, seed: int = 7) -> list[str]:
    picks = torch.randint(0, len(_WORDS), (count, words), generator=_generator(seed)).tolist()
    return [" ".join(_WORDS[p] for p in row) for row in picks]


def text_dataset() -> Dataset:
    return Dataset.from_dict({"text": sentences(words=8)})


def of_texts(*columns: str, count: int = COUNT) -> Dataset:
    """Return a dataset with other texts in each column."""
    return Dataset.from_dict({name: sentences(count, words=4, seed=7 + n) for n, name in enumerate(columns)})


def prompts() -> Dataset:
    return of_texts("prompt", count=16)


def completion_dataset() -> Dataset:
    return of_texts("prompt", "completion")


def preference_dataset() -> Dataset:
    return of_texts("prompt", "chosen", "rejected")


def judged_dataset() -> Dataset:
    return completion_dataset().add_column("label", [number % 2 == 0 for number in range(COUNT)])


def on_disk(folder: Path, made: Dataset) -> Dataset:
    """Return the dataset loaded from a folder that all processes share, so that trainers can share its cache."""
    if os.environ["RANK"] == "0":
        partial = folder.with_name("partial")
        made.save_to_disk(partial)
        partial.rename(folder)
    while not folder.exists():
        time.sleep(0.05)
    return load_from_disk(folder)


def pairs(extra: str = "") -> Dataset:
    made, parts = of_texts("anchor", "positive"), {"score": 5, "label": 3}
    if not extra:
        return made
    column = [number % parts[extra] for number in range(COUNT)]
    return made.add_column(extra, [number / 5 for number in column] if extra == "score" else column)


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *_WORDS]
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
