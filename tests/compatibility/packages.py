"""Trainers of other packages: TRL, sentence-transformers; adapters of PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
import trl
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from .data import on_disk, preference_dataset, tokenizer
from .models import llama, tiny
from .row import Figures
from .side import Side, made, trained

_LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
_ONLINE = ("GRPO", "RLOO")


def by_trl(
    side: Side, kind: str, *, model: Any = "llama", data: Any = "text_dataset", adapters: bool = False,
    reference: bool = False, task: str = "CAUSAL_LM", **options: Any,
) -> Figures:  # fmt: skip
    given: dict[str, Any] = {"processing_class": tokenizer()}
    given |= {"peft_config": peft.LoraConfig(**_LORA, task_type=task)} if adapters else {}
    given |= {"ref_model": llama()} if reference else {}
    if kind in _ONLINE:
        given["reward_funcs"] = _rewards
        online = {"num_generations": 2, "max_completion_length": 6, "temperature": 1.0}
        options = {**online, "per_device_train_batch_size": side.samples, **options}
    else:
        options = {"max_length": 32, **options}
    samples = on_disk(side.folder / "data", made(data)) if kind == "DPO" else made(data)
    base, arguments = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    return trained(side, model, samples, base=base, arguments=arguments, given=given, **options)


def _rewards(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def dpo_without_reference(side: Side) -> Figures:
    """Train without a given reference model; TRL loads it again from the model's source."""
    folder = side.folder / "base"
    llama().save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    given, data = {"processing_class": tokenizer()}, preference_dataset()
    return trained(side, model, data, base=trl.DPOTrainer, arguments=trl.DPOConfig, given=given, max_length=32)


def _encoder(side: Side) -> SentenceTransformer:
    """Return a tiny BERT with mean pooling, loaded from a folder as sentence-transformers does."""
    folder = side.folder / "encoder"
    if not dist.is_initialized() or dist.get_rank() == 0:
        tiny("BertForMaskedLM").bert.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    return SentenceTransformer(modules=[Transformer(str(folder), max_seq_length=16), Pooling(32)], device="cpu")


def by_sentences(
    side: Side, loss: str = "MultipleNegativesRankingLoss", *, data: Any = "pairs", adapters: bool = False,
    then: Any = None, loss_options: Mapping[str, Any] | None = None,
) -> Figures:  # fmt: skip
    arguments = side.arguments(SentenceTransformerTrainingArguments)  # creates the process group
    model = _encoder(side)
    if adapters:
        model.add_adapter(peft.LoraConfig(**{**_LORA, "target_modules": ["query", "value"]}))
    given = {"loss": getattr(losses, loss)(model, **(loss_options or {}))}
    base = SentenceTransformerTrainer
    return trained(side, model, data, base=base, arguments=lambda **_: arguments, given=given, then=then)


def adapted(
    side: Side, *, kind: str = "LoraConfig", adapter: Mapping[str, Any] | None = None, model: Any = "llama",
    data: Any = "tokens", **options: Any,
) -> Figures:  # fmt: skip
    usual = {**_LORA, "task_type": "CAUSAL_LM"} if kind == "LoraConfig" else {}
    torch.manual_seed(1)
    adapted_model = peft.get_peft_model(made(model), getattr(peft, kind)(**{**usual, **(adapter or {})}))
    return trained(side, adapted_model, data, **options)
