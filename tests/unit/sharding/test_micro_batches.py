"""A step's batches are cut or joined into micro-batches that hold the same rows, and what cannot be is said."""

from __future__ import annotations

import pytest
import torch
import transformers

from hf_osdp.errors import OSDPError
from hf_osdp.planner.token_budget import TokenBudget
from hf_osdp.sharding.micro_batches import (
    dealt,
    micro_batches,
    pad_token_of,
    reason_against_cuts,
    reason_against_lengths,
)
from tests.helpers.distributed import run_ranks

BUDGET = TokenBudget(tokens=64, shortest=8, longest=32, overhead=8)
LENGTHS = [5, 30, 8, 1, 17, 9, 3, 4, 12]
Batch = dict[str, torch.Tensor]


def batch(lengths: list[int], columns: int, *, left: bool = False) -> Batch:
    filled = torch.arange(columns) < torch.tensor(lengths)[:, None]
    mask = (filled.flip(1) if left else filled).long()
    ids = (1 + torch.arange(len(lengths) * columns).view(len(lengths), columns)) * mask
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "kind": torch.arange(len(lengths))}


def loaded(columns: int = 0) -> tuple[Batch, list[Batch]]:
    """All samples, and batches of 4, 4 and 1 of them, of so many columns or those of their longest sample."""
    whole, batches = batch(LENGTHS, 32), []
    for start, end in ((0, 4), (4, 8), (8, 9)):
        width = columns or max(LENGTHS[start:end])
        mine = {name: value[start:end] for name, value in whole.items()}
        batches.append({name: value[:, :width] if value.dim() == 2 else value for name, value in mine.items()})
    return whole, batches


def by_length(*batches: Batch, averages: bool = False) -> list[Batch]:
    return [part for part, _ in micro_batches(batches, 1, BUDGET, averages=averages, pad_token=7)]


def assert_rows_of(whole: Batch, part: Batch) -> None:
    for row, number in enumerate(part["kind"].tolist()):
        width = min(whole["input_ids"].shape[1], part["input_ids"].shape[1])
        for name in ("input_ids", "attention_mask", "labels"):
            assert torch.equal(part[name][row, :width], whole[name][number, :width])
        assert not whole["attention_mask"][number, width:].any() and not part["attention_mask"][row, width:].any()


@pytest.mark.parametrize(
    ("columns", "size", "rows", "shares"),
    [
        (0, 1, [1] * 9, [1 / 4] * 8 + [1]), (0, 3, [3, 1, 3, 1, 1], [3 / 4, 1 / 4, 3 / 4, 1 / 4, 1]),
        (0, 8, [4, 4, 1], [1, 1, 1]), (32, 4, [4, 4], [1, 1]), (32, 7, [4, 4], [1, 1]), (32, 8, [8], [2]),
        (32, 16, [8], [2]),
    ],
)  # fmt: skip
def test_batches_are_cut_in_order_and_those_of_equal_shapes_are_joined(columns, size, rows, shares):
    whole, batches = loaded(columns)
    parts = micro_batches(batches[:2] if columns else batches, size, averages=True)
    assert torch.cat([part["kind"] for part, _ in parts]).tolist() == list(range(sum(rows)))
    assert ([len(part["kind"]) for part, _ in parts], [share for _, share in parts]) == (rows, shares)
    for part, _ in parts:
        assert_rows_of(whole, part)
        first = int(part["kind"][0]) // 4 * 4
        assert part["input_ids"].shape[1] == (columns or max(LENGTHS[first : first + 4])), "columns stay"


def test_samples_by_length_lose_columns_of_padding():
    whole = batch([3, 30, 8, 1, 17], 32)
    parts = by_length(whole)
    assert torch.cat([part["kind"] for part in parts]).tolist() == [1, 4, 2, 0, 3]
    assert [tuple(part["input_ids"].shape) for part in parts] == [(1, 32), (1, 24), (3, 8)]
    for part in parts:
        assert_rows_of(whole, part)
    whole = batch([3, 2], 32)
    whole["labels"][1, 20] = 5
    assert [part["input_ids"].shape[1] for part in by_length(whole)] == [24, 8], "labels beyond the mask stay"
    shares = [share for _, share in micro_batches(loaded()[1][1:], 1, BUDGET, averages=True)]
    assert sum(shares) == 2 and shares[-1] == 1, "the last batch of an epoch is cut by itself"


def test_ids_that_become_longer_are_filled_with_the_token_of_padding():
    few = TokenBudget(tokens=64, shortest=8, longest=32, overhead=50)
    ((part, _),) = micro_batches([batch([8], 8), batch([12], 12)], 1, few, averages=False, pad_token=7)
    assert part["input_ids"].shape == (2, 16 - 4) and part["attention_mask"].sum(1).tolist() == [12, 8]
    assert part["input_ids"][1, 8:].tolist() == [7] * 4 and part["labels"][1, 8:].tolist() == [-100] * 4


