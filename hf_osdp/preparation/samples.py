"""Predict the batches of training from the longest samples of the dataset, without consuming any."""

from __future__ import annotations

import copy
import inspect
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from ..distributed.consensus import on_rank_zero
from ..distributed.process_group import all_gather_objects
from ..errors import first_line, refuse_first
from ..modeling.batch import random_states_kept, with_row_length
from ..modeling.identity import holds_datasets
from ..modeling.replaced import replaced
from ..planner.lengths import Lengths
from ..sharding.micro_batches import is_padded_left, lengths_of, reason_against_lengths
from .config import OSDPConfig

_MAX_SAMPLES = 2**18
"""Most samples to read by their index."""
_MAX_STREAM_SAMPLES = 256
"""Most samples to read from a stream."""
_MOST_LENGTHS = 1000
"""Most samples whose length is read for an expected step."""
_MAX_READ_S = 2.0
"""Time limit for reading samples one by one."""
_TOKEN_FIELDS = ("input_ids", "inputs_embeds", "decoder_input_ids")

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Make batches of any number of samples, all equal to the largest sample found."""

    sample: object
    collate: Collate
    tokens: int | None
    """Tokens of a row; None if rows have no tokens, as with images."""
    seen: int
    """Samples whose length was read."""
    is_whole: bool
    """Whether all samples were read."""
    row_tokens: int | None = None
    """Tokens to make rows of, instead of `tokens`."""

    def __call__(self, samples: int) -> Any:  # noqa: ANN401  what the collator returns
        """Return the batch that the collator makes from this number of equal samples."""
        batch = _collate(self.collate, [self.sample] * samples)
        if self.tokens is None or self.row_tokens is None:
            return batch
        return with_row_length(batch, self.tokens, self.row_tokens)

    def with_rows(self, length: int | None) -> Batches:
        """Return batches with rows of `length` tokens, if rows have tokens."""
        return replace(self, row_tokens=length if self.tokens else None)


def row_tokens(found: int | None, sequence_length: int | None) -> int | None:
    """Return the tokens of a row: `sequence_length`, else the most that any rank found; None if no rank found a row.

    Collective.
    """
    return sequence_length or max(all_gather_objects(found or 0)) or None


def find_batches(dataset: Any, collate: Collate, *, mixes: bool = False) -> Batches | None:  # noqa: ANN401  of any library
    """Find the largest batch that a dataset, or several, give to a DataLoader, without consuming a stream or advancing
    random number generators.

    Return None if there is no dataset, if it is empty, or if it cannot be read so: it has other keys than numbers, or
    is a stream that cannot be copied, since reading would consume it. If the loader `mixes` all rows, raise ValueError
    instead for a dataset without rows, or whose rows make no batch.
    """
    collate = _copy_collator(collate)
    try:
        with _undisturbed(dataset):
            samples, seen, is_whole = ([], 0, False) if dataset is None else _longest_samples(dataset)
            batches = [_collate(collate, [sample]) for sample in samples]
            if mixes and samples:
                _collate(collate, samples)
    except Exception as error:  # of a user's dataset or collator
        if mixes:
            raise ValueError(
                f"Rows of the dataset make no batch ({first_line(error)}); give rows by number and a collator that"
                " pads them, or OSDPConfig(micro_batch_size=1) for one row at once."
            ) from error
        return None
    if not samples:
        refuse_first({"The dataset has no rows; give one with rows.": mixes and is_whole})
        return None
    sample, batch = max(zip(samples, batches, strict=True), key=lambda pair: _numel(pair[1]))
    return Batches(sample=sample, collate=collate, tokens=tokens_of(batch), seen=seen, is_whole=is_whole)


class RowLengths(NamedTuple):
    """Lengths of some rows of a dataset, as a collator makes rows of a batch from each."""

    tokens: tuple[int, ...]
    """Up to each row's last token that is not padding."""
    padded: tuple[int, ...]
    """With the padding that a row has alone."""
    on_the_left: bool
    """Whether a shorter row has its padding before its tokens."""
    fillers: frozenset[int] = frozenset()
    """Ids of padding."""

    def unequal(self, longest: int, padded_together: int | None = None) -> Lengths | None:
        """Return them for a planner (`Lengths`); None if all are the same."""
        if len(set(self.tokens)) == 1:
            return None
        return Lengths.of(
            self.tokens, longest, padded_to_longest=len(set(self.padded)) == 1, padded_together=padded_together
        )


