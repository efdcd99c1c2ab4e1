"""Run recipes one after the other in one group of gloo ranks."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from transformers.integrations import is_tensorboard_available

from tests.helpers.distributed import run_ranks
from tests.helpers.hardware import take_preset

RECIPES = Path(__file__).parents[2] / "recipes"
GPT2 = "n_layer=2,n_head=2,n_embd=32,n_positions=32,resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0"
BERT = (
    "num_hidden_layers=2,num_attention_heads=2,hidden_size=32,intermediate_size=64,max_position_embeddings=32,"
    "hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0"
)
COMMON: dict[str, object] = {
    "do_train": True, "do_eval": True, "config_overrides": GPT2, "vocab_size": 300, "block_size": 32,
    "max_train_samples": 64, "max_eval_samples": 16, "max_steps": 6, "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 8, "learning_rate": 0.02, "save_strategy": "no", "report_to": "none",
    "disable_tqdm": True, "hardware": "cpu",
}  # fmt: skip
"""A short training of a tiny model."""
LOOP = dict.fromkeys(("do_train", "do_eval", "save_strategy", "report_to"))
BATCHES = dict.fromkeys(("max_steps", "disable_tqdm", "per_device_train_batch_size", "per_device_eval_batch_size"))
OWN: dict[str, dict[str, object]] = {
    "run_mlm": {"config_overrides": BERT},
    "run_glue": {"config_overrides": BERT, "block_size": None, "max_seq_length": 16},
    "run_clm_no_trainer": LOOP,
    "train_plain": {**LOOP, **BATCHES, "global_batch_size": 8, "steps": 8},
}
"""Flags that a script has, or lacks (None), beside the common ones."""
Run = tuple[str, list[str]]
"""A script's name, and its command line."""


class Recipe:
    """A script of the recipes with flags that make it small; a flag that is None is left out."""

    def __init__(self, script: str, folder: Path):
        self.script, self.folder, self.output = script, folder, folder / "out"

    def command(self, *positional: str, **changes: object) -> list[str]:
        options = {"output_dir": self.output, **COMMON, **OWN.get(self.script, {}), **changes}
        flags = [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
        return [str(RECIPES / f"{self.script}.py"), *positional, *flags]

    def job(self, output: str, *positional: str, **changes: object) -> Run:
        """What `run_together` runs, with a folder of its own for what it writes."""
        given = {"output_dir": self.folder / output, **changes}
        return self.script, self.command(*positional, **given)


def run_together(folder: Path, runs: list[Run]) -> list[str]:
    """Run each on two ranks to its end, with caches in `folder`: what rank 0 printed in each."""
    return run_ranks(run_each, 2, runs, env={"HF_DATASETS_CACHE": str(folder / "cache")}, timeout_s=200.0)[0]


def run_each(runs: list[Run]) -> list[str]:
    sys.path.insert(0, str(RECIPES))
    import accelerate
    import datasets
    from accelerate.state import AcceleratorState

    cache = Path(os.environ["HF_DATASETS_CACHE"])
    datasets.config.HF_DATASETS_CACHE = cache  # it was read when datasets was imported, before the fork
    take_preset()
    accelerate.Accelerator.end_training = lambda self: None  # it would end the process group
    environment, printed = dict(os.environ), []
    for number, (script, argv) in enumerate(runs):
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(environment)  # precision travels in it
        sys.argv = argv
        output = cache.parent / f"rank{os.environ['RANK']}-{number}.out"
        with output.open("w") as file, redirect_stdout(file):
            importlib.import_module(script).main()
        printed.append(output.read_text())
    return printed


def perplexities(printed: str) -> dict[str, float]:
    return {when: float(value) for when, value in re.findall(r"perplexity (before|after) training: ([\d.]+)", printed)}


class Written:
    """What a run left in its folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def log(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]

    @property
    def steps(self) -> list[dict[str, float]]:
        return [line for line in self.log if "loss" in line]

    @property
    def plan(self) -> dict[str, Any]:
        return json.loads((self.folder / "osdp_report.json").read_text())["plan"]

    def load(self, auto_class: type = AutoModelForCausalLM) -> Any:
        """The model, which is in float32 and complete, beside a tokenizer of its size."""
        assert {value.dtype for value in load_file(self.folder / "model.safetensors").values()} == {torch.float32}
        model, report = auto_class.from_pretrained(self.folder, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert len(AutoTokenizer.from_pretrained(self.folder)) == model.config.vocab_size == 300
        return model


@pytest.fixture(autouse=True)
def recipe_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the recipes can be imported; no launcher has asked for anything."""
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A small BERT, trained by two ranks: a stream, bf16, checkpointed blocks, two micro-batches a step, a cosine.

    The folder, and what was printed.
    """
    recipe = Recipe("run_mlm", tmp_path_factory.mktemp("pretrained"))
    new, old = "activation_checkpointing", "gradient_checkpointing"  # which transformers 5.23 renamed
    job = recipe.job(
        "out", streaming=True, bf16=True, micro_batch_size=2, lr_scheduler_type="cosine", warmup_steps=2,
        report_to="tensorboard" if is_tensorboard_available() else "none", max_steps=20, max_train_samples=None,
        logging_steps=1, **{new if hasattr(TrainingArguments, new) else old: True},
    )  # fmt: skip
    return recipe.output, run_together(recipe.folder, [job])[0]
