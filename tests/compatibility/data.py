"""Generated data, the same at each call."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from torch.utils.data import IterableDataset

from .models import VOCABULARY

LENGTH, COUNT = 12, 32
_WORDS = "the a cat dog bird sees likes finds eats red small old and then fish tree house .".split()


def _generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(count: int = COUNT, *, length: int = LENGTH, vocabulary: int = VOCABULARY) -> list[dict[str, torch.Tensor]]:
    """Return samples of one length for a causal model; ids 0 to 2 are reserved for special tokens."""
    rows = torch.randint(3, vocabulary, (count, length), generator=_generator())
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def uneven_tokens(count: int = COUNT) -> list[dict[str, list[int]]]:
    """Return samples of different lengths, so that processes have different numbers of tokens; the longest is
    first.
    """
    lengths = torch.randint(4, LENGTH + 1, (count,), generator=_generator(4)).tolist()
    lengths[0] = LENGTH
    return [
        {"input_ids": sample["input_ids"][:length].tolist()}
        for sample, length in zip(tokens(count), lengths, strict=True)
    ]


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate samples of different lengths, padded to the longest; padding does not count in the loss."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = [list(sample["input_ids"]) for sample in samples]
    return {
        "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
        "labels": torch.tensor([row + [-100] * (longest - len(row)) for row in rows]),
    }


def masked(count: int = COUNT, *, evenly: bool = False) -> list[dict[str, torch.Tensor]]:
    """Return samples for masked language modelling; with `evenly`, each has the same number of masked positions."""
    generator = _generator(5)
    samples = []
    for sample in tokens(count):
        counts = torch.arange(LENGTH) < 4 if evenly else torch.rand(LENGTH, generator=generator) < 0.4
        counts[0] = True
        samples.append({"input_ids": sample["input_ids"], "labels": torch.where(counts, sample["input_ids"], -100)})
    return samples


def classes(count: int = COUNT, *, labels: int = 3) -> list[dict[str, torch.Tensor]]:
    targets = torch.randint(0, labels, (count,), generator=_generator(6))
    return [{"input_ids": s["input_ids"], "labels": t} for s, t in zip(tokens(count), targets, strict=True)]


def images(count: int = COUNT, *, labels: int = 5) -> list[dict[str, torch.Tensor]]:
    pixels = torch.randn(count, 3, 32, 32, generator=_generator())
    targets = torch.randint(0, labels, (count,), generator=_generator(6))
    return [{"pixel_values": p, "labels": t} for p, t in zip(pixels, targets, strict=True)]


def captions(count: int = COUNT) -> list[dict[str, torch.Tensor]]:
    samples = []
    for image, text in zip(images(count), tokens(count, vocabulary=VOCABULARY - 1), strict=True):
        ids = text["input_ids"].clone()
        ids[-1] = VOCABULARY - 1
        samples.append({"pixel_values": image["pixel_values"], "input_ids": ids, "return_loss": True})
    return samples


def with_return_loss(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "return_loss": True,
        **{name: torch.stack([s[name] for s in samples]) for name in ("pixel_values", "input_ids")},
    }


def speech(count: int = COUNT) -> list[dict[str, torch.Tensor]]:
    features = torch.randn(count, 8, 60, generator=_generator())
    return [{"input_features": f, "labels": s["input_ids"]} for f, s in zip(features, tokens(count), strict=True)]


def waves(count: int = COUNT) -> list[dict[str, torch.Tensor]]:
    values = torch.randn(count, 2000, generator=_generator())
    return [
        {"input_values": v, "labels": s["input_ids"]}
        for v, s in zip(values, tokens(count, length=6, vocabulary=32), strict=True)
    ]


def scored(kind: str, count: int) -> list[dict[str, torch.Tensor]]:
    generator = _generator(4)
    targets = [torch.rand(count, generator=generator) for _ in range(64)]
    wanted = [target[0] if kind == "regression" else target.round() for target in targets]
    return [{**sample, "labels": target} for sample, target in zip(tokens(64), wanted, strict=True)]


def packed_tokens() -> list[dict[str, torch.Tensor]]:
    """Return rows with two texts each, separated by position ids that start again."""
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6])
    return [{**sample, "position_ids": positions} for sample in tokens()]


def tasks_of_ranks() -> list[dict[str, torch.Tensor]]:
    return [{**sample, "task": torch.tensor(number // 2 % 2)} for number, sample in enumerate(tokens())]


def some_pictures(pixels: int, image_tokens: int) -> list[dict[str, torch.Tensor]]:
    pictures = torch.randn(COUNT, 3, pixels, pixels, generator=_generator())
    samples = tokens(vocabulary=VOCABULARY - 1)
    for sample, picture in list(zip(samples, pictures, strict=True))[::4]:
        sample["input_ids"][1 : 1 + image_tokens] = VOCABULARY - 1
        sample["labels"][1 : 1 + image_tokens] = -100
        sample["pixel_values"] = picture
    return samples


def with_some_pictures(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels")}
    pictures = [sample["pixel_values"] for sample in samples if "pixel_values" in sample]
    return {**batch, **({"pixel_values": torch.stack(pictures)} if pictures else {})}


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


def text_dataset(count: int = COUNT) -> Dataset:
    return Dataset.from_dict({"text": sentences(count, words=8)})


def completion_dataset(count: int = COUNT) -> Dataset:
    return Dataset.from_dict({"prompt": sentences(count, words=4), "completion": sentences(count, words=4, seed=8)})


def preference_dataset(count: int = COUNT) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": sentences(count, words=4),
            "chosen": sentences(count, words=4, seed=8),
            "rejected": sentences(count, words=4, seed=9),
        }
    )


def on_disk(folder: Path, made: Dataset) -> Dataset:
    """Return the dataset loaded from a folder that all processes share, so that trainers can share its cache."""
    if os.environ["RANK"] == "0":
        partial = folder.with_name("partial")
        made.save_to_disk(partial)
        partial.rename(folder)
    while not folder.exists():
        time.sleep(0.05)
    return load_from_disk(folder)


def judged_dataset(count: int = COUNT) -> Dataset:
    return completion_dataset(count).add_column("label", [number % 2 == 0 for number in range(count)])


def prompts(count: int = 16) -> Dataset:
    return Dataset.from_dict({"prompt": sentences(count, words=4)})


def pairs(extra: str = "") -> Dataset:
    columns: dict[str, Any] = {"anchor": sentences(), "positive": sentences(seed=8)}
    if extra == "score":
        columns["score"] = [number % 5 / 5 for number in range(COUNT)]
    if extra == "label":
        columns["label"] = [number % 3 for number in range(COUNT)]
    return Dataset.from_dict(columns)


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
