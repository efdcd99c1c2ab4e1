"""Rows: adapters of PEFT under transformers' Trainer."""

from __future__ import annotations

from functools import partial
from typing import Any

import peft
import torch
import torch.distributed as dist

from .data import classes, tokens
from .models import gpt2, in_4_bits, in_8_bits, llama, tiny
from .row import Figures, Verdict, row
from .side import Side, trained

_GROUP = "PEFT"
_TARGETS = {"target_modules": ["q_proj", "v_proj"]}


def _adapted(side: Side, *, config: Any, make: Any = llama, data: Any = tokens, **options: Any) -> Figures:
    torch.manual_seed(1)
    return trained(side, peft.get_peft_model(make(), config()), data(), **options)


def _entered(name: str, config: Any, **options: Any) -> None:
    about = {key: options.pop(key) for key in ("daily", "expected") if key in options}
    row(name, _GROUP, **about)(partial(_adapted, config=config, **options))


def _lora(**changes: Any) -> Any:
    return peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "task_type": "CAUSAL_LM", **_TARGETS, **changes}
    )


_entered("LoRA", _lora, daily=True)
_entered("LoRA, GPT-2 (Conv1D)", partial(_lora, target_modules=["c_attn"], fan_in_fan_out=True), make=gpt2)
_entered("LoRA of all linear layers", partial(_lora, target_modules="all-linear"))
_entered("LoRA, DoRA", partial(_lora, use_dora=True))
_entered("LoRA, rsLoRA, bias", partial(_lora, use_rslora=True, bias="all"))
_entered("LoRA, modules_to_save=lm_head", partial(_lora, modules_to_save=["lm_head"]))
_entered("LoRA of the embedding", partial(_lora, target_modules=["embed_tokens", "q_proj"]))
_entered("LoRA, trainable tokens", partial(_lora, trainable_token_indices=[3, 4, 5]))
_entered("QLoRA, base in 4 bits", partial(_lora, target_modules="all-linear"), make=in_4_bits, daily=True)
_entered("QLoRA, gradient checkpointing", _lora, make=in_4_bits, gradient_checkpointing=True)
_entered("QLoRA, DoRA", partial(_lora, use_dora=True), make=in_4_bits, expected=Verdict.REFUSED)
_entered("LoRA, base in 8 bits (LLM.int8)", _lora, make=in_8_bits, expected=Verdict.REFUSED)
_entered("LoRA, gradient checkpointing", _lora, gradient_checkpointing=True)
_entered("LoRA, dropout", partial(_lora, lora_dropout=0.1))
_entered(
    "LoRA, classifier", lambda: peft.LoraConfig(r=4, lora_dropout=0.0, task_type="SEQ_CLS",
                                                target_modules=["query", "value"]),
    make=partial(tiny, "BertForSequenceClassification"), data=classes, average_tokens_across_devices=False,
)  # fmt: skip
_entered(
    "IA3",
    lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
)
_entered("prompt tuning", lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
_entered("prefix tuning", lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
_entered("LoHa", lambda: peft.LoHaConfig(r=4, module_dropout=0.0, **_TARGETS))
_entered("VeRA", lambda: peft.VeraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"]))


@row("LoRA, merge_and_unload, saved", _GROUP)
def _merged(side: Side) -> Figures:
    def then(trainer: Any) -> dict[str, float]:
        merged = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
        merged.save_pretrained(side.folder / "merged", is_main_process=dist.get_rank() == 0)
        dist.barrier()
        state = type(llama()).from_pretrained(side.folder / "merged").state_dict()
        return {name: float(value.double().abs().sum()) for name, value in state.items()}

    return _adapted(side, config=_lora, then=then)


@row("LoRA, saved and loaded as an adapter", _GROUP)
def _saved(side: Side) -> Figures:
    def then(trainer: Any) -> dict[str, float]:
        trainer.save_model(str(side.folder / "adapter"))
        dist.barrier()
        again = peft.PeftModel.from_pretrained(llama(), side.folder / "adapter")
        return {name: float(value.abs().sum()) for name, value in again.state_dict().items() if "lora" in name}

    return _adapted(side, config=_lora, then=then)
