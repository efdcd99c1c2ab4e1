"""TRL's trainers on two ranks take what the plan estimates, with reference models and their own losses."""

from __future__ import annotations

import json

import pytest
import torch
from datasets import Dataset

from hf_osdp import OSDPConfig, with_osdp

pytest.importorskip("trl", reason="needs the extra `trainers`")

KINDS = ("sft", "dpo", "kto", "reward")
WORDS = "once upon a time there was a little girl named lily she loved to play outside".split()


def _tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def _texts(count: int, length: int) -> list[str]:
    return [" ".join(WORDS[(row * 7 + place) % len(WORDS)] for place in range(length)) for row in range(count)]


def _config():
    from transformers import LlamaConfig

    return LlamaConfig(
        num_hidden_layers=4, hidden_size=128, intermediate_size=344, num_attention_heads=4, vocab_size=4096,
        max_position_embeddings=128,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=2, num_labels=1,
    )  # fmt: skip


def _trainer(kind: str):
    """Class, its arguments' class, the model's class, the data's columns, further arguments."""
    import trl
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)
    long, short, prompt = _texts(32, 40), _texts(32, 24), _texts(32, 8)
    match kind:
        case "sft":
            return trl.SFTTrainer, trl.SFTConfig, LlamaForCausalLM(_config()), {"text": long}, {}
        case "dpo":
            columns = {"prompt": prompt, "chosen": short, "rejected": long}
            return (
                trl.DPOTrainer, trl.DPOConfig, LlamaForCausalLM(_config()), columns,
                {"ref_model": LlamaForCausalLM(_config())},
            )  # fmt: skip
        case "kto":
            columns = {"prompt": prompt, "completion": long, "label": [row % 2 == 0 for row in range(32)]}
            return (
                trl.KTOTrainer, trl.KTOConfig, LlamaForCausalLM(_config()), columns,
                {"ref_model": LlamaForCausalLM(_config())},
            )  # fmt: skip
        case _:
            return (
                trl.RewardTrainer, trl.RewardConfig, LlamaForSequenceClassification(_config()),
                {"chosen": long, "rejected": short}, {},
            )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.on_ranks(2, init=False, timeout_s=200)
def test_estimated_peak_is_near_the_measured_one(kind, tmp_path):
    trainer_class, config_class, model, columns, more = _trainer(kind)
    args = config_class(
        output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=4, max_steps=4, logging_steps=1,
        report_to=[],
        bf16=False, save_strategy="no", max_length=64, disable_tqdm=True,
    )  # fmt: skip
    trainer = with_osdp(trainer_class)(
        model=model, args=args, train_dataset=Dataset.from_dict(columns), processing_class=_tokenizer(), **more,
        osdp=OSDPConfig(),
    )  # fmt: skip
    trainer.train()
    if trainer.is_world_process_zero():
        report = json.loads((tmp_path / "osdp_report.json").read_text())
        peaks = [report[of]["peak_bytes"] for of in ("estimated", "measured")]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.06), peaks
