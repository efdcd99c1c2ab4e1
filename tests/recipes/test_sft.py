"""TRL's trainer under a plan: the recipe fine-tunes whole weights and adapters."""

from __future__ import annotations

import json
import sys

import pytest
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

from hf_osdp.integrations.launch import run_script
from tests.recipes.conftest import run_together

pytest.importorskip("trl", reason="needs the extra `trainers`")
TEXTS = [f"Once upon a time there was a little girl named Lily who had {count} dogs and a cat." for count in range(32)]


@pytest.mark.slow
def test_two_processes_fine_tune_and_save_the_model_and_adapters(tmp_path):
    pytest.importorskip("peft")
    whole, adapters, base, texts = (tmp_path / name for name in ("whole", "adapters", "base", "train.jsonl"))
    GPT2Tokenizer().train_new_from_iterator(TEXTS, 300, show_progress=False).save_pretrained(base)
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=64, vocab_size=300)).save_pretrained(base)
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    common = (
        f"sft.py --model_name_or_path {base} --train_file {texts} --learning_rate 0.02 --max_length 48"
        " --per_device_train_batch_size 4 --logging_steps 1 --memory_limit 64MiB --use_cpu true --bf16 false"
        " --report_to none"
    )
    flags = (
        f" --max_steps 8 --save_strategy steps --save_steps 8 --output_dir {whole}",
        f" --max_steps 2 --save_strategy no --use_peft true --lora_r 4 --output_dir {adapters}",
    )
    run_together(tmp_path, [("sft", (common + own).split()) for own in flags])
    history = json.loads((whole / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    losses = [line["loss"] for line in history if "loss" in line]
    assert len(losses) == 8 and losses[-1] < 0.8 * losses[0]
    _, loaded = AutoModelForCausalLM.from_pretrained(whole, output_loading_info=True)
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    for folder in (whole, adapters):
        report = json.loads((folder / "osdp_report.json").read_text())
        assert report["plan"]["world_size"] == 2 and report["estimated"]["peak_bytes"] <= 64 * 2**20
    assert (adapters / "adapter_model.safetensors").is_file() and not (adapters / "model.safetensors").exists()


@pytest.mark.parametrize("extra", ["", "--train_file a.jsonl --dataset_name b"])
def test_data_are_named_once(monkeypatch, capsys, tmp_path, extra):
    import sft

    given = f"sft.py --model_name_or_path x --use_cpu --output_dir {tmp_path / 'out'} {extra}"
    monkeypatch.setattr(sys, "argv", given.split())
    with pytest.raises(SystemExit) as stop:
        run_script(sft.main)
    assert stop.value.code == 2
    assert "error: Give model_name_or_path, and one of dataset_name and train_file." in capsys.readouterr().err
