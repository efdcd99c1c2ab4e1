"""A step's samples are cut into micro-batches without columns of padding, and what cannot be cut is said."""

from __future__ import annotations

import pytest
import torch

from hf_osdp.errors import OSDPError
from hf_osdp.integrations.micro_batches import micro_batches
from hf_osdp.planner.token_budget import TokenBudget

BUDGET = TokenBudget(tokens=64, shortest=8, overhead=8)


def batch(lengths: list[int], columns: int, *, left: bool = False) -> dict[str, torch.Tensor]:
    filled = torch.arange(columns) < torch.tensor(lengths)[:, None]
    mask = (filled.flip(1) if left else filled).long()
    ids = torch.arange(len(lengths) * columns).view(len(lengths), columns) * mask
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "kind": torch.arange(len(lengths))}


def test_parts_hold_every_sample_once_without_padding_columns():
    whole = batch([3, 30, 8, 1, 17], 32)
    parts = [part for part, _ in micro_batches([whole], 1, BUDGET)]
    assert torch.cat([part["kind"] for part in parts]).tolist() == [1, 4, 2, 0, 3]  # from long to short
    assert [tuple(part["input_ids"].shape) for part in parts] == [(1, 32), (1, 24), (3, 8)]
    for part in parts:
        assert_rows_of(whole, part)


def assert_rows_of(whole: dict[str, torch.Tensor], part: dict[str, torch.Tensor]) -> None:
    for row, number in enumerate(part["kind"].tolist()):
        width = min(whole["input_ids"].shape[1], part["input_ids"].shape[1])
        for name in ("input_ids", "attention_mask", "labels"):
            assert torch.equal(part[name][row, :width], whole[name][number, :width])
            assert not whole["attention_mask"][number, width:].any()
            filler = -100 if name == "labels" else 0
            assert (part[name][row, width:] == filler).all()


@pytest.mark.parametrize(
    ("size", "rows", "shares"),
    [
        (1, [1] * 9, [1 / 4] * 8 + [1]), (2, [2, 2, 2, 2, 1], [1 / 2] * 4 + [1]),
        (3, [3, 3, 2, 1], [3 / 4, 3 / 4, 1 / 2, 1]),
        (4, [4, 4, 1], [1, 1, 1]), (8, [8, 1], [2, 1]), (16, [8, 1], [2, 1]),
    ],
)  # fmt: skip
def test_batches_are_cut_and_joined_in_order(size, rows, shares):
    lengths = [5, 30, 8, 1, 17, 9, 3, 4, 12]
    whole = batch(lengths, 32)
    loaded = []
    for start, end in ((0, 4), (4, 8), (8, 9)):
        columns = max(lengths[start:end])
        mine = {name: value[start:end] for name, value in whole.items()}
        loaded.append({name: value[:, :columns] if value.dim() == 2 else value for name, value in mine.items()})
    parts = micro_batches(loaded, size)
    assert torch.cat([part["kind"] for part, _ in parts]).tolist() == list(range(9))
    assert ([len(part["kind"]) for part, _ in parts], [share for _, share in parts]) == (rows, shares)
    for part, _ in parts:
        assert_rows_of(whole, part)
        longest = max(lengths[number] for number in part["kind"].tolist())
        assert longest <= part["input_ids"].shape[1] < longest + 8


def test_labels_and_padding_on_the_left_keep_their_columns():
    whole = batch([3, 2], 32)
    whole["labels"][1, 20] = 5  # beyond the mask
    assert [part["input_ids"].shape[1] for part, _ in micro_batches([whole], 1, BUDGET)] == [24, 8]
    left = micro_batches([batch([3, 2], 32, left=True)], 1, BUDGET)
    assert all(part["input_ids"].shape[1] == 32 for part, _ in left)


def test_pictures_are_cut_without_a_copy():
    pictures = {"pixel_values": torch.rand(4, 3, 2, 2), "labels": torch.arange(4)}
    parts = micro_batches([pictures], 2)
    assert [part["labels"].tolist() for part, _ in parts] == [[0, 1], [2, 3]]
    assert all(part["pixel_values"]._base is pictures["pixel_values"] for part, _ in parts)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_mask": None}, r"its batches have no attention_mask"),
        ({"attention_mask": torch.ones(2, 1, 32, 32).long()}, r"'attention_mask' of its batches may have a value for"),
        ({"kind": torch.tensor(3)}, r"'kind' of its batches has no row for each sample"),
        ({"kind": torch.arange(3)}, r"'kind' of its batches has no row for each sample"),
        ({"kind": ["a", "b"]}, r"'kind' of its batches has no row for each sample"),
        ({"weights": torch.ones(2, 32)}, r"'weights' of its batches may have a value for each token"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(changes, said):
    given = {name: value for name, value in {**batch([3, 2], 32), **changes}.items() if value is not None}
    with pytest.raises(OSDPError, match=f"A step cannot be cut into the plan's micro-batches: {said}"):
        micro_batches([given], 1, BUDGET)
