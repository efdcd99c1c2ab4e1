"""Batches as the data gives them, found without disturbing the data or the random numbers."""

from __future__ import annotations

import copy
import random

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from hf_osdp.integrations.samples import find_batches, look, takes_keywords, tokens_of


def pad(samples):
    return {"input_ids": torch.nn.utils.rnn.pad_sequence([torch.tensor(s["input_ids"]) for s in samples], batch_first=True)}


class Stream(IterableDataset):
    def __init__(self, lengths):
        self.lengths = lengths

    def __iter__(self):
        yield from ({"input_ids": [0] * length} for length in self.lengths)


class OneShot(IterableDataset):
    """Gives each sample once, and has a place that cannot be copied."""

    def __init__(self, lengths):
        self.samples = ({"input_ids": [0] * length} for length in lengths)

    def __iter__(self):
        return self.samples


class Counting(IterableDataset):
    """Begins where it was left."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < 9:
            self.place += 1
            yield {"input_ids": [0] * self.place}


@pytest.mark.parametrize("many", [5, 3000])
def test_longest_sample_of_a_table_is_found_wherever_it_is(many):
    rows = datasets.Dataset.from_dict({"input_ids": [[1]] * many + [[1] * 7] + [[1]] * many, "labels": [0] * (2 * many + 1)})
    for table in (rows, rows.shuffle(seed=0), rows.select(range(many, 2 * many))):
        batches, looked = find_batches(table, pad)
        assert (batches.tokens, looked.is_whole) == (7, True)
        assert batches(3)["input_ids"].shape == (3, 7)


def test_longest_field_counts_where_another_sample_is_larger_in_all():
    rows = datasets.Dataset.from_dict({"input_ids": [[1] * 9, [1] * 2], "other": [[1], [1] * 30]})
    assert find_batches(rows, pad)[0].tokens == 9


def test_longest_text_counts_where_the_collator_makes_the_tokens():
    rows = datasets.Dataset.from_dict({"text": ["a", "a b c d", "a b"]})
    batches, _ = find_batches(rows, lambda samples: pad([{"input_ids": [1] * len(s["text"].split())} for s in samples]))
    assert batches.tokens == 4


def test_every_sample_of_a_list_is_looked_at():
    samples = [{"input_ids": [0] * length} for length in (*[1] * 400, 8, *[1] * 400)]
    batches, looked = find_batches(samples, pad)
    assert (batches.tokens, looked.seen, looked.total) == (8, 801, 801)


def test_tensors_and_padding_of_the_collate_function():
    loader = DataLoader(TensorDataset(torch.zeros(4, 9, dtype=torch.long)), batch_size=2)
    assert find_batches(loader.dataset, loader.collate_fn)[0].tokens == 9
    assert find_batches(torch.zeros(4, 6), default_collate)[0](5).shape == (5, 6)


def test_images_have_no_tokens():
    batches, _ = find_batches([{"pixel_values": torch.zeros(3, 4, 4), "labels": 1}], default_collate)
    assert batches.tokens is None and batches(2)["pixel_values"].shape == (2, 3, 4, 4)


def test_batches_are_stretched_to_longer_rows():
    from dataclasses import replace

    batches, _ = find_batches([{"input_ids": [3, 4, 5]}], pad)
    assert replace(batches, row_tokens=5)(2)["input_ids"].tolist() == [[3, 4, 5, 3, 4]] * 2


def test_stream_keeps_its_place():
    for stream in (Stream([3, 4]), Counting()):
        before = len(list(copy.deepcopy(stream)))
        assert find_batches(stream, pad)[1].total is None
        assert len(list(stream)) == before


def test_stream_that_cannot_be_copied_is_left_alone():
    stream = OneShot([3, 4])
    assert find_batches(stream, pad) is None
    assert len(list(stream)) == 2


def test_stream_of_datasets_is_not_used_up():
    stream = datasets.Dataset.from_dict({"input_ids": [[1, 2], [1, 2, 3]]}).to_iterable_dataset()
    assert find_batches(stream, pad)[0].tokens == 3
    assert len(list(stream)) == 2


def test_nothing_to_look_at():
    assert look(None) is None and look([]) is None and find_batches(Stream([]), pad) is None


def test_collator_that_takes_fields_out_finds_them_each_time():
    def popping(samples):
        return {"input_ids": torch.tensor([sample.pop("input_ids") for sample in samples])}

    batches, _ = find_batches([{"input_ids": [1, 2]}], popping)
    assert batches(2)["input_ids"].shape == batches(2)["input_ids"].shape == (2, 2)


def test_random_numbers_are_left_where_they_were():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return {"input_ids": torch.full((4,), random.random() + np.random.rand()) + torch.rand(4)}

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()

    before = states()
    batches, _ = find_batches(Noisy(), default_collate)
    batches(2)
    assert states() == before


def test_tokens_of_ids_by_any_prefix():
    ids = torch.zeros(2, 3, 7, dtype=torch.long)
    assert tokens_of({"prompt_input_ids": ids[:, 0, :5], "chosen_input_ids": ids[:, 0]}) == 7
    assert tokens_of({"input_ids": ids}) == 7
    assert tokens_of({"inputs_embeds": torch.zeros(2, 8, 16)}) == 8
    assert tokens_of({"pixel_values": torch.zeros(2, 3)}) is None


def test_batches_that_a_model_takes_by_keywords():
    class Model(torch.nn.Module):
        def forward(self, input_ids, labels=None):
            return input_ids

    assert takes_keywords(Model(), {"input_ids": 1})
    assert not takes_keywords(Model(), {"input_ids": 1, "text": "a"})
    assert not takes_keywords(Model(), (1, 2))
