"""The loop without the Trainer: it learns, logs, goes on to the bit, and evaluates each sample once."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
DROPOUT = "n_layer=2,n_head=2,n_embd=32,n_positions=32,resid_pdrop=0.1,embd_pdrop=0.1,attn_pdrop=0.1"
OPTIONS = {
    "processes": 2, "config_overrides": DROPOUT, "micro_batch_size": 2, "max_steps": 10, "max_eval_samples": 19, "logging_steps": 1,
    "strategy": "fsdp", "compare": False,
}  # fmt: skip


@pytest.fixture
def recipes(monkeypatch):
    """The modules of the recipes can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))


def perplexities(output: str) -> dict[str, float]:
    return {when: float(value) for when, value in re.findall(r"perplexity (before|after) training: ([\d.]+)", output)}


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def plain_perplexity(folder: Path, samples: int) -> float:
    """What transformers alone says of a saved model on the recipe's validation text."""
    from model_loading import load_tokenizer
    from recipe_arguments import DataArguments, ModelArguments
    from text_data import load_text, to_blocks

    data = DataArguments(max_eval_samples=samples)
    tokenizer = load_tokenizer(ModelArguments(tokenizer_name=str(folder)), None, lambda: None)
    blocks = torch.tensor(to_blocks(load_text(data), tokenizer, 32, data)["validation"]["input_ids"][:])
    with torch.no_grad():
        return math.exp(AutoModelForCausalLM.from_pretrained(folder)(input_ids=blocks, labels=blocks).loss)


def test_two_processes_train_log_and_save(loop, recipes):
    """With dropout, two micro-batches a step, and two epochs."""
    first = loop.run(eval_steps=5, **OPTIONS)
    assert first.returncode == 0, first.stderr[-3000:]
    perplexity = perplexities(first.stdout)
    assert perplexity["after"] < 0.7 * perplexity["before"]

    log = lines(loop.output)
    steps = [line for line in log if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 11)) and steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    for line in steps:
        assert min(line[name] for name in ("perplexity", "gradient_norm", "tokens_per_s", "free_device_memory_bytes")) > 0
        assert line["loss_scale"] == 1.0
    assert steps[0]["learning_rate"] == 0.02 and steps[-1]["learning_rate"] == pytest.approx(0.002)
    evaluated = {line["step"]: line["eval_perplexity"] for line in log if "eval_perplexity" in line}
    assert list(evaluated) == [5, 10] and evaluated[10] == pytest.approx(perplexity["after"], abs=0.01)
    assert evaluated[10] == pytest.approx(plain_perplexity(loop.output, 19), rel=1e-5)  # 19 samples: one batch is not full

    saved = load_file(loop.output / "model.safetensors")
    model, report = AutoModelForCausalLM.from_pretrained(loop.output, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and model.config.architectures == ["GPT2LMHeadModel"]
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert len(AutoTokenizer.from_pretrained(loop.output)) == model.config.vocab_size == 300
    assert json.loads((loop.output / "osdp_report.json").read_text())["plan"]["accumulation_steps"] == 2


@pytest.mark.slow
def test_goes_on_to_the_bit(loop):
    """From a checkpoint amid the first of two epochs, with dropout."""
    first = loop.run(save_steps=5, **OPTIONS)
    assert first.returncode == 0, first.stderr[-3000:]
    again = loop.run(resume_from_checkpoint=loop.output / "checkpoint-5", output_dir=loop.folder / "again", **OPTIONS)
    assert again.returncode == 0, again.stderr[-3000:]
    saved, resumed = (load_file(folder / "model.safetensors") for folder in (loop.output, loop.folder / "again"))
    assert all(torch.equal(resumed[name], value) for name, value in saved.items())
    assert [line["step"] for line in lines(loop.folder / "again")] == list(range(6, 11))


@pytest.mark.slow
def test_fp16_logs_its_loss_scale(loop):
    done = loop.run(processes=2, max_steps=4, mixed_precision="fp16", hardware=None, logging_steps=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(line["loss_scale"] > 1 for line in lines(loop.output))
    assert {value.dtype for value in load_file(loop.output / "model.safetensors").values()} == {torch.float32}


BAD_INPUT = {
    "missing training file": (dict(train_file="none.txt"), "train file none.txt does not exist"),
    "less than a step": (dict(max_train_samples=3), "has 3 blocks of 32 tokens, less than the 4 samples of one optimizer step"),
    "limit below the feasible": (dict(memory_limit="100KiB"), "No plan fits 100.0 KiB"),
    "micro-batch that does not divide": (dict(micro_batch_size=3), "micro_batch_size=3 does not divide"),
    "switched off": (dict(osdp=False), "osdp false was given, but this loop runs by a plan"),
    "unknown schedule": (dict(lr_scheduler_type="zigzag"), "lr_scheduler_type='zigzag' is not known; use one of linear, cosine"),
    "unknown precision": (dict(mixed_precision="fp8"), "mixed_precision='fp8' is not known; use one of no, bf16, fp16"),
    "no learning": (dict(learning_rate=0), "learning_rate=0.0 must be greater than 0"),
    "no steps": (dict(max_steps=0), "max_steps=0 must be at least 1"),
    "no checkpoint": (dict(resume_from_checkpoint="nowhere"), "resume_from_checkpoint=nowhere holds no checkpoint"),
    "argument of the Trainer": (dict(do_train=True), "do_train"),
    "longer than the positions": (dict(block_size=64), "block_size=64 is longer than the model's 32 positions"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_line(loop, in_process, case):
    changes, part = BAD_INPUT[case]
    code, errors = in_process(loop, **changes)
    found = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert code == 2, errors
    assert len(found) == 1 and part in found[0], errors
    assert not loop.output.exists()


@pytest.mark.parametrize("key", ["do_train", "no_such_key"])
def test_a_file_for_the_trainer_is_refused(loop, in_process, key):
    (loop.folder / "trainer.yaml").write_text(f"{key}: true\n")
    code, errors = in_process(loop, "trainer.yaml")
    assert code == 2 and f"trainer.yaml has unknown keys {key}; known are" in errors and "TrainingArguments" not in errors


def test_its_file_says_what_that_of_the_trainer_says(recipes):
    import yaml

    demo, own = (yaml.safe_load((ROOT / "recipes" / "gpt2" / f"{name}.yaml").read_text()) for name in ("demo", "no_trainer"))
    assert own.items() - demo.items() == {("output_dir", "runs/gpt2-no-trainer")}
    assert demo.keys() - own.keys() == {"do_train", "do_eval", "save_strategy", "report_to"}


def test_only_matrices_decay(recipes):
    from run_clm_no_trainer import decayed

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    assert [(len(group["params"]), group["weight_decay"]) for group in decayed(model, 0.1)] == [(1, 0.1), (3, 0.0)]
