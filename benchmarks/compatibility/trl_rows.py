"""Rows: TRL's trainers, with their defaults unless the row says otherwise."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers
from peft import LoraConfig
from torch import nn
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from .data import completion_dataset, judged_dataset, on_disk, preference_dataset, sentences, text_dataset, tokenizer
from .models import gpt2, llama, made
from .row import Figures, Oracle, row
from .side import Side, trained

_GROUP = "TRL"
_LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
_QUIET = {"max_length": 32}


def lora(task: str = "CAUSAL_LM") -> dict[str, Any]:
    """Return the trainer's LoRA argument."""
    return {"peft_config": LoraConfig(**_LORA, task_type=task, target_modules=["q_proj", "v_proj"])}


def _entered(
    name: str, train: Any, *, with_lora: bool = True, about: dict[str, Any] | None = None, **options: Any
) -> None:
    row(name, _GROUP, **(about or {}))(partial(train, **options))
    if with_lora:
        row(f"{name}, LoRA", _GROUP)(partial(train, adapters=True, **options))


def _sft(
    side: Side, *, make: Any = llama, data: Any = text_dataset, adapters: bool = False, **options: Any
) -> Figures:
    given = {"processing_class": tokenizer(), **(lora() if adapters else {})}
    return trained(side, make(), data(), base=SFTTrainer, arguments=SFTConfig, given=given, **{**_QUIET, **options})


_tied = partial(llama, tied=True)
_entered("SFT, untied head", _sft, about={"daily": True})
_entered("SFT, untied head, other layouts", _sft, with_lora=False, about={"shift": 1})
_entered("SFT, tied head", _sft, make=_tied)
_entered("SFT, GPT-2", _sft, make=gpt2, with_lora=False)
_entered("SFT, label smoothing", _sft, with_lora=False, label_smoothing_factor=0.1)
_entered("SFT, accumulation", _sft, with_lora=False, gradient_accumulation_steps=2)
_entered("SFT, packing", _sft, with_lora=False, packing=True, packing_strategy="wrapped")
_entered("SFT, packing without padding", _sft, with_lora=False, packing=True)
_entered("SFT, completions only", _sft, data=completion_dataset, with_lora=False)
_entered("SFT, gradient checkpointing", _sft, gradient_checkpointing=True)
_entered("SFT, loss_type=nll", _sft, with_lora=False, loss_type="nll")
_entered("SFT, loss_type=dft", _sft, with_lora=False, loss_type="dft")
_entered(
    "SFT, bf16",
    _sft,
    with_lora=False,
    bf16=True,
    about={"oracle": Oracle.FSDP2, "loss_tolerance": 5e-3, "norm_tolerance": 3e-2},
)


def _dpo(side: Side, *, reference: bool = False, adapters: bool = False, **options: Any) -> Figures:
    given = {
        "processing_class": tokenizer(),
        **(lora() if adapters else {}),
        **({"ref_model": llama()} if reference else {}),
    }
    data = on_disk(side.folder / "data", preference_dataset())
    return trained(side, llama(), data, base=DPOTrainer, arguments=DPOConfig, given=given, **{**_QUIET, **options})


_entered("DPO, reference model given", _dpo, reference=True, with_lora=False)
_entered(
    "DPO, sync_ref_model",
    _dpo,
    reference=True,
    with_lora=False,
    sync_ref_model=True,
    ref_model_mixup_alpha=0.5,
    ref_model_sync_steps=1,
)
_entered("DPO, precompute_ref_log_probs", _dpo, reference=True, with_lora=False, precompute_ref_log_probs=True)
row("DPO, LoRA, the base is the reference", _GROUP)(partial(_dpo, adapters=True))
row("DPO, LoRA, precompute_ref_log_probs", _GROUP)(partial(_dpo, adapters=True, precompute_ref_log_probs=True))
_entered("DPO, loss_type=ipo", _dpo, reference=True, with_lora=False, loss_type=["ipo"])


def _dpo_without(side: Side) -> Figures:
    """Train without a given reference model; TRL loads it again from the model's source."""
    folder = side.folder / "base"
    llama().save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    given = {"processing_class": tokenizer()}
    return trained(side, model, preference_dataset(), base=DPOTrainer, arguments=DPOConfig, given=given, **_QUIET)


row("DPO, no reference given", _GROUP)(_dpo_without)


def _kto(side: Side, *, adapters: bool = False, **options: Any) -> Figures:
    given = {"processing_class": tokenizer(), **(lora() if adapters else {"ref_model": llama()})}
    return trained(
        side, llama(), judged_dataset(), base=KTOTrainer, arguments=KTOConfig, given=given, **{**_QUIET, **options}
    )


_entered("KTO", _kto)


def _scorer() -> nn.Module:
    config = llama().config
    config.num_labels = 1
    return made(transformers.LlamaForSequenceClassification, config)


def _reward(side: Side, *, adapters: bool = False, **options: Any) -> Figures:
    given = {"processing_class": tokenizer(), **(lora("SEQ_CLS") if adapters else {})}
    data = preference_dataset()
    return trained(
        side, _scorer(), data, base=RewardTrainer, arguments=RewardConfig, given=given, **{**_QUIET, **options}
    )


_entered("Reward", _reward)


def _rewards(completions: list[str], **kwargs: Any) -> list[float]:
    """Return rewards that increase with the number of distinct words."""
    return [float(len(set(text.split()))) for text in completions]


def _online(side: Side, *, base: type, arguments: type, adapters: bool = False, **options: Any) -> Figures:
    from datasets import Dataset

    given = {"processing_class": tokenizer(), "reward_funcs": _rewards, **(lora() if adapters else {})}
    options = {
        "num_generations": 2,
        "max_completion_length": 6,
        "temperature": 1.0,
        "per_device_train_batch_size": side.samples,
        **options,
    }
    data = Dataset.from_dict({"prompt": sentences(16, words=4)})
    return trained(side, llama(), data, base=base, arguments=arguments, given=given, **options)


_entered("GRPO", partial(_online, base=GRPOTrainer, arguments=GRPOConfig), about={"daily": True})
_entered(
    "GRPO, accumulation",
    partial(_online, base=GRPOTrainer, arguments=GRPOConfig),
    with_lora=False,
    gradient_accumulation_steps=2,
)
_entered(
    "GRPO, beta=0.1",
    partial(_online, base=GRPOTrainer, arguments=GRPOConfig),
    adapters=True,
    with_lora=False,
    beta=0.1,
)
_entered("RLOO", partial(_online, base=RLOOTrainer, arguments=RLOOConfig), adapters=True, with_lora=False)