def find_lengths(dataset: Any, collate: Collate) -> RowLengths | None:  # noqa: ANN401  of any library
    """Return the lengths of up to `_MOST_LENGTHS` rows of a dataset, drawn at random; None if they cannot be read so,
    or if a batch is not as long as its longest row.
    """
    if not isinstance(dataset, Sized) or holds_datasets(dataset):
        return None
    collate, started, found = _copy_collator(collate), time.monotonic(), dict[tuple[int, int], Any]()
    lengths = list[tuple[int, int]]()
    try:
        with _undisturbed(dataset):
            for index in random.Random(0).sample(range(len(dataset)), min(len(dataset), _MOST_LENGTHS)):
                row = dataset[index]  # type: ignore[index]  # a map of rows
                batch = _collate(collate, [row])
                lengths.append((int(lengths_of(batch)[0]), tokens_of(batch) or 0))
                found[lengths[-1]] = row
                if time.monotonic() - started > _MAX_READ_S / 2:
                    break
            extremes = sorted(found)[:: max(1, len(found) - 1)]
            together = _collate(collate, [found[pair] for pair in extremes])
            widest = max((width for _, width in extremes), default=0)
            if tokens_of(together) != widest or len(lengths_of(together)) != len(extremes):
                return None
    except Exception:  # of a user's dataset or collator, which has no such rows
        return None
    tokens, padded = zip(*lengths, strict=True)
    ids, mask = together.get("input_ids"), together.get("attention_mask")
    padding = [] if ids is None or mask is None or ids.shape != mask.shape else ids[mask == 0].tolist()
    return RowLengths(tokens, padded, is_padded_left(together), frozenset(padding))


def _longest_samples(dataset: Any) -> tuple[list[Any], int, bool]:  # noqa: ANN401  of any library
    """Return the samples that are longest, by each field and in total, the number of samples read, and whether all
    were read.

    The shortest is among them too. From a `datasets.Dataset` only lengths are read, for all rows. Other datasets with
    a length are read sample by sample, in a random order, for at most two seconds. From a stream the first samples of
    a copy are read.
    """
    if holds_datasets(dataset):
        samples, counts, whole = zip(*map(_longest_samples, dataset.values()), strict=True)
        return list(chain(*samples)), sum(counts), all(whole)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        total = len(dataset)
        if total and (rows := _longest_rows(dataset)) is not None:
            return [dataset[row] for row in rows], total, True
        drawn = random.Random(0).sample(range(total), min(total, _MAX_SAMPLES))
        samples, seen = _longest(dataset[index] for index in drawn)
        return samples, seen, seen == total
    try:
        stream = copy.deepcopy(dataset)
    except Exception:  # generators, files and sockets cannot be copied
        return [], 0, False
    return *_longest(islice(iter(stream), _MAX_STREAM_SAMPLES)), False


def tokens_of(batch: object) -> int | None:
    """Return the tokens of a row of a batch, the last dimension of its ids; None if it has no ids."""
    if isinstance(batch, Mapping):
        named = [batch[name] for name in _TOKEN_FIELDS if name in batch] or [
            v for k, v in batch.items() if str(k).endswith("input_ids")
        ]
        tensors = [tensor for tensor in named if isinstance(tensor, torch.Tensor) and tensor.dim() > 1]
        return max((int(t.shape[-1 if not t.is_floating_point() else 1]) for t in tensors), default=None)
    if isinstance(batch, (tuple, list)) and batch:
        batch = batch[0]
    return (
        int(batch.shape[1])
        if isinstance(batch, torch.Tensor) and batch.dim() == 2 and not batch.is_floating_point()
        else None
    )


def batches_of_loader(
    loader: DataLoader[Any], model: nn.Module, sequence_length: int | None
) -> tuple[Batches | None, int | None]:
    """Find the batches for `model(**batch)`, or None, and the tokens of a row, or None if they are not known.

    Collective.
    """
    mixes = type(loader.batch_sampler) is BatchSampler and loader.batch_sampler.batch_size > 1
    mixes = mixes and type(loader.sampler) in (RandomSampler, SequentialSampler)
    found = None if loader.collate_fn is None else find_batches(loader.dataset, loader.collate_fn, mixes=mixes)
    batch, taken = None if found is None else found(1), inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    used = found if isinstance(batch, Mapping) and (takes_any or set(batch) <= set(taken)) else None
    tokens = None if found is None else found.tokens or (None if used is None else 1)
    length = row_tokens(tokens, sequence_length)
    return None if used is None else used.with_rows(length), length


def lengths_of_loader(loader: DataLoader[Any], longest: int | None) -> Lengths | None:
    """Return the lengths of a loader's samples, which it pads to the longest of a batch; None if they are not known or
    all the same. Collective.
    """
    data, collate = loader.dataset, loader.collate_fn
    found = on_rank_zero(lambda: None if collate is None else find_lengths(data, collate))
    return None if found is None or longest is None else found.unequal(longest)


