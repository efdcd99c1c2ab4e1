"""Memory of evaluation, as torch's allocator counts it, against the estimate and under the plan's limit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers

from hf_osdp import OSDPConfig, Trainer, with_osdp
from tests.helpers.sampling import slow_but

from .training import on_devices

MEMORY_ALONE = {"FAKE_CUDA_COMPUTE_MAX": "4096"}
TOKENS, CUBLAS_BYTES = 128, 8_519_680


def rows(count: int, vocabulary: int, classes: int, decoder: int) -> list[dict[str, Any]]:
    dice = torch.Generator().manual_seed(0)
    found = torch.randint(3, vocabulary, (count, TOKENS), generator=dice)
    labels = [number % classes for number in range(count)] if classes else found[:, : decoder or TOKENS]
    mask = torch.ones(TOKENS, dtype=torch.long)
    masked = {} if not (classes or decoder) else {"attention_mask": mask}
    return [{"input_ids": ids, "labels": label, **masked} for ids, label in zip(found, labels, strict=True)]


def causal() -> torch.nn.Module:
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": TOKENS}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **none, vocab_size=50257))


def classifier() -> torch.nn.Module:
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, vocab_size=2000, num_labels=3))


def seq2seq() -> torch.nn.Module:
    sizes = {
        "d_model": 128,
        "d_kv": 64,
        "d_ff": 256,
        "num_layers": 2,
        "num_heads": 2,
        "vocab_size": 32128,
        "decoder_start_token_id": 0,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def largest(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def count(prediction: Any, compute_result: bool = True) -> dict[str, int]:
    return {"count": len(prediction.label_ids)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: Any = causal
    vocabulary: int = 50257
    classes: int = 0
    decoder: int = 0
    """Tokens of a target."""
    samples: int = 24
    metrics: bool = False
    reduces: Any = None
    """`preprocess_logits_for_metrics`."""
    limit: str = "8GiB"
    ranks: int = 1
    osdp: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    generates: bool = False
    parts: bool = False
    """Whether batches are cut to fit."""
    moves: bool = False
    """Whether outputs go to the host earlier to fit."""


CASES = {
    "causal": Case(osdp={"split_vocabulary": False}),
    "causal, loss in chunks": Case(arguments={"per_device_train_batch_size": 16}, limit="2GiB"),
    "causal, logits kept": Case(metrics=True),
    "causal, in parts": Case(
        osdp={"split_vocabulary": False}, limit="2GiB", arguments={"per_device_eval_batch_size": 12}, parts=True
    ),
    "causal, logits kept, moved earlier": Case(metrics=True, limit="2GiB", samples=60, moves=True),
    "causal, logits kept, in parts": Case(
        metrics=True, limit="2GiB", samples=36, arguments={"per_device_eval_batch_size": 12}, moves=True, parts=True
    ),
    "causal, logits kept, two ranks": Case(metrics=True, ranks=2, osdp={"strategy": "fsdp"}),
    "causal, two replicas": Case(metrics=True, ranks=2, osdp={"strategy": "ddp"}),
    "causal, two ranks, kept after forward": Case(ranks=2, osdp={"strategy": "zero2"}),
    "causal, bf16": Case(arguments={"bf16": True}),
    "causal, bf16, two ranks": Case(arguments={"bf16": True}, metrics=True, ranks=2, osdp={"strategy": "fsdp"}),
    "causal, tokens of the largest logits kept": Case(metrics=True, reduces=largest),
    "causal, metrics of each batch": Case(metrics=True, arguments={"batch_eval_metrics": True}),
    "causal, on the host": Case(metrics=True, ranks=2, osdp={"host_offload": True, "strategy": "fsdp"}),
    "classes": Case(model=classifier, vocabulary=2000, classes=3, metrics=True),
    "seq2seq": Case(model=seq2seq, vocabulary=32128, decoder=32, metrics=True),
    "seq2seq, generates": Case(model=seq2seq, vocabulary=32128, decoder=32, metrics=True, generates=True),
    "seq2seq, generates with beams": Case(
        model=seq2seq,
        vocabulary=32128,
        decoder=8,
        metrics=True,
        generates=True,
        arguments={"generation_num_beams": 4, "generation_max_length": 96},
    ),
    "seq2seq, generates on two ranks": Case(
        model=seq2seq,
        vocabulary=32128,
        decoder=8,
        metrics=True,
        generates=True,
        ranks=2,
        osdp={"strategy": "fsdp"},
        arguments={"generation_num_beams": 2, "generation_max_length": 96},
    ),
}


DAILY = (
    "causal, loss in chunks", "causal, in parts", "causal, logits kept, moved earlier",
    "causal, logits kept, two ranks", "causal, two replicas", "classes", "seq2seq",
)  # fmt: skip


def evaluated(case: Case, folder: str) -> tuple[int, int, str, int, str]:
    """Train one step and evaluate; return the estimated and the measured peak of the evaluation, the
    moment, the room for tensors, and the line that is printed."""
    kind = transformers.Seq2SeqTrainingArguments if case.generates else transformers.TrainingArguments
    asked = {"predict_with_generate": True} if case.generates else {}
    args = kind(
        output_dir=folder, max_steps=1, eval_strategy="steps", eval_steps=1, report_to="none", save_strategy="no",
        disable_tqdm=True, **{"per_device_train_batch_size": 4, **asked, **case.arguments},
    )  # fmt: skip
    data = rows(case.samples, case.vocabulary, case.classes, case.decoder)
    config = OSDPConfig(memory_limit=case.limit, hardware="a100-80", report=False, **case.osdp)
    trainer = (with_osdp(transformers.Seq2SeqTrainer) if case.generates else Trainer)(
        model=case.model(), args=args, train_dataset=data, eval_dataset=data, osdp=config,
        compute_metrics=count if case.metrics else None, preprocess_logits_for_metrics=case.reduces,
    )  # fmt: skip

    class Begins(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.reset_peak_memory_stats()

    trainer.add_callback(Begins())
    measured: list[int] = []

    class Ends(transformers.TrainerCallback):
        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            measured.append(torch.cuda.memory_stats()["requested_bytes.all.peak"] - CUBLAS_BYTES)

    trainer.add_callback(Ends())
    trainer.train()
    fitted = trainer._run.evaluation
    nbytes, moment = fitted.model.peak(fitted.loop)
    return nbytes, measured[-1], moment, fitted.room_bytes, fitted.line


@pytest.mark.parametrize("name", slow_but(CASES, daily=DAILY))
def test_evaluation_takes_what_the_estimate_says(tmp_path, name):
    case = CASES[name]
    env = {} if case.generates else MEMORY_ALONE  # tokens say when it ends
    memory = {"memory": case.limit.removesuffix("iB"), "env": env, "joins": False}
    for estimated, measured, moment, room, line in on_devices(evaluated, case.ranks, case, str(tmp_path), **memory):
        print(f"{name}: {estimated / 2**20:.1f} MiB estimated, {measured / 2**20:.1f} measured, in {moment}")
        assert -0.01 <= estimated / measured - 1 <= 0.03
        assert measured <= room
        assert ("parts" in line, "eval_accumulation_steps" in line) == (case.parts, case.moves)
