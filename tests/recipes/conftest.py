"""Runs the recipes as a person does: in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from transformers.integrations import is_tensorboard_available

from tests.helpers.output import ends_of
from tests.recipes.ranks import Run, run_together

ROOT = Path(__file__).parents[2]
TINY = {
    "run_clm": "n_layer=2,n_head=2,n_embd=32,n_positions=32,resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0",
    "run_mlm": (
        "num_hidden_layers=2,num_attention_heads=2,hidden_size=32,intermediate_size=64,max_position_embeddings=32,"
        "hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0"
    ),
}
TINY |= {"run_glue": TINY["run_mlm"], "run_clm_no_trainer": TINY["run_clm"], "train_plain": TINY["run_clm"]}
OWN: dict[str, dict[str, object]] = {
    "run_glue": {"block_size": None, "max_seq_length": 16},
    "run_clm_no_trainer": dict.fromkeys(("do_train", "do_eval", "save_strategy", "report_to")),
    "train_plain": {
        **dict.fromkeys(("do_train", "do_eval", "save_strategy", "report_to", "disable_tqdm", "max_steps")),
        **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size")),
        "global_batch_size": 8, "steps": 8,
    },
}  # fmt: skip
"""Flags that a script has, or lacks, beside the common ones."""


class Recipe:
    """A script of the recipes with flags that make it small."""

    def __init__(self, script: str, folder: Path):
        self.script = script
        self.folder = folder
        self.output = folder / "out"

    def arguments(self, **changes: object) -> list[str]:
        """A short training of a tiny model; None leaves a flag out."""
        options: dict[str, object] = {
            "output_dir": self.output, "do_train": True, "do_eval": True, "config_overrides": TINY[self.script],
            "vocab_size": 300, "block_size": 32, "max_train_samples": 64, "max_eval_samples": 16, "max_steps": 6,
            "per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "learning_rate": 0.02,
            "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "hardware": "cpu",
        }  # fmt: skip
        options |= {**OWN.get(self.script, {}), **changes}
        return [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]

    def run(self, *positional: str, processes: int = 1, fails: bool = False, **changes: object) -> str:
        """Run it, several processes under `accelerate launch` or torchrun: what it printed, stderr if it must fail."""
        command = [sys.executable]
        if processes > 1 and self.script == "train_plain":
            command += f"-m torch.distributed.run --standalone --nproc-per-node {processes}".split()
        elif processes > 1:
            config = str(ROOT / "accelerate_configs" / "osdp_cpu.yaml")
            command += ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", config]
            command += ["--num_processes", str(processes)]
        command += self.command(*positional, **changes)
        options = {"capture_output": True, "text": True, "timeout": 200, "check": False}
        done = subprocess.run(command, cwd=self.folder, env=self.environment(), **options)
        assert (done.returncode != 0) == fails, ends_of(done.stderr)
        return done.stderr if fails else done.stdout

    def job(self, output: str, *positional: str, **changes: object) -> Run:
        """What `run_together` runs, with a folder of its own for what it writes."""
        given = {"output_dir": self.folder / output, "compare": False, **changes}
        return self.script, self.command(*positional, **given)

    def command(self, *positional: str, **changes: object) -> list[str]:
        """The script with its arguments."""
        return [str(ROOT / "recipes" / f"{self.script}.py"), *positional, *self.arguments(**changes)]

    def environment(self) -> dict[str, str]:
        """One thread, no network, no GPU."""
        return {
            **os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(self.folder / "cache"), "HF_MODULES_CACHE": str(self.folder / "modules"),
            "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip


class Pretrained(NamedTuple):
    output: Path
    printed: str
    tracker: str


def perplexities(printed: str) -> dict[str, float]:
    return {when: float(value) for when, value in re.findall(r"perplexity (before|after) training: ([\d.]+)", printed)}


def log_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def recipe_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The modules of the recipes can be imported; no launcher has asked for anything."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)


@pytest.fixture
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> Recipe:
    return Recipe(request.module.SCRIPT, tmp_path)


_CHECKPOINTING = (
    "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
)
"""transformers 5.23 gave `gradient_checkpointing` this name."""


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    """A small BERT, trained by two ranks: a stream, bf16, checkpointed blocks, two micro-batches a step, a cosine."""
    recipe = Recipe("run_mlm", tmp_path_factory.mktemp("pretrained"))
    tracker = "tensorboard" if is_tensorboard_available() else "none"
    job = recipe.job(
        "out", streaming=True, bf16=True, micro_batch_size=2, lr_scheduler_type="cosine", warmup_steps=2,
        report_to=tracker, max_steps=20, max_train_samples=None, logging_steps=1, **{_CHECKPOINTING: True},
    )  # fmt: skip
    return Pretrained(output=recipe.output, printed=run_together(recipe.folder, [job])[0], tracker=tracker)


def load_saved(folder: Path, auto_class: type = AutoModelForCausalLM) -> Any:
    """A saved model, in float32 and complete, beside a tokenizer of its size."""
    assert {value.dtype for value in load_file(folder / "model.safetensors").values()} == {torch.float32}
    model, report = auto_class.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size == 300
    return model
