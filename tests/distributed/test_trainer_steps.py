"""A plan's micro-batches train on the samples of the stock Trainer's steps, also by length and at an epoch's end; so
do loops of one's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from hf_osdp import OptimalShardedDataParallel, OSDPAccelerator, OSDPConfig
from hf_osdp.errors import OSDPError
from hf_osdp.integrations.trainer import Trainer
from tests.helpers.architectures import tiny_config
from tests.helpers.distributed import run_ranks
from tests.helpers.sampling import slow_but

LONGEST = 40


def samples(count: int, *, classes: int = 0) -> list[dict[str, Any]]:
    dice = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, LONGEST + 1, (count,), generator=dice).tolist()
    rows = [torch.randint(3, 61, (length,), generator=dice).tolist() for length in lengths]
    return [{"input_ids": row, "labels": len(row) % classes if classes else row} for row in rows]


def collate(left: bool, fixed: bool, pad: int, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = LONGEST if fixed else max(len(row["input_ids"]) for row in rows)

    def padded(values: list[int], filler: int) -> list[int]:
        more = [filler] * (longest - len(values))
        return more + values if left else values + more

    batch = {"input_ids": [padded(row["input_ids"], pad) for row in rows]}
    batch["attention_mask"] = [padded([1] * len(row["input_ids"]), 0) for row in rows]
    batch["labels"] = [
        padded(row["labels"], -100) if isinstance(row["labels"], list) else row["labels"] for row in rows
    ]
    return {name: torch.tensor(values) for name, values in batch.items()}


class Masked:
    """Hides tokens by draws of torch's own generator, as the collator of masked language models."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = collate(False, False, 0, rows)
        hidden = (torch.rand(batch["labels"].shape) < 0.3) & (batch["attention_mask"] > 0)
        ids = batch["input_ids"].masked_fill(hidden, 1)
        return {**batch, "input_ids": ids, "labels": batch["labels"].masked_fill(~hidden, -100)}


def token_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Loss of each token's own label."""
    loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / (labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)


def exact_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Next-token loss in the logits' own dtype: the models' own is taken in float32."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return loss / (labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)


def made(name: str, like: str, **changes: Any) -> Any:
    """Return a model in float64, of the tiny sizes of another class."""
    torch.manual_seed(0)
    return getattr(transformers, name)(tiny_config(like, initializer_range=0.2, **changes)).double()


def next_token() -> dict[str, Any]:
    model = made("GPT2LMHeadModel", "GPT2LMHeadModel")
    return {"model": model, "train_dataset": samples(37), "compute_loss_func": exact_loss}


def at_last_token() -> dict[str, Any]:
    """A classifier that reads the last token that is not padding, found by its id."""
    model = made("GPT2ForSequenceClassification", "GPT2LMHeadModel", num_labels=3, pad_token_id=61)
    return {"model": model, "train_dataset": samples(37, classes=3)}


class Stream(torch.utils.data.IterableDataset):
    """Samples without a length, whose end does not fill a step."""

    def __iter__(self):
        yield from samples(20)

    def __getitem__(self, part: slice) -> list[dict[str, Any]]:
        return samples(20)[part]


def of_a_stream() -> dict[str, Any]:
    return {**next_token(), "train_dataset": Stream()}


def bert(kind: str, labels: int) -> Any:
    return made(f"BertFor{kind}", "BertForMaskedLM", num_labels=labels)


def classes() -> dict[str, Any]:
    """The loss of transformers' classifiers is a mean over samples, which the stock Trainer adds up."""
    return {"model": bert("SequenceClassification", 3), "train_dataset": samples(37, classes=3)}


def several() -> dict[str, Any]:
    """Labels that are numbers, one for each class; as many classes as tokens in the longest row."""
    rows = [{**row, "labels": len(row["input_ids"])} for row in samples(37)]
    model = bert("SequenceClassification", LONGEST)
    model.config.problem_type = "multi_label_classification"
    return {"model": model, "train_dataset": rows, "data_collator": of_classes}


