"""A step's samples are cut into micro-batches without columns of padding, and what cannot be cut is said."""

from __future__ import annotations

import pytest
import torch

from hf_osdp.errors import OSDPError
from hf_osdp.integrations.by_length import micro_batches
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
    parts = micro_batches(whole, BUDGET)
    assert torch.cat([part["kind"] for part in parts]).tolist() == [1, 4, 2, 0, 3]  # from long to short
    assert [tuple(part["input_ids"].shape) for part in parts] == [(1, 32), (1, 24), (3, 8)]
    for part in parts:
        for row, number in enumerate(part["kind"].tolist()):
            for name in ("input_ids", "attention_mask", "labels"):
                width = part[name].shape[1]
                assert torch.equal(part[name][row], whole[name][number, :width])
                assert not (whole["attention_mask"][number, width:]).any()


def test_labels_and_padding_on_the_left_keep_their_columns():
    whole = batch([3, 2], 32)
    whole["labels"][1, 20] = 5  # beyond the mask
    assert [part["input_ids"].shape[1] for part in micro_batches(whole, BUDGET)] == [24, 8]
    assert all(part["input_ids"].shape[1] == 32 for part in micro_batches(batch([3, 2], 32, left=True), BUDGET))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_mask": None}, r"batches have no attention_mask of samples × tokens"),
        ({"attention_mask": torch.ones(2, 1, 32, 32)}, r"batches have no attention_mask of samples × tokens"),
        ({"kind": torch.tensor(3)}, r"'kind' of a batch has no row for each sample"),
        ({"kind": ["a", "b"]}, r"'kind' of a batch has no row for each sample"),
        ({"weights": torch.ones(2, 32)}, r"'weights' of a batch may have a value for each token"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(changes, said):
    given = {name: value for name, value in {**batch([3, 2], 32), **changes}.items() if value is not None}
    with pytest.raises(OSDPError, match=f"Samples cannot be cut by length, because {said}.*batch_by_tokens=False"):
        micro_batches(given, BUDGET)
