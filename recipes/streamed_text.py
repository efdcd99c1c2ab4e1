"""Text that is read, tokenised and cut while the model trains, so that training starts at once and nothing is kept on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice

import torch.utils.data
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from recipe_arguments import DataArguments
from text_data import BlockCutter, language_reference, load_files, load_hub, load_text, source_of, to_blocks
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

_FIRST_LINES = 20_000
"""Of a stream, what a tokenizer is trained on where none is named."""


@dataclass
class StreamArguments(DataArguments):
    """Which text, and whether it is a stream."""

    streaming: bool = field(default=False, metadata={"help": "Read the training text while training; needs max_steps."})
    shuffle_buffer: int = field(
        default=1000, metadata={"help": "Samples of a stream that are held and drawn from in random order; 0 keeps the order of the text."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shuffle_buffer < 0:
            raise ValueError(f"shuffle_buffer={self.shuffle_buffer} must be at least 0, which keeps the order of the text.")

    def check_steps(self, max_steps: int | None) -> None:
        """Refuse a stream without an end.

        Raises:
            ValueError: there is no number of steps.
        """
        if self.streaming and (max_steps or 0) < 1:
            raise ValueError("streaming=true needs max_steps: where a stream ends is not known before.")


def text_of(data: StreamArguments) -> DatasetDict | IterableDatasetDict:
    """Text for training and for evaluation, in a column `text`; a stream may come without a split `validation`.

    Raises:
        ValueError: there is none, it cannot be read, or it has no column `text`.
    """
    if not data.streaming:
        return load_text(data)
    if data.dataset_name:
        text = load_hub(data.dataset_name, data.dataset_config_name, streaming=True)
    elif data.train_file:
        text = load_files(data.train_file, data.validation_file, streaming=True)
    else:
        reference = language_reference(data.validation_split_percentage)
        text = IterableDatasetDict({split: rows.to_iterable_dataset() for split, rows in reference.items()})
    if "train" not in text:
        raise ValueError(f"{source_of(data)} needs a split `train`; it has {', '.join(text)}.")
    row = next(_read(text["train"], source_of(data)), None)
    if row is not None and not isinstance(row.get("text"), str):
        kind = f"holds {type(row['text']).__name__}" if "text" in row else f"is not among {', '.join(row)}"
        raise ValueError(f"{source_of(data)} needs a column `text` of text; it {kind}.")
    return IterableDatasetDict({split: text[split].select_columns("text") for split in ("train", "validation") if split in text})


def lines_of(text: DatasetDict | IterableDatasetDict) -> list[str]:
    """What a tokenizer is trained on: the training text, or the first lines of a stream."""
    if isinstance(text, DatasetDict):
        return text["train"]["text"]
    return [row["text"] for row in islice(text["train"], _FIRST_LINES)]


def blocks_of(
    text: DatasetDict | IterableDatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    data: StreamArguments,
    *,
    seed: int,
    evaluates: bool,
    frame: tuple[int, int] | None = None,
) -> dict[str, Dataset | Passes | None]:
    """Blocks as `to_blocks` makes them. Of a stream they are cut on the way, and those for evaluation are held in memory.

    Args:
        text: from `text_of`.
        tokenizer: any tokenizer.
        block_size: tokens of one block.
        data: how many blocks are wanted, and in which order.
        seed: of the order in which a stream's blocks are drawn from the buffer.
        evaluates: whether there must be blocks for evaluation: without a split `validation`, the first `max_eval_samples`.
        frame: as for `to_blocks`.

    Raises:
        ValueError: a split is too short, or a stream has nothing to evaluate on.
    """
    if isinstance(text, DatasetDict):
        return dict(to_blocks(text, tokenizer, block_size, data, frame=frame))
    cutter = BlockCutter(tokenizer=tokenizer, block_size=block_size, frame=frame)
    blocks = {
        split: rows.map(cutter.tokenize, batched=True, remove_columns=["text"]).map(cutter.cut, batched=True)
        for split, rows in text.items()
    }
    train, held = blocks["train"], None
    if evaluates and "validation" in blocks:
        held = _held(blocks["validation"], data.max_eval_samples, data, "validation")
    elif evaluates:
        if data.max_eval_samples is None:
            raise ValueError(
                "This stream has no validation text; give max_eval_samples, to hold out its first samples, or validation_file."
            )
        held, train = _held(train, data.max_eval_samples, data, "train"), train.skip(data.max_eval_samples)
    train = train if data.max_train_samples is None else train.take(data.max_train_samples)
    if next(_read(train, source_of(data)), None) is None:
        raise ValueError(f"{source_of(data)}: the train text has less than one block of {block_size} tokens; give more text.")
    shuffled = train.shuffle(seed=seed, buffer_size=data.shuffle_buffer) if data.shuffle_buffer else train
    return {"train": Passes(shuffled, source_of(data)), "validation": held}


class Passes(torch.utils.data.IterableDataset):
    """A stream again and again, without end: every optimizer step has all its samples, and none comes twice in one pass."""

    def __init__(self, stream: IterableDataset, source: str):
        """
        Args:
            stream: read anew in each pass, and shuffled in another order where it is shuffled.
            source: what it is read from, for errors.
        """
        super().__init__()
        self._stream, self._source = stream, source

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for number in count():
            self._stream.set_epoch(number)
            is_empty = True
            for block in _read(self._stream, self._source):
                is_empty = False
                yield block
            if is_empty:  # such as one worker's part of a single file
                return


def _held(blocks: IterableDataset, limit: int | None, data: DataArguments, split: str) -> Dataset:
    """The first so many blocks, in memory."""
    rows = list(tqdm(islice(_read(blocks, source_of(data)), limit), desc="Validation blocks", total=limit, leave=False))
    if not rows:
        raise ValueError(f"{source_of(data)}: the {split} text has less than one block of tokens; give more text.")
    return Dataset.from_list(rows)


def _read(stream: IterableDataset, source: str) -> Iterator[dict]:
    """What comes; the loader's words on what cannot be read name no file."""
    try:
        yield from stream
    except ValueError as error:  # of JSON, of UTF-8 and of Arrow
        raise ValueError(f"{source} cannot be read as a stream: {error}. Correct the data.") from error
