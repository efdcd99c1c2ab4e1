"""Batches as the data gives them, found without disturbing the data or the random numbers."""

from __future__ import annotations

import random
from functools import partial
from itertools import chain

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.samples import batches_of_loader, find_batches, find_lengths, loop_options


def pad(samples):
    ids = [torch.tensor(sample["input_ids"]) for sample in samples]
    return {"input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)}


class Stream(IterableDataset):
    """Begins where it was left; with `one_shot` it has a place that cannot be copied."""

    def __init__(self, lengths, one_shot=False):
        self.lengths, self.place = lengths, 0
        self.samples = (sample for sample in self._rest()) if one_shot else None

    def _rest(self):
        while self.place < len(self.lengths):
            self.place += 1
            yield {"input_ids": [0] * self.lengths[self.place - 1]}

    def __iter__(self):
        return self.samples or self._rest()


def split_words(samples):
    return pad([{"input_ids": [1] * len(s["text"].split())} for s in samples])


@pytest.mark.parametrize(("dataset", "collate", "tokens"), [
    (datasets.Dataset.from_dict({"input_ids": [[1] * 9, [1] * 2], "other": [[1], [1] * 30]}), pad, 9),
    (datasets.Dataset.from_dict({"text": ["a", "a b c d", "a b"]}), split_words, 4),
    ([{"input_ids": [0] * length} for length in (*[1] * 400, 8, *[1] * 400)], pad, 8),
    (TensorDataset(torch.zeros(4, 9, dtype=torch.long)), default_collate, 9),
    ([{"pixel_values": torch.zeros(3, 4, 4), "labels": 1}], default_collate, None),
], ids=["longest field of any sample", "text that the collator splits", "list", "tensors", "images"])  # fmt: skip
def test_find_batches_has_the_tokens_of_the_longest_row(dataset, collate, tokens):
    batches = find_batches(dataset, collate)
    assert (batches.tokens, batches.seen, batches.is_whole) == (tokens, len(dataset), True)
    batch = batches(2)
    assert len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0]) == 2


def test_find_batches_takes_nothing_from_streams_and_needs_samples():
    table = datasets.Dataset.from_dict({"input_ids": [[1, 2], [1, 2, 3]]})
    for stream, tokens in ((Stream([3, 4]), 4), (table.to_iterable_dataset(), 3)):
        batches = find_batches(stream, pad)
        assert (batches.tokens, batches.is_whole) == (tokens, False)
        assert len(list(stream)) == 2
    uncopied = Stream([3, 4], one_shot=True)
    assert find_batches(uncopied, pad) is None and len(list(uncopied)) == 2
    for nothing in (None, [], Stream([]), datasets.Dataset.from_dict({"a": []})):
        assert find_batches(nothing, pad) is None


ROW, LONGER = ({"input_ids": torch.ones(length, dtype=torch.long)} for length in (3, 4))


@pytest.mark.parametrize(("dataset", "line"), [
    ([], "The dataset has no rows"),
    ({"a": ROW}, "Rows of the dataset make no batch .KeyError"),  # as a sampler of one's own would take them
    ([ROW, LONGER], "make no batch .RuntimeError: stack expects each tensor"),
    ([ROW, {"ids": torch.ones(3)}], "make no batch .KeyError"),
], ids=["none", "keys", "lengths", "fields"])  # fmt: skip
def test_rows_that_make_no_batch_are_refused_where_a_loader_mixes_all(dataset, line):
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)
    with pytest.raises(ValueError, match=line):
        batches_of_loader(loader, torch.nn.Identity(), None)
    assert find_batches(dataset, default_collate) is None or len(dataset) == 2


def test_own_inputs_say_the_length_of_a_row_also_without_tokens():
    model = torch.nn.Linear(2, 2)
    for name, length in (("input", 1), ("input_ids", 8)):
        config = OSDPConfig(inputs=lambda samples, name=name: {name: torch.zeros(samples, 8, dtype=torch.long)})
        assert loop_options(config, model).sequence_length == length
    assert loop_options(OSDPConfig(), model, known=True).sequence_length is None


def test_largest_of_several_datasets_is_found():
    parts = {
        name: datasets.Dataset.from_dict({name: [[1] * 4, [1] * length]}) for name, length in (("a", 9), ("b", 5))
    }
    batches = find_batches(datasets.DatasetDict(parts), lambda rows: {"input_ids": torch.tensor([*rows[0].values()])})
    assert (batches.tokens, batches.seen, batches.sample.keys()) == (9, 4, {"a"})


class Draws:
    """Cuts its samples at random, by a generator of its own or by those of all."""

    def __init__(self, draw, generator=None):
        self.draw, self.generator = draw, generator

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"input_ids": [0] * (1 + int(self.draw(self.generator)))}


@pytest.mark.parametrize(("make", "draw"), [
    (random.Random, lambda own: own.randint(0, 8)),
    (np.random.default_rng, lambda own: own.integers(9)),
    (np.random.RandomState, lambda own: own.randint(9)),
    (lambda seed: torch.Generator().manual_seed(seed), lambda own: torch.randint(9, (1,), generator=own)),
], ids=["random", "numpy", "numpy's old", "torch"])  # fmt: skip
def test_generators_of_datasets_are_not_advanced(make, draw):
    dataset, untouched = Draws(draw, make(3)), make(3)
    assert find_batches(torch.utils.data.Subset(dataset, range(4)), pad) is not None
    assert [draw(dataset.generator) for _ in range(9)] == [draw(untouched) for _ in range(9)]


def test_find_batches_leaves_random_states_as_they_were():
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()

    before = states()
    find_batches(Draws(lambda _: random.randint(0, 8) + np.random.randint(9) + torch.randint(9, (1,))), pad)(2)
    assert states() == before


def padded(samples, left=False, to=None):
    longest = to or max(map(len, samples))
    rows = [[0] * (longest - len(row)) + row if left else row + [0] * (longest - len(row)) for row in samples]
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


@pytest.mark.parametrize(("collate", "found"), [
    (padded, ({3, 5, 9}, {3, 5, 9}, False)),
    (partial(padded, to=12), ({3, 5, 9}, {12}, False)),
    (partial(padded, left=True), ({3, 5, 9}, {3, 5, 9}, True)),
    (lambda samples: {"input_ids": torch.tensor([list(chain(*samples))])}, None),
    (lambda samples: torch.tensor([len(row) for row in samples]), None),
], ids=["to the longest", "to one length", "on the left", "packed", "no tokens"])  # fmt: skip
def test_find_lengths_tells_tokens_from_padding(collate, found):
    rows = [[1] * length for length in (3, 9, 5) * 10]
    lengths = find_lengths(rows, collate)
    assert (lengths and (set(lengths.tokens), set(lengths.padded), lengths.on_the_left)) == found
    assert not lengths or lengths.fillers == {0}


def test_lengths_of_a_stream_and_of_equal_rows_are_not_known():
    assert find_lengths(Stream([3, 5]), pad) is None
    assert find_lengths([[1] * 4] * 5, padded).unequal(8) is None
