"""Rows: the trainer of sentence-transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from .data import COUNT, sentences, tokenizer
from .models import tiny
from .row import Figures, Verdict, row
from .side import Side, trained

_GROUP = "sentence-transformers"


def _encoder(side: Side) -> SentenceTransformer:
    """Return a tiny BERT with mean pooling, loaded from a folder as sentence-transformers does."""
    folder = side.folder / "encoder"
    if not dist.is_initialized() or dist.get_rank() == 0:
        tiny("BertForMaskedLM").bert.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    return SentenceTransformer(modules=[Transformer(str(folder), max_seq_length=16), Pooling(32)], device="cpu")


def _pairs(scores: bool) -> Dataset:
    columns = {"anchor": sentences(), "positive": sentences(seed=8)}
    return Dataset.from_dict({**columns, **({"score": [number % 5 / 5 for number in range(COUNT)]} if scores else {})})


def _train(
    side: Side, *, loss: Any, data: Any, saves: bool = False, adapters: bool = False, **options: Any
) -> Figures:
    arguments = side.arguments(SentenceTransformerTrainingArguments, **options)  # creates the process group
    model = _encoder(side)
    if adapters:
        from peft import LoraConfig

        model.add_adapter(LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["query", "value"]))

    def then(trainer: Any) -> dict[str, float]:
        trainer.save_model(str(side.folder / "final"))
        dist.barrier()
        again = SentenceTransformer(str(side.folder / "final"), device="cpu")
        return {"sum": float(abs(again.encode(sentences(4))).sum())}

    return trained(
        side,
        model,
        data,
        base=SentenceTransformerTrainer,
        arguments=lambda **_: arguments,
        given={"loss": loss(model)},
        then=then if saves else None,
    )


row("MultipleNegativesRankingLoss", _GROUP)(
    partial(_train, loss=losses.MultipleNegativesRankingLoss, data=_pairs(False))
)
row("CosineSimilarityLoss", _GROUP)(partial(_train, loss=losses.CosineSimilarityLoss, data=_pairs(True)))
row("CoSENTLoss", _GROUP)(partial(_train, loss=losses.CoSENTLoss, data=_pairs(True)))
row("CachedMultipleNegativesRankingLoss", _GROUP)(
    partial(_train, loss=partial(losses.CachedMultipleNegativesRankingLoss, mini_batch_size=4), data=_pairs(False))
)
row("SoftmaxLoss, which has parameters of its own", _GROUP, expected=Verdict.REFUSED)(
    partial(
        _train, data=_pairs(False).add_column("label", [number % 3 for number in range(COUNT)]),
        loss=lambda model: losses.SoftmaxLoss(model, sentence_embedding_dimension=32, num_labels=3),
    )
)  # fmt: skip
row("save_model, then loaded", _GROUP)(
    partial(_train, loss=losses.MultipleNegativesRankingLoss, data=_pairs(False), saves=True)
)
row("MultipleNegativesRankingLoss, LoRA", _GROUP)(
    partial(_train, loss=losses.MultipleNegativesRankingLoss, data=_pairs(False), adapters=True)
)