def of_classes(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = collate(False, False, 0, rows)
    return {**batch, "labels": (torch.arange(LONGEST) % batch["labels"][:, None] == 0).double()}


def partly_labelled() -> dict[str, Any]:
    built = classes()
    for row in built["train_dataset"][::5]:
        row["labels"] = -100
    return built


def masked() -> dict[str, Any]:
    given = {"train_dataset": samples(37), "compute_loss_func": token_loss, "data_collator": Masked()}
    return {"model": bert("MaskedLM", 2), **given}


def tokens() -> dict[str, Any]:
    """Labels of tokens, of which one sample has none."""
    rows = [{**row, "labels": [token % 5 for token in row["input_ids"]]} for row in samples(37)]
    rows[3]["labels"] = [-100] * len(rows[3]["labels"])
    model = bert("TokenClassification", 5)
    return {"model": model, "train_dataset": rows, "compute_loss_func": token_loss}


def adapted() -> dict[str, Any]:
    peft = pytest.importorskip("peft")
    built = next_token()
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    torch.manual_seed(0)
    return {**built, "model": peft.get_peft_model(built["model"], config)}


def shifted(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = collate(False, False, 0, rows)
    before = batch["labels"].roll(1, 1).index_fill(1, torch.tensor([0]), 0)
    return {**batch, "decoder_input_ids": before.clamp(min=0)}


def pairs() -> dict[str, Any]:
    """An encoder with a decoder."""
    model = made("T5ForConditionalGeneration", "T5ForConditionalGeneration", num_layers=1, pad_token_id=0)
    given = {"train_dataset": samples(37), "compute_loss_func": token_loss, "data_collator": shifted}
    return {"model": model, **given}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    build: Any = next_token
    osdp: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    left: bool = False
    """Whether padding is on the left."""
    fixed: bool = False
    """Whether all batches are padded to one length."""
    pad: int = 0
    sizes: tuple[int, ...] = ()
    """Samples of a rank's micro-batches in the first step; empty if lengths decide."""


BY_TOKENS = {"batch_by_tokens": True}
CASES = {
    "smaller": Case(osdp={"micro_batch_size": 1}, sizes=(1,) * 8),
    "joined": Case(osdp={"micro_batch_size": 8}, fixed=True, sizes=(8,)),
    "not joined": Case(osdp={"micro_batch_size": 8}, sizes=(4, 4)),
    "cut unevenly": Case(
        osdp={"micro_batch_size": 4}, arguments={"per_device_train_batch_size": 6}, sizes=(4, 2, 4, 2)
    ),
    "means, joined": Case(build=classes, osdp={"micro_batch_size": 8}, fixed=True, sizes=(8,)),
    "means at the last token, by tokens": Case(
        build=at_last_token, osdp={"batch_by_tokens": True, "micro_batch_size": 2}, pad=61
    ),
    "means at the last token": Case(build=at_last_token, osdp={"micro_batch_size": 2}, pad=61, sizes=(2,) * 4),
    "a stream": Case(build=of_a_stream, osdp={"micro_batch_size": 2}, ranks=1, sizes=(2,) * 4),
    "as it comes": Case(build=classes, osdp={"micro_batch_size": 2}, ranks=1),
    "LoRA by tokens": Case(build=adapted, osdp={**BY_TOKENS, "micro_batch_size": 2}),
    "masked by tokens": Case(build=masked, osdp={**BY_TOKENS, "micro_batch_size": 2}),
    "labels of tokens by tokens": Case(build=tokens, osdp={**BY_TOKENS, "micro_batch_size": 2}),
    "encoder and decoder": Case(build=pairs, osdp={**BY_TOKENS, "micro_batch_size": 2}, sizes=(2,) * 4),
    "several labels by tokens": Case(build=several, osdp={**BY_TOKENS, "micro_batch_size": 2}),
    "by tokens": Case(osdp={**BY_TOKENS, "micro_batch_size": 2}),
    "means, some without a label": Case(
        build=partly_labelled, osdp={**BY_TOKENS, "micro_batch_size": 2}, sizes=(2,) * 4
    ),
    "means by tokens": Case(build=classes, osdp={**BY_TOKENS, "micro_batch_size": 2}),
    "by tokens, three ranks": Case(osdp={**BY_TOKENS, "micro_batch_size": 4}, ranks=3),
    "by tokens, one process": Case(osdp={**BY_TOKENS, "micro_batch_size": 2}, ranks=1),
    "means, one process": Case(build=classes, osdp={"micro_batch_size": 2}, ranks=1, sizes=(2,) * 4),
    "padding on the left": Case(osdp={**BY_TOKENS, "micro_batch_size": 2}, left=True, sizes=(2,) * 4),
    "evaluates, drops the last batch": Case(
        osdp={**BY_TOKENS, "micro_batch_size": 2},
        arguments={"dataloader_drop_last": True, "eval_strategy": "steps", "eval_steps": 2},
    ),
    "tokens of each process": Case(
        osdp={"micro_batch_size": 2}, arguments={"average_tokens_across_devices": False}, sizes=(2,) * 4
    ),
}  # fmt: skip


def trained(name: str, folder: str, osdp: Any) -> tuple[list[dict[str, float]], list[int]]:
    """Return what this rank logs, and the samples of each call of the model in the first step."""
    case, sizes = CASES[name], list[int]()
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **case.arguments}
    args = TrainingArguments(
        output_dir=folder, max_steps=8, logging_steps=1, learning_rate=1e-2, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="steps", save_steps=5, seed=5, optim="adamw_torch", adam_epsilon=1e-5,
        logging_nan_inf_filter=False, **given,
    )  # fmt: skip
    kind = transformers.Trainer if osdp is None else partial(Trainer, osdp=osdp)
    logs = []
    for resumed in (None, f"{folder}/checkpoint-5") if name != "a stream" else (None,):  # in the midst of an epoch
        built = {"data_collator": partial(collate, case.left, case.fixed, case.pad), **case.build()}
        trainer = kind(args=args, eval_dataset=built["train_dataset"][:9], **built)

        def called(module: Any, positional: Any, keywords: Any, trainer: Any = trainer) -> None:
            if module.training and not trainer.state.global_step:
                sizes.append(len(keywords["input_ids"]))

        trainer.model.register_forward_pre_hook(called, with_kwargs=True)
        trainer.train(resume_from_checkpoint=resumed)
        logs += [
            {name: float(entry[name]) for name in ("loss", "grad_norm", "eval_loss") if name in entry}
            for entry in trainer.state.log_history
        ]
        weights = trainer.accelerator.get_state_dict(trainer.model)
        logs.append({name: float(value.double().square().sum()) for name, value in weights.items()})
    return logs, sizes


@pytest.mark.parametrize(
    "name", slow_but(CASES, daily=("joined", "means at the last token, by tokens", "means, one process"))
)
def test_trainer_logs_what_the_stock_one_does(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    of_case = {"batch_by_tokens": False, **case.osdp} if case.sizes else case.osdp
    osdp = {"strategy": "fsdp" if case.ranks > 1 else "osdp", "hardware": "cpu", **of_case}
    (want, _), (got, sizes) = (
        run_ranks(trained, case.ranks, name, str(tmp_path / side), asked, timeout_s=200, shared=True)[0]
        for side, asked in (("stock", None), ("planned", osdp))
    )
    assert len(got) == len(want) > 6
    for ours, stock in zip(got, want, strict=True):
        assert ours == pytest.approx(stock, rel=1e-6)  # losses are added up in float32
        exact = {name: value for name, value in stock.items() if "loss" not in name}
        assert {name: ours[name] for name in exact} == pytest.approx(exact, rel=1e-11)
    assert not case.sizes or tuple(sizes) == case.sizes
    assert case.sizes or len(set(sizes)) > 1 or case.ranks == 3


# ---- loops of one's own, plain and on Accelerate

RANKS, OF_RANK, STEPS = 2, 12, 3


def batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    first = OF_RANK * (RANKS * step + rank)
    return collate(False, True, 0, samples(RANKS * OF_RANK * STEPS, classes=3)[first : first + OF_RANK])


def train(parts: Callable[[Any], Iterator[Any]], rank: int, optimizer: Any, backward: Any, model: Any) -> list[int]:
    sizes = []
    for step in range(STEPS):
        for part, share in parts(batch(step, rank)):
            backward(model(**part).loss * share)
            sizes.append(len(part["labels"]))
        optimizer.step()
        optimizer.zero_grad()
    return sizes


def of_ranks(kind: str) -> tuple[dict[str, torch.Tensor], list[int]]:
    config = OSDPConfig(
        batch_by_tokens=True, sequence_length=LONGEST, global_batch_size=RANKS * OF_RANK, micro_batch_size=3,
        hardware="cpu", strategy="fsdp", compare=False, report=False,
    )  # fmt: skip
    model = classes()["model"]
    if kind == "plain":
        model = OptimalShardedDataParallel(model, config, optimizer="sgd")
        rank, optimizer = torch.distributed.get_rank(), torch.optim.SGD(model.parameters(), lr=0.1)
        sizes = train(model.micro_batches, rank, optimizer, torch.Tensor.backward, model)
        return model.full_state_dict(), sizes
    accelerator = OSDPAccelerator(osdp=config, cpu=True)
    loader: Any = DataLoader(range(96), batch_size=accelerator.plan(model).samples_per_rank)
    model, optimizer, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    with pytest.raises(OSDPError, match=r"a batch is a whole step, which accelerator\.micro_batches"):
        accelerator.backward(torch.zeros((), requires_grad=True))
    parts = partial(accelerator.micro_batches, model)
    sizes = train(parts, accelerator.process_index, optimizer, accelerator.backward, model)
    return accelerator.get_state_dict(model), sizes


@pytest.mark.parametrize("kind", ["plain", "Accelerate"])
def test_step_of_a_loop_that_is_cut_by_length_is_that_of_one_process(kind: str) -> None:
    found = run_ranks(of_ranks, RANKS, kind, shared=True)
    want = classes()["model"]
    optimizer = torch.optim.SGD(want.parameters(), lr=0.1)
    for step in range(STEPS):
        every = [batch(step, rank) for rank in range(RANKS)]
        want(**{name: torch.cat([one[name] for one in every]) for name in every[0]}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, sizes = found[0]
    torch.testing.assert_close(weights, want.state_dict(), rtol=1e-10, atol=1e-12)
    assert len(set(sizes)) > 1 and [sum(own) for _, own in found] == [STEPS * OF_RANK] * RANKS
