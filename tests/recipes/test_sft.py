"""TRL's trainer under a plan: the recipe fine-tunes whole weights and adapters."""

from __future__ import annotations

import json
import sys

import pytest
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

from hf_osdp.integrations.launch import run_script
from tests.recipes.ranks import run_together

pytest.importorskip("trl", reason="needs the extra `trainers`")
TEXTS = [f"Once upon a time there was a little girl named Lily who had {count} dogs and a cat." for count in range(32)]


@pytest.fixture
def argv(tmp_path) -> list[str]:
    tokenizer = GPT2Tokenizer().train_new_from_iterator(TEXTS, 300, show_progress=False)
    tokenizer.save_pretrained(tmp_path / "base")
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=64, vocab_size=300)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    options = {
        "model_name_or_path": tmp_path / "base", "train_file": tmp_path / "train.jsonl", "max_steps": 8,
        "learning_rate": 0.02, "per_device_train_batch_size": 4, "max_length": 48, "logging_steps": 1,
        "save_strategy": "no", "memory_limit": "64MiB", "use_cpu": True, "bf16": False, "report_to": "none",
    }  # fmt: skip
    return ["sft.py", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]


@pytest.mark.slow
def test_two_processes_fine_tune_and_save_the_model_and_adapters(argv, tmp_path):
    whole, adapters = tmp_path / "whole", tmp_path / "adapters"
    lora = ["--use_peft", "true", "--lora_r", "4", "--max_steps", "2", "--output_dir", str(adapters)]
    steps = ["--save_strategy", "steps", "--save_steps", "8", "--output_dir", str(whole)]
    runs = [("sft", [*argv, *steps]), ("sft", [*argv, *lora])]
    run_together(tmp_path, runs if pytest.importorskip("peft") else runs[:1])
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
