"""Batches as the data gives them, found without disturbing the data or the random numbers."""

from __future__ import annotations

import random
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from hf_osdp.integrations import samples as found_in
from hf_osdp.integrations.samples import accepts_as_keywords, find_batches, row_tokens, tokens_of


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


@pytest.mark.parametrize("many", [5, 3000])
def test_longest_sample_of_a_table_is_found_wherever_it_is(many):
    ids = [[1]] * many + [[1] * 7] + [[1]] * many
    rows = datasets.Dataset.from_dict({"input_ids": ids, "labels": [0] * len(ids)})
    for table in (rows, rows.shuffle(seed=0), rows.select(range(many, 2 * many))):
        batches = find_batches(table, pad)
        assert (batches.tokens, batches.is_whole) == (7, True)
        assert batches(3)["input_ids"].shape == (3, 7)


def split_words(samples):
    return pad([{"input_ids": [1] * len(s["text"].split())} for s in samples])


@pytest.mark.parametrize(
    ("dataset", "collate", "tokens"),
    [
        (datasets.Dataset.from_dict({"input_ids": [[1] * 9, [1] * 2], "other": [[1], [1] * 30]}), pad, 9),
        (datasets.Dataset.from_dict({"text": ["a", "a b c d", "a b"]}), split_words, 4),
        ([{"input_ids": [0] * length} for length in (*[1] * 400, 8, *[1] * 400)], pad, 8),
        (TensorDataset(torch.zeros(4, 9, dtype=torch.long)), default_collate, 9),
        ([{"pixel_values": torch.zeros(3, 4, 4), "labels": 1}], default_collate, None),
    ],
    ids=["longest field of any sample", "text that the collator splits", "list", "tensors", "images"],
)
def test_find_batches_has_the_tokens_of_the_longest_row(dataset, collate, tokens):
    batches = find_batches(dataset, collate)
    assert (batches.tokens, batches.seen, batches.is_whole) == (tokens, len(dataset), True)
    batch = batches(2)
    assert len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0]) == 2


def test_batches_are_stretched_and_made_anew_each_time():
    batches = find_batches([{"input_ids": [3, 4, 5]}], pad)
    assert replace(batches, row_tokens=5)(2)["input_ids"].tolist() == [[3, 4, 5, 3, 4]] * 2
    assert batches.with_rows(5) == replace(batches, row_tokens=5) and (row_tokens(3, None), row_tokens(3, 5)) == (3, 5)

    def collate(samples):
        return {"input_ids": torch.tensor([sample.pop("input_ids") for sample in samples])}

    batches = find_batches([{"input_ids": [1, 2]}], collate)
    assert batches(2)["input_ids"].shape == batches(2)["input_ids"].shape == (2, 2)


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


def test_tokens_and_keywords_are_read_from_a_batch():
    ids = torch.zeros(2, 3, 7, dtype=torch.long)
    assert tokens_of({"prompt_input_ids": ids[:, 0, :5], "chosen_input_ids": ids[:, 0]}) == 7
    assert tokens_of({"input_ids": ids}) == 7
    assert tokens_of({"inputs_embeds": torch.zeros(2, 8, 16)}) == 8
    assert tokens_of({"pixel_values": torch.zeros(2, 3)}) is None
    model = torch.nn.Linear(1, 1)  # forward(input)
    taken = [accepts_as_keywords(model, batch) for batch in ({"input": 1}, {"input": 1, "text": "a"}, (1, 2))]
    assert taken == [True, False, False]


def test_batches_that_a_model_refuses_have_no_length(monkeypatch):
    rows = [{"pixels": torch.ones(3)}] * 4
    monkeypatch.setattr(found_in, "all_gather_objects", lambda own: [own, 0])  # a rank without data beside this one
    assert found_in.batches_of_loader(DataLoader(rows, batch_size=2), torch.nn.Linear(3, 3), None) == (None, None)


class Draws:
    """Cuts its samples by a random number generator of its own, or by those of all."""

    def __init__(self, generator=None):
        self.generator = generator

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"input_ids": [0] * (1 + self.draw())}

    def draw(self) -> int:
        match self.generator:
            case None:
                return random.randint(0, 8) + int(np.random.randint(9)) + int(torch.randint(9, (1,)))
            case torch.Generator():
                return int(torch.randint(9, (1,), generator=self.generator))
            case np.random.Generator():
                return int(self.generator.integers(9))
        return int(self.generator.randint(0, 8))


@pytest.mark.parametrize(
    "make",
    [random.Random, np.random.default_rng, np.random.RandomState, lambda seed: torch.Generator().manual_seed(seed)],
)
def test_generators_of_datasets_are_not_advanced(make):
    dataset, untouched = Draws(make(3)), Draws(make(3))
    assert find_batches(torch.utils.data.Subset(dataset, range(4)), pad) is not None
    assert [dataset.draw() for _ in range(9)] == [untouched.draw() for _ in range(9)]


def test_find_batches_leaves_random_states_as_they_were():
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()

    before = states()
    find_batches(Draws(), pad)(2)
    assert states() == before