def test_pictures_are_cut_without_a_copy():
    pictures = {"pixel_values": torch.rand(4, 3, 2, 2), "labels": torch.arange(4)}
    parts = micro_batches([pictures], 2, averages=True)
    assert [part["labels"].tolist() for part, _ in parts] == [[0, 1], [2, 3]]
    assert all(part["pixel_values"]._base is pictures["pixel_values"] for part, _ in parts)


NO_ROW, OF_TOKENS = "has no row for each sample", "may have a value for"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("attention_mask", torch.ones(2, 1, 32, 32).long(), OF_TOKENS), ("kind", torch.tensor(3), NO_ROW),
        ("kind", torch.arange(3), NO_ROW), ("kind", ["a", "b"], NO_ROW), ("weights", torch.ones(2, 32), OF_TOKENS),
        ("pixel_values", torch.ones(2, 3, 4, 4), OF_TOKENS),
    ],
)  # fmt: skip
def test_batches_that_cannot_be_cut_are_refused(name, value, said):
    with pytest.raises(
        OSDPError, match=f"A step cannot be cut into the plan's micro-batches: '{name}' of its .*{said}"
    ):
        by_length({**batch([3, 2], 32), name: value}, averages=True)


@pytest.mark.parametrize("given", [None, [], {}, {"input_ids": [[1, 2], [3, 4]]}, {"input_ids": torch.ones(1, 4)}])
def test_other_batches_of_two_samples_are_not_cut(given):
    assert reason_against_cuts(given, samples=2) is not None


@pytest.mark.parametrize("changes", [{"attention_mask": None}, batch([3, 2], 32, left=True)], ids=["no mask", "left"])
def test_what_has_no_length_is_cut_by_rows(changes):
    given = {name: value for name, value in {**batch([3, 2], 32), **changes}.items() if value is not None}
    parts = by_length(given)
    assert all(torch.equal(torch.cat([part[name] for part in parts]), value) for name, value in given.items())
    assert [len(part["kind"]) for part in parts] == [1, 1]


def dealt_rows(rank: int) -> Batch:
    own = batch([[4, 9, 1], [30, 2, 8]][rank], 16 * (1 + rank))
    return {**own, "kind": own["kind"] + 10 * rank, "weight": torch.tensor([0.5, -1.0, 2.0])}


def deal() -> list[Batch]:
    number = torch.distributed.get_rank()
    alike = dealt(dealt_rows(number), 7)
    return [alike, dealt({**dealt_rows(number), **({"more": torch.ones(3)} if number else {})}, 7)]


def test_samples_are_dealt_in_turn_from_long_to_short():
    (first, kept), (second, _) = run_ranks(deal, 2, shared=True)
    assert first["kind"].tolist() == [10, 12, 11] and second["kind"].tolist() == [1, 0, 2]  # 30, 8, 2 and 9, 4, 1
    assert second["weight"].tolist() == [-1.0, 0.5, 2.0] and first["weight"].dtype == torch.float32
    for part in (first, second):
        for row, kind in enumerate(part["kind"].tolist()):
            whole = dealt_rows(kind // 10)
            width = whole["input_ids"].shape[1]
            for name, filler in (("input_ids", 7), ("attention_mask", 0), ("labels", -100)):
                assert torch.equal(part[name][row, :width], whole[name][kind % 10])
                assert (part[name][row, width:] == filler).all()
    assert kept["kind"].tolist() == [0, 1, 2]  # columns differ


def test_batches_of_different_fields_are_cut_by_rows():
    first, second = batch([9, 4], 16), {**batch([5, 3], 16), "weight": torch.ones(2)}
    parts = [part for part, _ in micro_batches([first, second], 1, BUDGET, averages=True)]
    assert [set(part) - set(first) for part in parts] == [set(), set(), {"weight"}, {"weight"}]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "longest row"),
        ({"summary_type": "mean"}, "depend on padding"),
        ({"pad_token_id": -1}, None),
    ],
)
def test_models_whose_rows_depend_on_their_batch_are_not_cut_by_length(config, said):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=16, **config))
    reason = reason_against_lengths(model, compiles=False)
    assert (said is None) is (reason is None)
    assert said is None or said in str(reason)
    assert pad_token_of(model) == 0


def test_means_weigh_by_labels_where_samples_have_none():
    given = {**batch([3, 2, 5], 8), "labels": torch.tensor([1, -100, 2])}
    shares = [share for _, share in micro_batches([given], 1, BUDGET, averages=True)]
    assert shares == [1 / 2, 0, 1 / 2]
    none = {**given, "labels": torch.full((3,), -100)}
    assert [share for _, share in micro_batches([none], 2, averages=True)] == [2 / 3, 1 / 3]
