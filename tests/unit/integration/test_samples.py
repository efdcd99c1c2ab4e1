"""How long a sample is, read without disturbing the data or the random numbers."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from hf_osdp import OSDPConfig, Trainer
from hf_osdp.integration.samples import batch_length, longest_sample


def test_longest_of_the_first_samples():
    assert longest_sample([{"input_ids": [1, 2]}, {"input_ids": torch.zeros(5)}, {"input_ids": [1]}]) == 5


def test_iterable_dataset_is_not_used_up():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from ({"input_ids": [0] * n} for n in (3, 4))

    stream = Stream()
    assert longest_sample(stream) == 4
    assert len(list(stream)) == 2


def test_a_stream_is_not_read_where_its_length_is_given():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            raise AssertionError("read")

    trainer = object.__new__(Trainer)
    trainer._datasets = (Stream(), None)
    assert trainer._sequence_length(OSDPConfig(sequence_length=7)) == 7
    with pytest.raises(AssertionError, match="read"):
        trainer._sequence_length(OSDPConfig())


def test_unknown_shapes_give_none():
    assert longest_sample(None) is None
    assert longest_sample([]) is None
    assert longest_sample([{"label": 1}]) is None


def test_padding_of_the_collate_function_counts():
    def pad(samples):
        return {"input_ids": torch.stack([torch.nn.functional.pad(s, (0, 16 - len(s))) for s in samples])}

    loader = DataLoader([torch.zeros(5), torch.zeros(7)], batch_size=2, collate_fn=pad)
    assert batch_length(loader.dataset, loader.collate_fn) == 16


def test_tensor_dataset():
    loader = DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 9)), batch_size=2)
    assert batch_length(loader.dataset, loader.collate_fn) == 9
    assert batch_length(torch.zeros(4, 6), torch.utils.data.default_collate) == 6


def test_random_numbers_are_left_where_they_were():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return {"input_ids": torch.rand(4)}

    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    longest_sample(Noisy())
    batch_length(Noisy(), torch.utils.data.default_collate)
    assert torch.equal(before, torch.random.get_rng_state())