def loop_options(config: OSDPConfig, model: nn.Module, *, known: bool = False) -> OSDPConfig:
    """Return a loop's options with the tokens of a row of the user's own `inputs`, 1 if these have none.

    Raises:
        ValueError: the model cannot have batch_by_tokens, or nothing says its inputs, which are not `known`.
    """
    refuse_lengths(config, model)
    if config.inputs is None and getattr(model, "config", None) is None and config.plan is None and not known:
        raise ValueError(
            f"The inputs of {type(model).__name__} are not known; give OSDPConfig(inputs=...), a function from a"
            " number of samples to forward's keyword arguments."
        )
    if config.inputs is None or config.sequence_length is not None:
        return config
    return replace(config, sequence_length=tokens_of(config.inputs(1)) or 1)


def refuse_lengths(config: OSDPConfig, model: nn.Module) -> None:
    """Refuse batch_by_tokens in a loop whose model cannot have it."""
    reason = reason_against_lengths(model, compiles=config.compile)
    if config.batch_by_tokens and reason is not None:
        raise ValueError(f"batch_by_tokens=True cannot be used, since {reason}; leave it out.")


def _attributes(owner: object, follows: Callable[[Any], bool]) -> Iterator[tuple[object, str, Any]]:
    """Yield the attributes of an object, and of at most seven objects inside it, with their owners and names."""
    owners = [owner]
    for one in owners:
        for name, value in vars(one).items() if hasattr(one, "__dict__") else ():
            yield one, name, value
            if follows(value) and len(owners) < 8:
                owners.append(value)


@contextmanager
def _undisturbed(dataset: object = None) -> Iterator[None]:
    """Restore all random number generators after this context, and let a dataset, and objects inside it, use copies
    of their own.
    """
    found = list(_attributes(dataset, lambda value: hasattr(value, "__dict__") and not _is_generator(value)))
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    with random_states_kept(devices), ExitStack() as stack:
        for owner, name, value in found:
            if _is_generator(value):
                stack.enter_context(replaced(owner, **{name: copy.deepcopy(value)}))
        yield


def _is_generator(value: object) -> bool:
    return isinstance(value, (random.Random, np.random.Generator, np.random.RandomState, torch.Generator))


def _copy_collator(collate: Collate) -> Collate:
    """Copy a collator with its random number generators, but not its models and tokenizers."""

    def is_kept(value: object) -> bool:
        return isinstance(value, nn.Module) or hasattr(value, "save_pretrained")

    values = [value for *_, value in _attributes(collate, lambda value: callable(value) and not is_kept(value))]
    try:
        return copy.deepcopy(collate, {id(value): value for value in filter(is_kept, values)})
    except Exception:  # for example, it holds an open file
        return collate


def _collate(collate: Collate, samples: Sequence[Any]) -> Any:  # noqa: ANN401
    """Collate copies of the samples, since some collators remove fields."""
    with _undisturbed():  # collators may use random numbers
        return collate([copy.copy(sample) if isinstance(sample, dict) else sample for sample in samples])


def _longest_rows(dataset: Any) -> tuple[int, ...] | None:  # noqa: ANN401  of any library
    """Return the rows of a `datasets.Dataset` with the longest lists or texts, by column and in total, and the
    shortest; None for other datasets.
    """
    table = getattr(dataset, "_data", None)
    if table is None or not hasattr(dataset, "features") or getattr(dataset, "_format_type", None) == "custom":
        return None
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = []
    for name in dataset.column_names:
        column = table.column(name)
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            columns.append(pc.list_value_length(column))
        elif pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            columns.append(pc.utf8_length(column))
    if not columns:
        return (0,)
    lengths = [np.nan_to_num(column.to_numpy().astype(float)) for column in columns]
    if dataset._indices is not None:
        rows = dataset._indices.column(0).to_numpy()
        lengths = [column[rows] for column in lengths]
    total = sum(lengths)
    return tuple(dict.fromkeys(int(values.argmax()) for values in (total, -total, *lengths)))


def _longest(samples: Iterable[Any]) -> tuple[list[Any], int]:
    """Return the samples with the longest fields, the largest total and the least, and how many samples were read."""
    best: dict[Any, tuple[int, int, Any]] = {}
    seen, started = 0, time.monotonic()
    for sample in samples:
        fields = (
            sample
            if isinstance(sample, Mapping)
            else dict(enumerate(sample if isinstance(sample, (tuple, list)) else [sample]))
        )
        lengths = {name: _length(value) for name, value in fields.items()}
        total = sum(lengths.values())
        for name, length in ((None, total), (..., -total), *lengths.items()):
            if name not in best or length > best[name][0]:
                best[name] = (length, seen, sample)
        seen += 1
        if time.monotonic() - started > _MAX_READ_S:
            break
    longest = {index: sample for _, index, sample in best.values()}
    return [longest[index] for index in sorted(longest)], seen


def _length(field: object) -> int:
    if isinstance(field, (torch.Tensor, np.ndarray)):
        return int(np.prod(field.shape))
    return len(field) if isinstance(field, Sized) else 1


def _numel(batch: object) -> int:
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
